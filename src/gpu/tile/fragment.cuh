// Register fragments of 16-bit matrices and fp32 accumulators, as wgmma wants and leaves them.
// Accumulator d[] of m64nN: warp w of the warpgroup holds rows 16 w + g and 16 w + g + 8, where
// g = lane / 4; d[4 j], d[4 j + 1] are columns 8 j + 2 (lane % 4) and the next of row g,
// d[4 j + 2], d[4 j + 3] those of row g + 8. The A operand of m64k16 step k, in registers, is
// d[8 k .. 8 k + 7] packed in pairs: scores become the next product's operand without a shuffle.
#pragma once
#include "gpu/tile/swizzle.cuh"

namespace onchip::tile {

// First of the thread's two rows; the other is 8 below.
ONCHIP_DEVICE int accumulator_row(int thread) { return thread / 32 * 16 + thread % 32 / 4; }
// First of the thread's columns among eight.
ONCHIP_DEVICE int accumulator_column(int thread) { return thread % 4 * 2; }

// Two values, rounded to nearest even, low half first.
template <bool bf16>
ONCHIP_DEVICE u32 pack(float low, float high) {
  u32 r;
  if constexpr (bf16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  }
  return r;
}
// Accumulator to A operand: d[8 k .. 8 k + 7] are the 16 columns of step k.
template <bool bf16, int n>
ONCHIP_DEVICE void pack_accumulator(u32 (&packed)[n / 8][4], const float (&d)[n]) {
#pragma unroll
  for (int i = 0; i < n / 2; ++i) packed[i / 4][i % 4] = pack<bf16>(d[2 * i], d[2 * i + 1]);
}

ONCHIP_DEVICE void ldmatrix_x4(u32 address, u32& a, u32& b, u32& c, u32& d) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
               : "r"(address)
               : "memory");
}
ONCHIP_DEVICE void stmatrix_x4(u32 address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

// Address that `thread` of the warpgroup gives to ldmatrix.x4 or stmatrix.x4 for 16 columns
// (`step`) of a 64-row matrix.
ONCHIP_DEVICE u32 fragment_address(u32 matrix, int thread, int step) {
  const u32 row = thread / 32 * 16 + thread % 16;
  return matrix + step / 4 * (64 * kChunkRowBytes) +
         swizzle_128b(row, step % 4 * 2 + thread % 32 / 16);
}

// A operand of a 64-row matrix in shared memory: 16 columns, or all.
ONCHIP_DEVICE void load_fragment(u32 (&a)[4], u32 matrix, int thread, int step) {
  ldmatrix_x4(fragment_address(matrix, thread, step), a[0], a[1], a[2], a[3]);
}
template <int steps>
ONCHIP_DEVICE void load_fragments(u32 (&a)[steps][4], u32 matrix, int thread) {
#pragma unroll
  for (int k = 0; k < steps; ++k) load_fragment(a[k], matrix, thread, k);
}
// 16 packed columns (`step`) of an accumulator to a 64-row matrix in shared memory.
ONCHIP_DEVICE void store_fragment(u32 matrix, int thread, int step, const u32 (&d)[4]) {
  stmatrix_x4(fragment_address(matrix, thread, step), d[0], d[1], d[2], d[3]);
}
// An accumulator, its two rows times their factors. A row that is not live becomes zeros, whatever
// it holds: a select, not a product, since 0 * NaN is NaN.
template <bool bf16, int n>
ONCHIP_DEVICE void store_accumulator(u32 matrix, int thread, const float (&d)[n],
                                     const float (&factor)[2], const bool (&live)[2]) {
#pragma unroll
  for (int k = 0; k < n / 8; ++k) {
    u32 packed[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float x = d[8 * k + 2 * i] * factor[i % 2], y = d[8 * k + 2 * i + 1] * factor[i % 2];
      packed[i] = live[i % 2] ? pack<bf16>(x, y) : 0u;
    }
    store_fragment(matrix, thread, k, packed);
  }
}

// Flips the signs of packed values where `sign` has their sign bits.
template <int steps>
ONCHIP_DEVICE void negate_fragments(u32 (&a)[steps][4], u32 sign) {
#pragma unroll
  for (int k = 0; k < steps; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[k][i] ^= sign;
  }
}
// All of a 64-row matrix in shared memory, by the 128 threads that own its rows.
template <int steps>
ONCHIP_DEVICE void negate_matrix(u32 matrix, int thread, u32 sign) {
#pragma unroll
  for (int k = 0; k < steps; ++k) {
    u32 a[1][4];
    load_fragment(a[0], matrix, thread, k);
    negate_fragments(a, sign);
    store_fragment(matrix, thread, k, a[0]);
  }
}

}  // namespace onchip::tile
