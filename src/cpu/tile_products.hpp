// The two matrix products of attention on one tile of keys and one panel of query rows, S^T = K Q^T
// and O^T += V^T P^T: register tiles of broadcast keys or channels times vectors of query rows.
#pragma once

#include "cpu/attention_rows.hpp"
#include "cpu/simd.hpp"

namespace onchip::cpu::ONCHIP_CPU_ISA {
namespace {

// Rows of the register tile: kRegisterRows x kPanelVectors accumulators, kPanelVectors operands and
// a broadcast fill 27 of AVX-512's 32 registers, 15 of 16 elsewhere.
constexpr int kPanelVectors = 2;
constexpr int kRegisterRows = ONCHIP_CPU_LEVEL >= 2 ? 12 : 6;
constexpr int kTailRows = 4;

// Channels that one register sum of a score takes. One sum of 128 products of the same sign would
// put their rounding errors, all in one direction, into lse.
constexpr std::int64_t kSumChannels = 32;

// s_t[j][lane] = sum_d k[j][d] q_t[d][lane] for kKeys keys, of which only the first `count` exist;
// the rows of s_t past them are written but never read.
template <typename T, int kVectors, int kKeys>
[[gnu::noinline]] void score_tile(const T* q_t, std::int64_t head_dim, const T* k,
                                  std::int64_t k_stride, int count, T* s_t) {
  using S = Simd<T>;
  constexpr int kRows = kVectors * kLanes<T>;
  // One address for three rows: with it, its next and next but one are addressing modes.
  constexpr int kStep = kKeys % 3 == 0 ? 3 : 1;
  const T* row[kKeys / kStep];
  unroll<kKeys / kStep>([&](auto i) {
    const int key = kStep * i;
    row[i] = k + (key < count ? key : count - 1) * k_stride;
  });
  std::int64_t begin = 0;
  do {
    const std::int64_t end = smaller(begin + kSumChannels, head_dim);
    Vec<T> sum[kKeys][kVectors] = {};
    for (std::int64_t d = begin; d < end; ++d) {
      Vec<T> q[kVectors];
      unroll<kVectors>([&](auto v) { q[v] = S::load(q_t + v * kLanes<T>); });
      unroll<kKeys>([&](auto j) {
        const Vec<T> key = S::broadcast(row[j / kStep][j % kStep * k_stride]);
        unroll<kVectors>([&](auto v) { sum[j][v] = S::fma(key, q[v], sum[j][v]); });
      });
      unroll<kKeys / kStep>([&](auto i) { ++row[i]; });
      q_t += kRows;
    }
    unroll<kKeys>([&](auto j) {
      unroll<kVectors>([&](auto v) {
        T* at = s_t + j * kRows + v * kLanes<T>;
        S::store(at, begin == 0 ? sum[j][v] : S::load(at) + sum[j][v]);
      });
    });
    begin = end;
  } while (begin < head_dim);
}

// A tile of K or V as the products read it.
template <typename T>
struct Tile {
  const T* data = nullptr;
  std::int64_t stride = 0;
};

template <typename T, int kVectors>
void scores(const T* q_t, std::int64_t head_dim, const Tile<T>& k, int begin, int end, T* s_t) {
  constexpr int kRows = kVectors * kLanes<T>;
  int j = begin;
  for (; j + kRegisterRows <= end; j += kRegisterRows) {
    score_tile<T, kVectors, kRegisterRows>(q_t, head_dim, k.data + j * k.stride, k.stride,
                                           kRegisterRows, s_t + j * kRows);
  }
  for (; j < end; j += kTailRows) {
    const int count = static_cast<int>(smaller(kTailRows, end - j));
    score_tile<T, kVectors, kTailRows>(q_t, head_dim, k.data + j * k.stride, k.stride, count,
                                       s_t + j * kRows);
  }
}

// What becomes of the output that earlier tiles left.
template <typename T, int kVectors>
struct Rescale {
  bool first = true;  // there is none yet: o_t is not read
  Vec<T> alpha[kVectors];
};

// o_t[d][lane] = o_t[d][lane] alpha[lane] + sum_j v[j][d] p_t[j][lane] for kChannels channels, of
// which only the first `count` exist; the others repeat the last one. The tile's own sum is made
// apart, so that rounding errors grow with the number of tiles, not of keys.
template <typename T, int kVectors, int kChannels, bool kWhole>
[[gnu::noinline]] void output_tile(const T* p_t, int keys, const T* const* v, std::int64_t channel,
                                   int count, const Rescale<T, kVectors>& rescale, T* o_t) {
  using S = Simd<T>;
  constexpr int kRows = kVectors * kLanes<T>;
  Vec<T> sum[kChannels][kVectors] = {};
  std::int64_t offset[kChannels];
  unroll<kChannels>([&](auto d) { offset[d] = kWhole || d < count ? int{d} : count - 1; });
  for (int j = 0; j < keys; ++j) {
    const T* row = v[j] + channel;
    Vec<T> p[kVectors];
    unroll<kVectors>([&](auto i) { p[i] = S::load(p_t + i * kLanes<T>); });
    unroll<kChannels>([&](auto d) {
      const Vec<T> value = S::broadcast(row[kWhole ? std::int64_t{d} : offset[d]]);
      unroll<kVectors>([&](auto i) { sum[d][i] = S::fma(value, p[i], sum[d][i]); });
    });
    p_t += kRows;
  }
  T* o = o_t + channel * kRows;
  if (!rescale.first) {
    unroll<kChannels>([&](auto d) {
      unroll<kVectors>([&](auto i) {
        const Vec<T> before = S::load(o + d * kRows + i * kLanes<T>);
        sum[d][i] = S::fma(before, rescale.alpha[i], sum[d][i]);
      });
    });
  }
  unroll<kChannels>([&](auto d) {
    unroll<kVectors>([&](auto i) { S::store(o + d * kRows + i * kLanes<T>, sum[d][i]); });
  });
}

template <typename T, int kVectors>
void outputs(const T* p_t, int keys, const T* const* v, std::int64_t head_dim_v,
             const Rescale<T, kVectors>& rescale, T* o_t) {
  std::int64_t d = 0;
  for (; d + kRegisterRows <= head_dim_v; d += kRegisterRows) {
    output_tile<T, kVectors, kRegisterRows, true>(p_t, keys, v, d, kRegisterRows, rescale, o_t);
  }
  for (; d + kTailRows <= head_dim_v; d += kTailRows) {
    output_tile<T, kVectors, kTailRows, true>(p_t, keys, v, d, kTailRows, rescale, o_t);
  }
  if (d < head_dim_v) {
    output_tile<T, kVectors, kTailRows, false>(p_t, keys, v, d, static_cast<int>(head_dim_v - d),
                                               rescale, o_t);
  }
}

}  // namespace
}  // namespace onchip::cpu::ONCHIP_CPU_ISA
