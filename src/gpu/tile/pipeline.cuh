// A block's mbarriers, two of each kind, that guard rings of two slots: use n of a ring lies in
// slot n % 2, whose full phase has parity n / 2 % 2; a producer waits for the empty phase
// before it.
#pragma once
#include "gpu/tile/mbarrier.cuh"

namespace onchip::tile {

// About four seconds: far above any wait of a kernel that makes progress.
inline constexpr i64 kBoundedWaitCycles = 1ll << 33;

// Kind: the kernel's enum of barriers, which lie in its order; its last is `count`. `bounded`: a
// wait that does not end writes a Failure {1, block, thread, role, barrier, stage, parity} and
// traps.
template <typename Kind, typename Failure, bool bounded>
struct Pipeline {
  u32 barriers;  // shared address
  Failure* failure;
  int role;

  ONCHIP_MEMBER u32 barrier(Kind kind, int i) const {
    return barriers + 16 * static_cast<int>(kind) + 8 * i;
  }
  // arrivals[kind]: how many end a phase. By one thread; a barrier of the block must follow.
  template <int kinds>
  ONCHIP_MEMBER void init(const int (&arrivals)[kinds]) const {
    static_assert(kinds == static_cast<int>(Kind::count));
    for (int i = 0; i < 2 * kinds; ++i) mbarrier_init(barriers + 8 * i, arrivals[i / 2]);
    fence_mbarrier_init();
  }
  ONCHIP_MEMBER void arrive(Kind kind, int n) const { mbarrier_arrive(barrier(kind, n & 1)); }
  ONCHIP_MEMBER void wait(Kind kind, int i, int parity) const {
    if constexpr (bounded) {
      if (!mbarrier_wait_bounded(barrier(kind, i), parity, kBoundedWaitCycles)) {
        fail({1, static_cast<int>(blockIdx.x), static_cast<int>(threadIdx.x), role,
              static_cast<int>(kind), i, parity});
      }
    } else {
      mbarrier_wait(barrier(kind, i), parity);
    }
  }
  ONCHIP_MEMBER void wait_full(Kind kind, int n) const { wait(kind, n & 1, n >> 1 & 1); }
  ONCHIP_MEMBER void wait_empty(Kind kind, int n) const { wait(kind, n & 1, (n >> 1 & 1) ^ 1); }

  // The first to fail reports.
  ONCHIP_MEMBER void fail(const Failure& what) const {
    if (failure != nullptr && atomicCAS(&failure->seen, 0, -1) == 0) {
      *failure = what;
      __threadfence_system();
    }
    trap();
  }
};

}  // namespace onchip::tile
