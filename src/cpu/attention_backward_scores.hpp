// From scores and dP of one tile of keys to probabilities and dS, for one panel of query rows.
#pragma once

#include "cpu/attention_rows.hpp"
#include "cpu/simd.hpp"

namespace onchip::cpu::ONCHIP_CPU_ISA {
namespace {

// exp(x) for every x: inf where the result is beyond the largest number, NaN stays NaN. Rounding,
// and an lse over other keys, leave scores above lse.
template <typename T>
ONCHIP_INLINE Vec<T> exponential(Vec<T> x) {
  using S = Simd<T>;
  constexpr T kInfinite = sizeof(T) == sizeof(float) ? T{128} : T{1024};  // 2^kInfinite is inf
  const Vec<T> y = x * S::broadcast(kLog2E<T>);
  const Vec<T> limit = S::broadcast(kInfinite);
  return exp2<T>(S::select(S::less(limit, y), limit, y));
}

// One panel's view of one tile.
template <typename T>
struct PanelScores {
  int begin = 0;  // keys of the tile that some row may see
  int end = 0;
  bool partial = false;          // some row sees only part of them
  const T* key_begin = nullptr;  // [lane]: what it sees, relative to the tile; used if partial
  const T* key_end = nullptr;
  const T* adjust = nullptr;  // NULL: none
  const T* keep = nullptr;    // NULL: no dropout
  T kept_scale = T{1};
  T softcap = T{0};       // 0: none
  T score_factor = T{1};  // of what p_t holds
  T scale = T{1};         // of q.k
  bool of_bias = false;   // dS is left as the gradient of the score, not of q.k
  const T* lse = nullptr;
  const T* shift = nullptr;
  T* p_t = nullptr;
  T* ds_t = nullptr;
  T* seen = nullptr;  // NULL: not wanted
  std::int64_t stride = 0;
};

// Scores in p_t become probabilities after dropout, dP in ds_t becomes dS.
template <typename T, int kVectors, bool kPlain>
[[gnu::noinline]] void differentiate_softmax(const PanelScores<T>& tile) {
  using S = Simd<T>;
  constexpr int kCount = kLanes<T>;
  constexpr int kRows = kVectors * kCount;
  Vec<T> lse[kVectors];
  Vec<T> shift[kVectors];
  unroll<kVectors>([&](auto i) {
    lse[i] = S::load(tile.lse + i * kCount);
    shift[i] = S::load(tile.shift + i * kCount);
  });
  const Vec<T> scale = S::broadcast(tile.scale);
  const Vec<T> factor_of_score = S::broadcast(tile.score_factor);
  for (int j = tile.begin; j < tile.end; ++j) {
    T* p_row = tile.p_t + j * tile.stride;
    T* ds_row = tile.ds_t + j * tile.stride;
    unroll<kVectors>([&](auto i) {
      Vec<T> x = S::load(p_row + i * kCount) * factor_of_score;
      const Vec<T> dp = S::load(ds_row + i * kCount);
      if constexpr (kPlain) {
        const Vec<T> p = exponential<T>(x - lse[i]);
        S::store(p_row + i * kCount, p);
        S::store(ds_row + i * kCount, p * (dp + shift[i]) * scale);
      } else {
        auto visible = S::all_true();
        Vec<T> factor = tile.of_bias ? S::broadcast(T{1}) : scale;
        if (tile.softcap != T{0}) {
          const Vec<T> cap = S::broadcast(tile.softcap);
          const Vec<T> t = tanh<T>(x / cap);
          x = cap * t;
          const Vec<T> one = S::broadcast(T{1});
          if (!tile.of_bias) factor = factor * ((one - t) * (one + t));
        }
        if (tile.adjust != nullptr) {
          const Vec<T> adjust = S::load(tile.adjust + j * kRows + i * kCount);
          visible = S::complement(S::equal(adjust, S::broadcast(-kInfinity<T>)));
          x = x + adjust;
        }
        if (tile.partial) {
          const Vec<T> key = S::broadcast(static_cast<T>(j));
          visible = S::both(visible, S::less_equal(S::load(tile.key_begin + i * kCount), key));
          visible = S::both(visible, S::less(key, S::load(tile.key_end + i * kCount)));
        }
        const Vec<T> p = exponential<T>(x - lse[i]);
        Vec<T> kept = S::broadcast(T{1});
        if (tile.keep != nullptr) {
          kept = S::load(tile.keep + j * kRows + i * kCount) * S::broadcast(tile.kept_scale);
        }
        const Vec<T> ds = p * S::fma(kept, dp, shift[i]) * factor;
        S::store(p_row + i * kCount, S::select(visible, p * kept, Vec<T>{}));
        S::store(ds_row + i * kCount, S::select(visible, ds, Vec<T>{}));
        if (tile.seen != nullptr) {
          T* seen = tile.seen + j * tile.stride + i * kCount;
          S::store(seen, S::select(visible, S::broadcast(T{1}), Vec<T>{}));
        }
      }
    });
  }
}

}  // namespace
}  // namespace onchip::cpu::ONCHIP_CPU_ISA
