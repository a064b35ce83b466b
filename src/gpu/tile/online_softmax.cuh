// Softmax over blocks of keys (Milakov and Gimelshein, "Online normalizer calculation for softmax",
// 2018) on accumulator fragments. A row's four threads hold its maximum alike and each its own part
// of the sum. Scores are raw products; c > 0 turns them into base-2 logits.
#pragma once
#include "gpu/tile/ptx.cuh"

namespace onchip::tile {

// Of the thread's two rows. maximum = -inf: no visible key so far.
struct SoftmaxState {
  float maximum[2];
  float sum[2];     // of 2^(c (s - maximum)) over this thread's columns
  float factor[2];  // what older sums and outputs are to be multiplied by
};

// An output keeps a stale maximum until its row has grown by more than 2^8: probabilities stay
// below 2^8, far inside fp16's range, and almost every block leaves the output alone.
inline constexpr float kLazyLog2 = 8.0f;

ONCHIP_DEVICE float row_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(kWarpMask, x, 1));
  return fmaxf(x, __shfl_xor_sync(kWarpMask, x, 2));
}
ONCHIP_DEVICE float row_sum(float x) {
  x += __shfl_xor_sync(kWarpMask, x, 1);
  return x + __shfl_xor_sync(kWarpMask, x, 2);
}

// Scores of the two rows from column `limit` on become -inf; limits count from the thread's first
// column. A select, so whatever was there is gone, NaN too.
template <int n>
ONCHIP_DEVICE void mask_columns(float (&s)[n], int limit0, int limit1) {
#pragma unroll
  for (int j = 0; j < n / 4; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (8 * j + e >= limit0) s[4 * j + e] = -infinity();
      if (8 * j + e >= limit1) s[4 * j + 2 + e] = -infinity();
    }
  }
}

// Row r's maximum and factor after a block of which this thread has seen `top`.
template <bool first, bool masked, bool exact>
ONCHIP_DEVICE void move_maximum(int r, float top, SoftmaxState& state, float c) {
  float x = row_max(top);
  if constexpr (first) {
    state.factor[r] = 1.0f;
  } else {
    const float old = state.maximum[r];
    x = fmaxf(x, old);
    if constexpr (!exact) x = (x - old) * c > kLazyLog2 ? x : old;
    // Old -inf: the factor is 2^-inf = 0, and so is everything it multiplies.
    state.factor[r] = ex2((old - (masked && x == -infinity() ? 0.0f : x)) * c);
  }
  state.maximum[r] = x;
}

// One block: s becomes its probabilities, relative to the new maximum. `masked`: rows may still be
// without a key, so maxima may be -inf. `vote`: the four threads of a row exchange their maxima
// only if some row of the warp has grown too far; without it always, and where `masked` maxima are
// exact.
template <bool first, bool masked, bool vote, int n>
ONCHIP_DEVICE void softmax_block(float (&s)[n], SoftmaxState& state, float c) {
  float top[2], reference[2];
  const auto refer = [&](int r) {
    reference[r] = masked && state.maximum[r] == -infinity() ? 0.0f : state.maximum[r] * c;
  };
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float x = s[2 * r], y = s[2 * r + 1];
#pragma unroll
    for (int j = 1; j < n / 4; ++j) {
      x = fmaxf(x, s[4 * j + 2 * r]);
      y = fmaxf(y, s[4 * j + 2 * r + 1]);
    }
    top[r] = fmaxf(x, y);
    if constexpr (first || !vote) {
      move_maximum<first, masked, masked>(r, top[r], state, c);
      refer(r);
    }
  }
  if constexpr (!first && vote) {
    const auto grows = [&](int r) { return (top[r] - state.maximum[r]) * c > kLazyLog2; };
    state.factor[0] = state.factor[1] = 1.0f;
    if (__any_sync(kWarpMask, grows(0) || grows(1))) {
      move_maximum<false, masked, false>(0, top[0], state, c);
      move_maximum<false, masked, false>(1, top[1], state, c);
    }
    refer(0);
    refer(1);
  }
#pragma unroll
  for (int i = 0; i < n; ++i) s[i] = ex2(__fmaf_rn(s[i], c, -reference[i / 2 % 2]));
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float x = s[2 * r], y = s[2 * r + 1];
#pragma unroll
    for (int j = 1; j < n / 4; ++j) {
      x += s[4 * j + 2 * r];
      y += s[4 * j + 2 * r + 1];
    }
    state.sum[r] = first ? x + y : state.sum[r] * state.factor[r] + (x + y);
  }
}

// Output accumulators follow the maxima. A warp in which no row moved does nothing.
template <int n>
ONCHIP_DEVICE void rescale(float (&o)[n], const SoftmaxState& state) {
  if (!__any_sync(kWarpMask, state.factor[0] != 1.0f || state.factor[1] != 1.0f)) return;
#pragma unroll
  for (int i = 0; i < n; ++i) o[i] *= state.factor[i / 2 % 2];
}

}  // namespace onchip::tile
