// The online softmax of one tile of keys for one panel of query rows: scores become probabilities
// relative to the running maximum (docs/numerics.md, section 2).
#pragma once

#include "cpu/attention_rows.hpp"
#include "cpu/simd.hpp"
#include "cpu/tile_products.hpp"

namespace onchip::cpu::ONCHIP_CPU_ISA {
namespace {

constexpr int kTileKeys = 96;
static_assert(kTileKeys % kRegisterRows == 0 && kRegisterRows % 3 == 0);
static_assert(kTileKeys % 16 == 0);  // dropout's groups

template <typename T>
constexpr int kPanelRows = kPanelVectors * kLanes<T>;

// One panel's view of one tile.
template <typename T>
struct PanelTile {
  int begin = 0;  // keys of the tile that some row may see
  int end = 0;
  bool partial = false;          // some row sees only part of them
  const T* key_begin = nullptr;  // [lane]: what it sees, relative to the tile; used if partial
  const T* key_end = nullptr;
  const T* adjust = nullptr;  // NULL: none
  const T* keep = nullptr;    // NULL: no dropout
  T softcap = T{0};           // 0: none
  // [key], NULL: none: its value row does not enter the products, because it would do harm there.
  // The softmax leaves the probabilities of the rows that see it in weights_apart[key][lane], and
  // -1 for the others.
  const bool* apart = nullptr;
  T* weights_apart = nullptr;
};

// One vector of scores with everything done to it, and which of them are visible.
template <typename T>
struct Adjusted {
  Vec<T> score;
  Simd<T>::Mask visible;
};

template <typename T>
ONCHIP_INLINE Adjusted<T> adjusted(const PanelTile<T>& tile, int key, int lane, int rows,
                                   Vec<T> x) {
  using S = Simd<T>;
  auto visible = S::all_true();
  if (tile.softcap != T{0}) {
    const Vec<T> cap = S::broadcast(tile.softcap);
    x = cap * tanh<T>(x / cap);
  }
  if (tile.adjust != nullptr) {
    const Vec<T> adjust = S::load(tile.adjust + key * rows + lane);
    visible = S::complement(S::equal(adjust, S::broadcast(-kInfinity<T>)));
    x = x + adjust;
  }
  if (tile.partial) {
    const Vec<T> position = S::broadcast(static_cast<T>(key));
    visible = S::both(visible, S::less_equal(S::load(tile.key_begin + lane), position));
    visible = S::both(visible, S::less(position, S::load(tile.key_end + lane)));
  }
  return {S::select(visible, x, S::broadcast(-kInfinity<T>)), visible};
}

// What all probabilities of a tile are relative to.
template <typename T, int kVectors>
struct Shift {
  Vec<T> at[kVectors];
};

// Finishes the scores of a tile, raises the running maximum to theirs and says how earlier sums
// shrink. seen[key]: whether some row sees it; not written if kPlain, where all rows see all keys.
template <typename T, int kVectors, bool kPlain>
ONCHIP_INLINE Shift<T, kVectors> raise_maximum(const PanelTile<T>& tile, T* s_t, bool* seen,
                                               T* running_max, Vec<T> (&alpha)[kVectors]) {
  using S = Simd<T>;
  constexpr int kCount = kLanes<T>;
  constexpr int kRows = kVectors * kCount;
  Vec<T> before[kVectors];
  Vec<T> maximum[kVectors];
  unroll<kVectors>([&](auto i) { before[i] = S::load(running_max + i * kCount); });
  unroll<kVectors>([&](auto i) { maximum[i] = before[i]; });
  for (int j = tile.begin; j < tile.end; ++j) {
    T* row = s_t + j * kRows;
    bool any = false;
    unroll<kVectors>([&](auto i) {
      Vec<T> x = S::load(row + i * kCount);
      if constexpr (!kPlain) {
        const Adjusted<T> done = adjusted<T>(tile, j, i * kCount, kRows, x);
        x = done.score;
        any = any || S::any(done.visible);
        S::store(row + i * kCount, x);
        if (tile.apart != nullptr) {
          const Vec<T> mark = S::select(done.visible, Vec<T>{}, S::broadcast(T{-1}));
          S::store(tile.weights_apart + j * kRows + i * kCount, mark);
        }
      }
      // A NaN is passed over here: its own probability will be NaN.
      maximum[i] = S::max(x, maximum[i]);
    });
    if constexpr (!kPlain) seen[j] = any;
  }

  // Where no score is above -inf yet, subtract 0 instead: all probabilities are then exactly 0.
  Shift<T, kVectors> shift;
  unroll<kVectors>([&](auto i) {
    const auto empty = S::equal(maximum[i], S::broadcast(-kInfinity<T>));
    shift.at[i] = S::select(empty, Vec<T>{}, maximum[i]);
    alpha[i] = exp2<T>((before[i] - shift.at[i]) * S::broadcast(kLog2E<T>));
    S::store(running_max + i * kCount, maximum[i]);
  });
  return shift;
}

// The difference comes before the factor log2(e): a score near the largest finite number, which an
// additive mask makes, would overflow.
template <typename T>
ONCHIP_INLINE Vec<T> probability(Vec<T> score, Vec<T> shift) {
  return exp2<T>((score - shift) * Simd<T>::broadcast(kLog2E<T>));
}

template <typename T>
ONCHIP_INLINE void keep_apart(const PanelTile<T>& tile, int at, Vec<T> p) {
  using S = Simd<T>;
  const Vec<T> mark = S::load(tile.weights_apart + at);
  S::store(tile.weights_apart + at, S::select(S::less(mark, Vec<T>{}), mark, p));
}

// Scores in s_t become probabilities. Keys that no row sees, and those set apart, are left out: the
// others move up, and so do their rows' addresses, from v to seen_v. Returns how many they are.
template <typename T, int kVectors, bool kPlain>
[[gnu::noinline]] int softmax_tile(const PanelTile<T>& tile, T* s_t, T* running_max, T* running_sum,
                                   const T* const* v, const T** seen_v, Vec<T> (&alpha)[kVectors]) {
  using S = Simd<T>;
  constexpr int kCount = kLanes<T>;
  constexpr int kRows = kVectors * kCount;
  bool seen[kTileKeys];
  const Shift<T, kVectors> shift =
      raise_maximum<T, kVectors, kPlain>(tile, s_t, seen, running_max, alpha);
  Vec<T> sum[kVectors] = {};
  int count = 0;
  for (int j = tile.begin; j < tile.end; ++j) {
    bool is_apart = false;
    if constexpr (!kPlain) {
      if (!seen[j]) continue;
      is_apart = tile.apart != nullptr && tile.apart[j];
      if (!is_apart) seen_v[count] = v[j];
    }
    const T* from = s_t + j * kRows;
    T* to = s_t + (tile.begin + count) * kRows;
    unroll<kVectors>([&](auto i) {
      Vec<T> p = probability<T>(S::load(from + i * kCount), shift.at[i]);
      sum[i] = sum[i] + p;
      if constexpr (!kPlain) {
        if (tile.keep != nullptr) p = p * S::load(tile.keep + j * kRows + i * kCount);
        if (is_apart) {
          keep_apart<T>(tile, j * kRows + i * kCount, p);
          return;
        }
      }
      S::store(to + i * kCount, p);
    });
    if (!is_apart) ++count;
  }
  unroll<kVectors>([&](auto i) {
    T* at = running_sum + i * kCount;
    S::store(at, S::fma(S::load(at), alpha[i], sum[i]));
  });
  return count;
}

#if ONCHIP_CPU_LEVEL >= 3

// The same for products of pairs of keys (2 i, 2 i + 1), counted from the tile: row i of s_t
// becomes their probabilities, rounded to bf16. Keys stay where they are; what no row sees is 0.
// Returns whether some row sees some key.
template <int kVectors, bool kPlain>
[[gnu::noinline]] bool softmax_pairs(const PanelTile<float>& tile, float* s_t, float* running_max,
                                     float* running_sum, Vec<float> (&alpha)[kVectors]) {
  using S = Simd<float>;
  constexpr int kCount = kLanes<float>;
  constexpr int kRows = kVectors * kCount;
  bool seen[kTileKeys];
  const Shift<float, kVectors> shift =
      raise_maximum<float, kVectors, kPlain>(tile, s_t, seen, running_max, alpha);
  if constexpr (!kPlain) {
    bool any = false;
    for (int j = tile.begin; j < tile.end; ++j) any = any || seen[j];
    if (!any) return false;
  }
  // The other key of a pair that the range cuts.
  const Vec<float> excluded = S::broadcast(-kInfinity<float>);
  unroll<kVectors>([&](auto i) {
    if (tile.begin % 2 != 0) S::store(s_t + (tile.begin - 1) * kRows + i * kCount, excluded);
    if (tile.end % 2 != 0) S::store(s_t + tile.end * kRows + i * kCount, excluded);
  });
  Vec<float> sum[kVectors] = {};
  for (int pair = tile.begin / 2; 2 * pair < tile.end; ++pair) {
    unroll<kVectors>([&](auto i) {
      Vec<float> p[2];
      unroll<2>([&](auto half) {
        const int at = (2 * pair + half) * kRows + i * kCount;
        p[half] = probability<float>(S::load(s_t + at), shift.at[i]);
        sum[i] = sum[i] + p[half];
        if constexpr (!kPlain) {
          if (tile.keep != nullptr) p[half] = p[half] * S::load(tile.keep + at);
          const int key = 2 * pair + half;
          if (tile.apart != nullptr && key >= tile.begin && key < tile.end && tile.apart[key]) {
            keep_apart<float>(tile, at, p[half]);
          }
        }
      });
      // Row `pair` of this vector was read by now: it is not after row 2 pair.
      S::store(s_t + pair * kRows + i * kCount, (Vec<float>)to_pairs(p[0], p[1]));
    });
  }
  unroll<kVectors>([&](auto i) {
    float* at = running_sum + i * kCount;
    S::store(at, S::fma(S::load(at), alpha[i], sum[i]));
  });
  return true;
}

#endif

}  // namespace
}  // namespace onchip::cpu::ONCHIP_CPU_ISA
