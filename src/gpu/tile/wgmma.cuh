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

template <typename... Fragments>
ONCHIP_DEVICE void pin(Fragments&... fragments) {
  (pin(fragments), ...);
}

// Whole products of 16 `steps` columns of A, as one group. b: low descriptor word of B's first
// step. D = A B^T, B K-major (n rows); A in registers,
template <int n, bool bf16, int steps>
ONCHIP_DEVICE void issue_k_major(float (&d)[n / 2], const u32 (&a)[steps][4], u32 b) {
  Wgmma<n, bf16, steps>::rs(d, a, b, 0);
  wgmma_commit_group();
}
// or 64 rows in shared memory.
template <int n, bool bf16, int steps>
ONCHIP_DEVICE void issue_k_major(float (&d)[n / 2], u32 a, u32 b) {
  Wgmma<n, bf16, steps>::ss(d, a, b, 0);
  wgmma_commit_group();
}
// D += A B, B MN-major (n columns), A in registers.
template <int n, bool bf16, int steps>
ONCHIP_DEVICE void issue_mn_major(float (&d)[n / 2], const u32 (&a)[steps][4], u32 b) {
  Wgmma<n, bf16, steps>::rs_mn(d, a, b, 1);
  wgmma_commit_group();
}

}  // namespace onchip::tile
