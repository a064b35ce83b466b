// The two matrix products of attention for a few query rows: channels lie on the lanes of the
// vectors, so that one row fills them as well as many, and keys are read as they lie in memory.
#pragma once

#include "cpu/simd.hpp"

namespace onchip::cpu::ONCHIP_CPU_ISA {
namespace {

// Rows that share one read of a key in registers.
template <typename T>
constexpr int kBlockRows = kLanes<T> < 4 ? kLanes<T> : 4;

constexpr int kOutputVectors = ONCHIP_CPU_LEVEL >= 2 ? 16 : 8;  // accumulators of an output block
constexpr int kMostVectors = 8;                                 // of one row

// Asks memory for the 64 bytes around from + distance, wherever that is, into the outer private
// cache: the inner one would lose them before they are used.
ONCHIP_INLINE void prefetch(const std::byte* from, std::int64_t distance) {
  __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<std::uintptr_t>(from) +
                                                   static_cast<std::uintptr_t>(distance)),
                     0, 2);
  // NOTE(codegen): gcc 12 takes a function that only prefetches for one without effect and drops
  // its calls.
  asm volatile("");  // NOLINT(portability-no-assembler)
}

// Lane i of the result is the sum of the lanes of x[i]; the order of its additions is that of every
// other lane. x is used up.
template <typename T, int kCount = kLanes<T>>
ONCHIP_INLINE Vec<T> add_lanes(Vec<T>* x) {
  if constexpr (kCount == 1) {
    return x[0];
  } else {
    using Lanes = MakeIndexList<kLanes<T>>::Type;
    unroll<kCount / 2>([&](auto i) {
      x[i] = interleave_low<T>(x[i], x[i + kCount / 2], Lanes{}) +
             interleave_high<T>(x[i], x[i + kCount / 2], Lanes{});
    });
    return add_lanes<T, kCount / 2>(x);
  }
}

// s[r][j] = sum_d q[r][d] k[j][d] for kRows rows and keys [begin, end). A row of q is padded with
// zeros to whole vectors; up to kLanes<T> - 1 numbers behind s[r][end - 1] are written too. What
// lies `ahead` bytes from each key is brought from memory meanwhile (0: nothing is), a little at a
// time: what a core can have open is not much, and a burst would hold up the arithmetic.
template <DType kStored, typename T, int kRows>
[[gnu::noinline]] void score_rows(const T* q, std::int64_t q_stride, std::int64_t dim,
                                  const std::byte* const* k, std::int64_t k_offset, int begin,
                                  int end, std::int64_t ahead, T* s, std::int64_t s_stride) {
  using S = Simd<T>;
  constexpr int kCount = kLanes<T>;
  constexpr int kKeys = kCount / kRows;
  constexpr std::int64_t kSize = sizeof(typename Arithmetic<kStored>::Element);
  for (int j = begin; j < end; j += kKeys) {
    const std::byte* row[kKeys];
    unroll<kKeys>([&](auto i) { row[i] = k[j + i < end ? j + i : end - 1] + k_offset; });
    Vec<T> sum[kCount] = {};
    const auto step = [&](std::int64_t d, int count) __attribute__((always_inline)) {
      if (ahead != 0 && d * kSize % 64 == 0) {
        unroll<kKeys>([&](auto i) { prefetch(row[i] + d * kSize, ahead); });
      }
      Vec<T> query[kRows];
      unroll<kRows>([&](auto r) { query[r] = S::load(q + r * q_stride + d); });
      unroll<kKeys>([&](auto i) {
        const Vec<T> key = load_numbers<kStored, T>(row[i] + d * kSize, count);
        unroll<kRows>(
            [&](auto r) { sum[r * kKeys + i] = S::fma(query[r], key, sum[r * kKeys + i]); });
      });
    };
    std::int64_t d = 0;
    for (; d + kCount <= dim; d += kCount) step(d, kCount);
    if (d < dim) step(d, static_cast<int>(dim - d));
    T scores[kCount];
    S::store(scores, add_lanes<T>(sum));
    unroll<kRows>(
        [&](auto r) { std::memcpy(s + r * s_stride + j, scores + r * kKeys, kKeys * sizeof(T)); });
  }
}

// o[r][d] += sum_j p[r][j] v[j][d], key after key, for kVectors vectors of channels, of the last of
// which the first `count` exist. `ahead` as in score_rows.
template <DType kStored, typename T, int kRows, int kVectors>
[[gnu::noinline]] void output_block(const T* p, std::int64_t p_stride, int keys,
                                    const std::byte* const* v, std::int64_t v_offset,
                                    std::int64_t ahead, int count, T* o, std::int64_t o_stride) {
  using S = Simd<T>;
  constexpr int kCount = kLanes<T>;
  constexpr std::int64_t kBytes = kCount * sizeof(typename Arithmetic<kStored>::Element);
  Vec<T> sum[kRows][kVectors];
  unroll<kRows>([&](auto r) {
    unroll<kVectors>([&](auto c) { sum[r][c] = S::load(o + r * o_stride + c * kCount); });
  });
  for (int j = 0; j < keys; ++j) {
    const std::byte* row = v[j] + v_offset;
    if (ahead != 0) {
      unroll<(kVectors * kBytes + 63) / 64>([&](auto i) { prefetch(row + i * 64, ahead); });
    }
    Vec<T> value[kVectors];
    unroll<kVectors>([&](auto c) {
      value[c] = load_numbers<kStored, T>(row + c * kBytes, c + 1 < kVectors ? kCount : count);
    });
    unroll<kRows>([&](auto r) {
      const Vec<T> weight = S::broadcast(p[r * p_stride + j]);
      unroll<kVectors>([&](auto c) { sum[r][c] = S::fma(weight, value[c], sum[r][c]); });
    });
  }
  unroll<kRows>([&](auto r) {
    unroll<kVectors>([&](auto c) { S::store(o + r * o_stride + c * kCount, sum[r][c]); });
  });
}

template <DType kStored, typename T, int kRows>
void output_rows(const T* p, std::int64_t p_stride, int keys, const std::byte* const* v,
                 std::int64_t v_offset, std::int64_t dim, std::int64_t ahead, T* o,
                 std::int64_t o_stride) {
  constexpr int kCount = kLanes<T>;
  constexpr int kVectors =
      kOutputVectors / kRows < kMostVectors ? kOutputVectors / kRows : kMostVectors;
  constexpr std::int64_t kSize = sizeof(typename Arithmetic<kStored>::Element);
  std::int64_t d = 0;
  for (; d + kVectors * kCount <= dim; d += kVectors * kCount) {
    output_block<kStored, T, kRows, kVectors>(p, p_stride, keys, v, v_offset + d * kSize, ahead,
                                              kCount, o + d, o_stride);
  }
  for (; d < dim; d += kCount) {
    const int count = static_cast<int>(dim - d < kCount ? dim - d : std::int64_t{kCount});
    output_block<kStored, T, kRows, 1>(p, p_stride, keys, v, v_offset + d * kSize, ahead, count,
                                       o + d, o_stride);
  }
}

}  // namespace
}  // namespace onchip::cpu::ONCHIP_CPU_ISA
