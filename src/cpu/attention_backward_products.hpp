// The matrix products of attention backward on one block of query rows and one tile of keys:
// c (+)= a b, register tiles of broadcast numbers of `a` times vectors of `b`.
#pragma once

#include "cpu/attention_rows.hpp"
#include "cpu/simd.hpp"
#include "cpu/tile_products.hpp"

namespace onchip::cpu::ONCHIP_CPU_ISA {
namespace {

// How the first factor lies: a(m, k) = a[m * stride + k], or a[k * stride + m]. Columns come in
// whole groups of kTailRows.
enum class Factor { rows, columns };

template <typename T>
struct Product {
  const T* a = nullptr;
  std::int64_t a_stride = 0;
  const T* b = nullptr;  // b(k, lane) = b[k * stride + lane]
  std::int64_t b_stride = 0;
  T* c = nullptr;  // c(m, lane) = c[m * stride + lane]
  std::int64_t c_stride = 0;
  std::int64_t depth = 0;  // k < depth
};

// Rows m < count; kM is kRegisterRows, and then all of them exist, or kTailRows. With kAdd the
// tile's own sum is made apart and then added, so that rounding errors grow with the number of
// tiles.
template <typename T, Factor kFactor, int kM, int kVectors, bool kAdd>
[[gnu::noinline]] void product_tile(const Product<T>& x, int count) {
  using S = Simd<T>;
  constexpr bool kWhole = kM == kRegisterRows;
  Vec<T> sum[kM][kVectors] = {};
  const T* b = x.b;
  const auto step = [&](auto at) {
    Vec<T> factor[kVectors];
    unroll<kVectors>([&](auto v) { factor[v] = S::load(b + v * kLanes<T>); });
    unroll<kM>([&](auto m) {
      const Vec<T> scalar = S::broadcast(at(m));
      unroll<kVectors>([&](auto v) { sum[m][v] = S::fma(scalar, factor[v], sum[m][v]); });
    });
    b += x.b_stride;
  };
  if constexpr (kFactor == Factor::columns) {
    const T* a = x.a;
    for (std::int64_t k = 0; k < x.depth; ++k) {
      step([&](auto m) { return a[m]; });
      a += x.a_stride;
    }
  } else if constexpr (kWhole) {
    // One address for three rows: with it, its next and next but one are addressing modes.
    const T* row[kM / 3];
    unroll<kM / 3>([&](auto i) { row[i] = x.a + 3 * i * x.a_stride; });
    for (std::int64_t k = 0; k < x.depth; ++k) {
      step([&](auto m) { return row[m / 3][m % 3 * x.a_stride]; });
      unroll<kM / 3>([&](auto i) { ++row[i]; });
    }
  } else {
    const T* row[kM];
    unroll<kM>([&](auto m) { row[m] = x.a + (m < count ? int{m} : count - 1) * x.a_stride; });
    for (std::int64_t k = 0; k < x.depth; ++k) {
      step([&](auto m) { return row[m][k]; });
    }
  }
  unroll<kM>([&](auto m) {
    if (!kWhole && m >= count) return;
    T* c = x.c + m * x.c_stride;
    unroll<kVectors>([&](auto v) {
      if constexpr (kAdd) sum[m][v] = S::load(c + v * kLanes<T>) + sum[m][v];
      S::store(c + v * kLanes<T>, sum[m][v]);
    });
  });
}

template <typename T, Factor kFactor, int kVectors, bool kAdd>
void product(const Product<T>& whole, std::int64_t rows) {
  Product<T> x = whole;
  const auto move_to = [&](std::int64_t row) {
    x.a = whole.a + (kFactor == Factor::rows ? row * x.a_stride : row);
    x.c = whole.c + row * x.c_stride;
  };
  std::int64_t row = 0;
  for (; row + kRegisterRows <= rows; row += kRegisterRows) {
    move_to(row);
    product_tile<T, kFactor, kRegisterRows, kVectors, kAdd>(x, kRegisterRows);
  }
  for (; row < rows; row += kTailRows) {
    move_to(row);
    product_tile<T, kFactor, kTailRows, kVectors, kAdd>(
        x, static_cast<int>(smaller(kTailRows, rows - row)));
  }
}

}  // namespace
}  // namespace onchip::cpu::ONCHIP_CPU_ISA
