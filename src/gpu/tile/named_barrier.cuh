// The sixteen hardware barriers of a block; 0 is __syncthreads. `threads` counts those that sync
// and those that only arrive.
#pragma once
#include "gpu/tile/ptx.cuh"

namespace onchip::tile {

ONCHIP_DEVICE void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
ONCHIP_DEVICE void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// A sync that tells whether `flag` held in any of the threads.
ONCHIP_DEVICE bool named_barrier_any(int id, int threads, bool flag) {
  u32 any;
  asm volatile(
      "{.reg .pred p, q; setp.ne.u32 p, %1, 0; bar.red.or.pred q, %2, %3, p; "
      "selp.u32 %0, 1, 0, q;}"
      : "=r"(any)
      : "r"(static_cast<u32>(flag)), "r"(id), "r"(threads)
      : "memory");
  return any != 0;
}

}  // namespace onchip::tile
