// Numbered pieces of work for the blocks of one launch, by a counter in memory that may hold
// anything when the launch begins: nobody has to zero it before, and launches on other streams have
// their own. The first block to come opens the counter under the launch's number, the last one to
// leave closes it, so that a captured launch can be repeated.
#pragma once
#include "gpu/tile/ptx.cuh"

namespace onchip::tile {

struct WorkCounter {
  u64 owner;  // number of the launch that opened it; with bit 0 set: that is opening it
  int next;
  int left;  // blocks
};

// A block's hand on the counter; one thread's.
struct WorkTaker {
  WorkCounter* counter;
  u64 launch;  // even; the memory holds it beforehand with a chance of 2^-63
  bool opened = false;

  // 0, 1, 2, ..., each to one block.
  ONCHIP_MEMBER int take() {
    open();
    return atomicAdd(&counter->next, 1);
  }
  // Once, by each of the launch's blocks; nothing may be taken after.
  ONCHIP_MEMBER void leave(int blocks) {
    open();
    if (atomicAdd(&counter->left, 1) == blocks - 1) atomicExch(&counter->owner, 0);
  }

 private:
  ONCHIP_MEMBER void open() {
    if (opened) return;
    opened = true;
    volatile u64* const owner = &counter->owner;
    for (u64 seen = *owner; seen != launch;) {
      if (seen == (launch | 1)) {
        seen = *owner;
        continue;
      }
      const u64 before = atomicCAS(&counter->owner, seen, launch | 1);
      if (before == seen) {
        counter->next = counter->left = 0;
        __threadfence();
        atomicExch(&counter->owner, launch);
        break;
      }
      seen = before;
    }
    __threadfence();
  }
};

}  // namespace onchip::tile
