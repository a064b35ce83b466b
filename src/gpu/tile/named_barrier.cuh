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

}  // namespace onchip::tile
