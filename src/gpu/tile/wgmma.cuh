// Warpgroup matrix products: fences, groups and the compiler's side of their asynchrony. The
// products themselves are generated text (wgmma_shapes.cuh).
#pragma once
#include "gpu/tile/swizzle.cuh"
#include "gpu/tile/wgmma_shapes.cuh"

namespace onchip::tile {

// Before the first product, and after ordinary code has touched accumulators or A registers.
ONCHIP_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
ONCHIP_DEVICE void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// At most `pending` groups are still in flight.
template <int pending>
ONCHIP_DEVICE void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// NOTE(codegen): an empty asm that reads and writes the registers of a product in flight, so that
// the compiler moves no access of theirs across the fence before it or the wait after it; nvcc
// 13.0, noticed as a C7514-like warning or as wrong results in tests/tile.
template <int n>
ONCHIP_DEVICE void pin(float (&r)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+f"(r[i])::"memory");
}
template <int n>
ONCHIP_DEVICE void pin(u32 (&r)[n][4]) {
#pragma unroll
  for (int i = 0; i < n; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) asm volatile("" : "+r"(r[i][j])::"memory");
  }
}

}  // namespace onchip::tile
