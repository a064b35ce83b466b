// Scores of a few rows over a tile of keys into probabilities: the step of an online softmax.
#pragma once

#include "cpu/simd.hpp"

namespace onchip::cpu::ONCHIP_CPU_ISA {
namespace {

template <typename T, int kBy, int... kI>
ONCHIP_INLINE Vec<T> turned(Vec<T> x, IndexList<kI...>) {
  return __builtin_shufflevector(x, x, ((kI + kBy) % kLanes<T>)...);
}

// f over all lanes: of lanes i and i + kLanes / 2 first, so that neighbours come last.
template <typename T, int kHalf = kLanes<T> / 2, typename F>
ONCHIP_INLINE T across(Vec<T> x, F f) {
  if constexpr (kHalf == 0) {
    return x[0];
  } else {
    using Lanes = MakeIndexList<kLanes<T>>::Type;
    return across<T, kHalf / 2>(f(x, turned<T, kHalf>(x, Lanes{})), f);
  }
}

template <typename T>
T exp_of(T x) {
  return exp2<T>(Simd<T>::broadcast(x) * Simd<T>::broadcast(kLog2E<T>))[0];
}

// Of rows that follow each other: the largest score so far, the sum of the probabilities relative
// to it, and what remains, after a tile, of what there was before it.
template <typename T>
struct RowSums {
  T* max;
  T* sum;
  T* kept;
};

// Scores s[r][j], j in [begin, end) in whole vectors, -inf where a key is not seen, become
// probabilities relative to the rows' new maxima. `largest`: each row's, lane by lane.
template <typename T, int kRows>
ONCHIP_INLINE void scores_to_probabilities(T* s, std::int64_t s_stride, int begin, int end,
                                           const Vec<T>* largest, const RowSums<T>& rows) {
  using S = Simd<T>;
  constexpr int kCount = kLanes<T>;
  T before[kRows];
  T shift[kRows];
  unroll<kRows>([&](auto r) {
    before[r] = rows.max[r];
    const T own = across<T>(largest[r], [](Vec<T> a, Vec<T> b) { return S::max(a, b); });
    const T maximum = own > before[r] ? own : before[r];
    rows.max[r] = maximum;
    // Where no score is above -inf yet, subtract 0 instead: all probabilities are then exactly 0.
    shift[r] = maximum == -kInfinity<T> ? T{0} : maximum;
  });
  const Vec<T> log2e = S::broadcast(kLog2E<T>);
  Vec<T> sums[kRows] = {};
  for (int j = begin; j < end; j += kCount) {
    unroll<kRows>([&](auto r) {
      T* at = s + r * s_stride + j;
      const Vec<T> p = exp2<T>((S::load(at) - S::broadcast(shift[r])) * log2e);
      sums[r] = sums[r] + p;
      S::store(at, p);
    });
  }
  unroll<kRows>([&](auto r) {
    const T kept = exp_of<T>(before[r] - shift[r]);
    const T sum = across<T>(sums[r], [](Vec<T> a, Vec<T> b) { return a + b; });
    rows.kept[r] = kept;
    rows.sum[r] = rows.sum[r] * kept + sum;
  });
}

// Of rows that see all `keys` keys, a multiple of the lanes, and whose scores are what they are.
template <typename T, int kRows>
ONCHIP_INLINE void softmax_of_whole(T* s, std::int64_t s_stride, int keys, const RowSums<T>& rows) {
  using S = Simd<T>;
  Vec<T> largest[kRows];
  unroll<kRows>([&](auto r) { largest[r] = S::broadcast(-kInfinity<T>); });
  for (int j = 0; j < keys; j += kLanes<T>) {
    unroll<kRows>([&](auto r) {
      // A NaN is passed over here: its own probability will be NaN.
      largest[r] = S::max(S::load(s + r * s_stride + j), largest[r]);
    });
  }
  scores_to_probabilities<T, kRows>(s, s_stride, 0, keys, largest, rows);
}

// Of one row, which sees keys [low, high) within [begin, end), without those whose `adjust` (NULL:
// nothing is added) is -inf; `softcap` 0: none. Keys that it does not see get 0.
template <typename T>
void softmax_of_seen(T* s, int begin, int end, int low, int high, const T* adjust, T softcap,
                     const RowSums<T>& row) {
  using S = Simd<T>;
  constexpr int kCount = kLanes<T>;
  static constexpr auto kIota = [] {
    struct {
      T at[kLanes<T>];
    } iota{};
    for (int i = 0; i < kLanes<T>; ++i) iota.at[i] = static_cast<T>(i);
    return iota;
  }();
  const Vec<T> lane = S::load(kIota.at);
  const Vec<T> first_seen = S::broadcast(static_cast<T>(low));
  const Vec<T> behind_seen = S::broadcast(static_cast<T>(high));
  const Vec<T> minus_infinity = S::broadcast(-kInfinity<T>);
  const Vec<T> cap = S::broadcast(softcap);
  const int first = begin / kCount * kCount;
  Vec<T> largest = minus_infinity;
  for (int j = first; j < end; j += kCount) {
    Vec<T> x = S::load(s + j);
    if (softcap != T{0}) x = cap * tanh<T>(x / cap);
    const Vec<T> key = S::broadcast(static_cast<T>(j)) + lane;
    auto visible = S::both(S::less_equal(first_seen, key), S::less(key, behind_seen));
    if (adjust != nullptr) {
      const Vec<T> added = S::load(adjust + j);
      visible = S::both(visible, S::complement(S::equal(added, minus_infinity)));
      x = x + added;
    }
    x = S::select(visible, x, minus_infinity);
    S::store(s + j, x);
    largest = S::max(x, largest);
  }
  scores_to_probabilities<T, 1>(s, 0, first, end, &largest, row);
}

}  // namespace
}  // namespace onchip::cpu::ONCHIP_CPU_ISA
