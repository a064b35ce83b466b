// The tiles of a chunk of delta_rule, what is done to their rows, and the update of a state.
#pragma once

#include "cpu/linear_delta.hpp"
#include "cpu/linear_products.hpp"
#include "cpu/linear_tiles.hpp"
#include "cpu/simd.hpp"

namespace onchip::cpu::ONCHIP_CPU_ISA {
namespace {

// Row-major tiles of up to kDeltaRows rows; q and e, and what belongs to them, lie one behind the
// other, e from row `padded` on.
template <typename T>
struct DeltaTiles {
  DeltaTiles(const DeltaShape& shape, Pieces& pieces)
      : dk(shape.linear.head_dim_k),
        dv(shape.linear.head_dim_v),
        key_columns(whole_vectors<T>(dk)),
        value_columns(whole_vectors<T>(dv)),
        key(tile_stride<T>(dk)),
        value(tile_stride<T>(dv)) {
    qe = pieces.take<T>(2 * kDeltaRows * key);
    k = pieces.take<T>(kDeltaRows * key);
    a = pieces.take<T>(kDeltaRows * key);
    alpha = pieces.take<T>(kDeltaRows * key);
    v = pieces.take<T>(kDeltaRows * value);
    b = pieces.take<T>(kDeltaRows * value);
    u = pieces.take<T>(kDeltaRows * value);
    scaled_qe = pieces.take<T>(2 * kDeltaRows * key);
    scaled_k = pieces.take<T>(kDeltaRows * key);
    qe_t = pieces.take<T>(key_columns * kToken);
    k_t = pieces.take<T>(key_columns * kToken);
    pairs_t = pieces.take<T>(kDeltaRows * kToken);
    whole = pieces.take<T>(key);
    running = pieces.take<T>(key);
    dt_bias = pieces.take<T>(key);
    q_factor = pieces.take<T>(kDeltaRows);
    e_factor = pieces.take<T>(kDeltaRows);
    k_factor = pieces.take<T>(kDeltaRows);
    q_norm = pieces.take<T>(kDeltaRows);
    k_norm = pieces.take<T>(kDeltaRows);
  }

  // Up to whole vectors; `columns` begin at one.
  DeltaColumns padded(const DeltaColumns& columns) const {
    return {columns.begin, columns.begin + whole_vectors<T>(columns.end - columns.begin)};
  }
  DeltaColumns all() const { return {0, value_columns}; }

  static constexpr std::int64_t kToken = (2 * kDeltaRows * sizeof(T) / 64 | 1) * 64 / sizeof(T);

  std::int64_t dk, dv;
  std::int64_t key_columns, value_columns;
  std::int64_t key, value;  // strides
  T* qe;                    // [2 rows][dk]: q and e, normalised, not decayed
  T* k;                     // [rows][dk], normalised
  T* a;                     // [rows][dk], raw
  T* alpha;                 // [rows][dk]: a row's decay, where channels have one
  T* v;                     // [rows][dv], raw
  T* b;                     // [rows][dv], raw
  T* u;                     // [rows][dv]
  T* scaled_qe;             // [2 rows][dk]: scale q D, -e D
  T* scaled_k;              // [rows][dk]: k R
  T* qe_t;                  // [dk][2 rows] of scaled_qe
  T* k_t;                   // [dk][rows] of k, then of scaled_k
  T* pairs_t;               // [j][2 rows]: P_ij and -A_ij
  T* whole;                 // [dk]: the decay of the state
  T* running;               // [dk]: a product of decays
  T* dt_bias;               // [dk]

  T* q_factor;  // [rows] of scale q D
  T* e_factor;
  T* k_factor;
  T* q_norm;  // [rows]: 1 / |q|
  T* k_norm;
};

template <typename T>
ONCHIP_INLINE T sum_of_lanes(Vec<T> x) {
  T lanes[kLanes<T>];
  Simd<T>::store(lanes, x);
  for (int width = kLanes<T> / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
}

template <typename T>
T dot(const T* x, const T* y, std::int64_t columns) {
  using S = Simd<T>;
  Vec<T> sum{};
  for (std::int64_t d = 0; d < columns; d += kLanes<T>) {
    sum = S::fma(S::load(x + d), S::load(y + d), sum);
  }
  return sum_of_lanes<T>(sum);
}

// to = by * from.
template <typename T>
void scale_row(const T* from, T by, std::int64_t columns, T* to) {
  using S = Simd<T>;
  const Vec<T> factor = S::broadcast(by);
  for (std::int64_t d = 0; d < columns; d += kLanes<T>)
    S::store(to + d, factor * S::load(from + d));
}

// to = x * y.
template <typename T>
void multiply_rows(const T* x, const T* y, std::int64_t columns, T* to) {
  using S = Simd<T>;
  for (std::int64_t d = 0; d < columns; d += kLanes<T>) {
    S::store(to + d, S::load(x + d) * S::load(y + d));
  }
}

// to += by * from.
template <typename T>
void add_row(const T* from, T by, std::int64_t columns, T* to) {
  using S = Simd<T>;
  const Vec<T> factor = S::broadcast(by);
  for (std::int64_t d = 0; d < columns; d += kLanes<T>) {
    S::store(to + d, S::fma(factor, S::load(from + d), S::load(to + d)));
  }
}

// 2^x of one number.
template <typename T>
T power_of(double x) {
  T lanes[kLanes<T>] = {static_cast<T>(x)};
  Simd<T>::store(lanes, power<T>(Simd<T>::load(lanes)));
  return lanes[0];
}

template <typename T>
bool load_any_tile(const UnitRow& from, DType dtype, std::int64_t dim, std::int64_t count,
                   std::int64_t padded, T* to, std::int64_t stride) {
  bool finite = true;
  with_stored(dtype, [&](auto stored) {
    finite = load_tile<decltype(stored)::kDType, T>(from, dim, count, padded, to, stride);
  });
  return finite;
}

template <typename T>
void store_any_tile(const T* from, std::int64_t stride, std::int64_t dim, std::int64_t count,
                    const UnitRow& to, DType dtype) {
  with_stored(dtype, [&](auto stored) {
    store_tile<decltype(stored)::kDType, T>(from, stride, dim, count, to);
  });
}

template <typename F>
ONCHIP_INLINE void with_delta_arithmetic(const DeltaShape& shape, F&& f) {
  if (shape.linear.dtype == DType::f64) {
    f(double{});
  } else {
    f(float{});
  }
}

// c[m][n] = factor[m] c[m][n] + sum; a factor of 0 forgets even what is not finite. `c0` NULL: the
// sum alone.
template <typename T, int kRows, int kVectors>
[[gnu::noinline]] void decayed_tile(const Product<T>& product, const T* factor, const T* c0, T* c,
                                    std::int64_t c_stride) {
  using S = Simd<T>;
  Vec<T> sum[kRows][kVectors] = {};
  add_product<T, kRows, kVectors>(sum, product.a, product.a_stride, product.b, product.b_stride,
                                  product.end - product.begin);
  unroll<kRows>([&](auto m) {
    const T by = factor[m];
    unroll<kVectors>([&](auto v) {
      const std::int64_t at = m * c_stride + v * kLanes<T>;
      if (c0 != nullptr && by != T{0}) {
        sum[m][v] = S::fma(S::broadcast(by), S::load(c0 + at), sum[m][v]);
      }
      S::store(c + at, sum[m][v]);
    });
  });
}

template <typename T>
void decayed_update(std::int64_t rows, std::int64_t columns, const Product<T>& product,
                    const T* factor, const T* c0, T* c, std::int64_t c_stride) {
  for_each_tile<T>(
      rows, columns, [&](auto tile_rows, auto tile_vectors, std::int64_t m, std::int64_t n) {
        const std::int64_t at = m * c_stride + n;
        decayed_tile<T, tile_rows, tile_vectors>(at_tile(product, m, n, product.begin, product.end),
                                                 factor + m, c0 == nullptr ? nullptr : c0 + at,
                                                 c + at, c_stride);
      });
}

}  // namespace
}  // namespace onchip::cpu::ONCHIP_CPU_ISA
