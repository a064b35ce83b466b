// The matrix products of linear attention on row-major tiles in scratch memory: register tiles of
// broadcast left operands times vectors of right ones. A left operand lies transposed, so that the
// numbers that one step broadcasts are neighbours.
#pragma once

#include "cpu/linear_unit.hpp"
#include "cpu/simd.hpp"

namespace onchip::cpu::ONCHIP_CPU_ISA {
namespace {

// kProductRows x kProductVectors accumulators, kProductVectors operands and a broadcast fill 27 of
// AVX-512's 32 registers, 15 of 16 elsewhere.
constexpr int kProductVectors = 2;
constexpr int kProductRows = ONCHIP_CPU_LEVEL >= 2 ? 12 : 6;
// Row counts are padded to a multiple of this one, with rows of zeros.
constexpr std::int64_t kRowUnit = 4;

std::int64_t padded_rows(std::int64_t rows) { return (rows + kRowUnit - 1) / kRowUnit * kRowUnit; }

template <typename T>
std::int64_t whole_vectors(std::int64_t columns) {
  constexpr std::int64_t kUnit = kLanes<T> < kRowUnit ? kRowUnit : kLanes<T>;
  return (columns + kUnit - 1) / kUnit * kUnit;
}

// Elements between the rows of a tile: an odd number of cache lines, so that one column of all rows
// spreads over the cache's sets.
template <typename T>
std::int64_t tile_stride(std::int64_t columns) {
  constexpr std::int64_t kLine = 64 / sizeof(T);
  return ((whole_vectors<T>(columns) + kLine - 1) / kLine | 1) * kLine;
}

// sum_r a[r][m] b[r][n] over r in [begin, end).
template <typename T>
struct Product {
  const T* a = nullptr;
  std::int64_t a_stride = 0;
  const T* b = nullptr;
  std::int64_t b_stride = 0;
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

// Which r of the second product a row m of the result needs: all, or one side of the diagonal, the
// rest of the left operand being 0.
enum class Steps { all, up_to_row, from_row };

template <typename T, int kRows, int kVectors>
ONCHIP_INLINE void add_product(Vec<T> (&sum)[kRows][kVectors], const T* a, std::int64_t a_stride,
                               const T* b, std::int64_t b_stride, std::int64_t steps) {
  using S = Simd<T>;
  for (std::int64_t r = 0; r < steps; ++r) {
    Vec<T> right[kVectors];
    unroll<kVectors>([&](auto v) { right[v] = S::load(b + v * kLanes<T>); });
    unroll<kRows>([&](auto m) {
      const Vec<T> left = S::broadcast(a[m]);
      unroll<kVectors>([&](auto v) { sum[m][v] = S::fma(left, right[v], sum[m][v]); });
    });
    a += a_stride;
    b += b_stride;
  }
}

// c[m][n] = factor[m] * first + second; a factor of 0 makes 0 of whatever `first` is, as a reset
// forgets a state that is not finite. Without factors the first product is taken as it is.
template <typename T, int kRows, int kVectors>
[[gnu::noinline]] void product_tile(const Product<T>& first, const T* factor,
                                    const Product<T>& second, T* c, std::int64_t c_stride) {
  using S = Simd<T>;
  Vec<T> sum[kRows][kVectors] = {};
  add_product<T, kRows, kVectors>(sum, first.a, first.a_stride, first.b, first.b_stride,
                                  first.end - first.begin);
  if (factor != nullptr) {
    unroll<kRows>([&](auto m) {
      const Vec<T> by = S::broadcast(factor[m]);
      const auto none = S::equal(by, Vec<T>{});
      unroll<kVectors>([&](auto v) { sum[m][v] = S::select(none, Vec<T>{}, by * sum[m][v]); });
    });
  }
  add_product<T, kRows, kVectors>(sum, second.a, second.a_stride, second.b, second.b_stride,
                                  second.end - second.begin);
  unroll<kRows>([&](auto m) {
    unroll<kVectors>([&](auto v) { S::store(c + m * c_stride + v * kLanes<T>, sum[m][v]); });
  });
}

// c[m][n] = keep c0[m][n] + sum; c0 NULL or keep 0: the sum alone. c0 may be c.
template <typename T, int kRows, int kVectors>
[[gnu::noinline]] void update_tile(const Product<T>& product, const T* c0, T keep, T* c,
                                   std::int64_t c_stride) {
  using S = Simd<T>;
  Vec<T> sum[kRows][kVectors] = {};
  add_product<T, kRows, kVectors>(sum, product.a, product.a_stride, product.b, product.b_stride,
                                  product.end - product.begin);
  const Vec<T> by = S::broadcast(keep);
  unroll<kRows>([&](auto m) {
    unroll<kVectors>([&](auto v) {
      const std::int64_t at = m * c_stride + v * kLanes<T>;
      if (c0 != nullptr && keep != T{0}) sum[m][v] = S::fma(by, S::load(c0 + at), sum[m][v]);
      S::store(c + at, sum[m][v]);
    });
  });
}

// Rows of the next register tile; `rest` is a multiple of kRowUnit. No row's bits depend on it.
int next_rows(std::int64_t rest) {
  if constexpr (kProductRows == 12) {
    if (rest % 12 == 0) return 12;
    if (rest % 12 == 8 || rest >= 16) return 8;
    return 4;
  } else {
    return rest % 6 == 0 ? 6 : 4;
  }
}

// f(Index<rows>, Index<vectors>, row, column) for each register tile of [rows] x [columns], all
// rows of two vectors of columns before the next ones: their right operand stays in the cache.
template <typename T, typename F>
void for_each_tile(std::int64_t rows, std::int64_t columns, F&& f) {
  std::int64_t n = 0;
  const auto all_rows = [&](auto vectors) {
    for (std::int64_t m = 0; m < rows;) {
      const int count = next_rows(rows - m);
      if (count == kProductRows) {
        f(Index<kProductRows>{}, vectors, m, n);
      } else if (count == 8) {
        f(Index<8>{}, vectors, m, n);
      } else {
        f(Index<4>{}, vectors, m, n);
      }
      m += count;
    }
  };
  for (; n + kProductVectors * kLanes<T> <= columns; n += kProductVectors * kLanes<T>) {
    all_rows(Index<kProductVectors>{});
  }
  for (; n < columns; n += kLanes<T>) all_rows(Index<1>{});
}

template <typename T>
Product<T> at_tile(const Product<T>& product, std::int64_t m, std::int64_t n, std::int64_t begin,
                   std::int64_t end) {
  if (begin >= end) return {};
  return {product.a + begin * product.a_stride + m,
          product.a_stride,
          product.b + begin * product.b_stride + n,
          product.b_stride,
          begin,
          end};
}

// c = diag(factor) first + second for `rows` (a multiple of kRowUnit) and whole vectors of columns.
// `second` may be empty; of a square one only the steps on the given side of the diagonal count.
template <typename T>
void products(std::int64_t rows, std::int64_t columns, const Product<T>& first, const T* factor,
              const Product<T>& second, Steps steps, T* c, std::int64_t c_stride) {
  for_each_tile<T>(
      rows, columns, [&](auto tile_rows, auto vectors, std::int64_t m, std::int64_t n) {
        std::int64_t begin = second.begin;
        std::int64_t end = second.end;
        if (steps == Steps::up_to_row && m + tile_rows < end) end = m + tile_rows;
        if (steps == Steps::from_row && m > begin) begin = m;
        product_tile<T, tile_rows, vectors>(at_tile(first, m, n, first.begin, first.end),
                                            factor == nullptr ? nullptr : factor + m,
                                            at_tile(second, m, n, begin, end < begin ? begin : end),
                                            c + m * c_stride + n, c_stride);
      });
}

// c += product, whose steps are limited as above.
template <typename T>
void add_products(std::int64_t rows, std::int64_t columns, const Product<T>& product, Steps steps,
                  T* c, std::int64_t c_stride) {
  for_each_tile<T>(
      rows, columns, [&](auto tile_rows, auto vectors, std::int64_t m, std::int64_t n) {
        const bool up_to_row = steps == Steps::up_to_row && m + tile_rows < product.end;
        const std::int64_t end = up_to_row ? m + tile_rows : product.end;
        const std::int64_t begin = steps == Steps::from_row && m < end ? m : product.begin;
        T* at = c + m * c_stride + n;
        update_tile<T, tile_rows, vectors>(at_tile(product, m, n, begin, end), at, T{1}, at,
                                           c_stride);
      });
}

// c[m][n] of the register tiles that reach the diagonal or below it (n <= m); the rest is not
// touched.
template <typename T>
void lower_product(std::int64_t rows, std::int64_t columns, const Product<T>& product, T* c,
                   std::int64_t c_stride) {
  for_each_tile<T>(
      rows, columns, [&](auto tile_rows, auto vectors, std::int64_t m, std::int64_t n) {
        if (n >= m + tile_rows) return;
        product_tile<T, tile_rows, vectors>(at_tile(product, m, n, product.begin, product.end),
                                            nullptr, {}, c + m * c_stride + n, c_stride);
      });
}

// c[m][n] of the register tiles that reach the diagonal or above it (n >= m).
template <typename T>
void upper_product(std::int64_t rows, std::int64_t columns, const Product<T>& product, T* c,
                   std::int64_t c_stride) {
  for_each_tile<T>(
      rows, columns, [&](auto tile_rows, auto vectors, std::int64_t m, std::int64_t n) {
        if (n + vectors * kLanes<T> <= m) return;
        product_tile<T, tile_rows, vectors>(at_tile(product, m, n, product.begin, product.end),
                                            nullptr, {}, c + m * c_stride + n, c_stride);
      });
}

// c = keep c0 + product.
template <typename T>
void update(std::int64_t rows, std::int64_t columns, const Product<T>& product, const T* c0, T keep,
            T* c, std::int64_t c_stride) {
  for_each_tile<T>(
      rows, columns, [&](auto tile_rows, auto vectors, std::int64_t m, std::int64_t n) {
        const std::int64_t at = m * c_stride + n;
        update_tile<T, tile_rows, vectors>(at_tile(product, m, n, product.begin, product.end),
                                           c0 == nullptr ? nullptr : c0 + at, keep, c + at,
                                           c_stride);
      });
}

}  // namespace
}  // namespace onchip::cpu::ONCHIP_CPU_ISA
