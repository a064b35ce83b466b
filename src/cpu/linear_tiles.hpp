// Between tensors and the tiles of linear attention in scratch memory: rows, transposed rows,
// states in either layout, exponentials of log weights.
#pragma once

#include "cpu/any_dtype.hpp"
#include "cpu/linear_products.hpp"
#include "cpu/linear_unit.hpp"
#include "cpu/pieces.hpp"
#include "cpu/simd.hpp"

namespace onchip::cpu::ONCHIP_CPU_ISA {
namespace {

static_assert(kPieceAlignment == kLinearAlignment);

// 2^x for any x, 0 below -126 (fp64: -1022), inf above the largest exponent.
template <typename T>
ONCHIP_INLINE Vec<T> power(Vec<T> x) {
  using S = Simd<T>;
  constexpr T kTooLarge = sizeof(T) == sizeof(float) ? T{128} : T{1024};
  // exp2 has no exponent for these: its integers would overflow.
  const auto too_large = S::less_equal(S::broadcast(kTooLarge), x);
  return S::select(too_large, S::broadcast(kInfinity<T>),
                   exp2<T>(S::select(too_large, Vec<T>{}, x)));
}

template <typename T>
void fill_zeros(T* to, std::int64_t count) {
  __builtin_memset(to, 0, static_cast<std::size_t>(count) * sizeof(T));
}

// to[row][d] = from's row, zeros up to whole vectors of `dim` and in rows count .. padded. Whether
// all of it is finite.
template <DType kStored, typename T>
bool load_tile(const UnitRow& from, std::int64_t dim, std::int64_t count, std::int64_t padded,
               T* to, std::int64_t stride) {
  using S = Simd<T>;
  constexpr int kCount = kLanes<T>;
  constexpr std::int64_t kSize = sizeof(typename Arithmetic<kStored>::Element);
  const std::int64_t columns = whole_vectors<T>(dim);
  Vec<T> zeros{};
  for (std::int64_t row = 0; row < count; ++row) {
    const std::byte* source = from.data + row * from.row_stride;
    T* target = to + row * stride;
    std::int64_t d = 0;
    for (; d < dim; d += kCount) {
      const int width = static_cast<int>(dim - d < kCount ? dim - d : std::int64_t{kCount});
      const Vec<T> x = load_numbers<kStored, T>(source + d * kSize, width);
      zeros = zeros + x * Vec<T>{};
      S::store(target + d, x);
    }
    for (; d < columns; d += kCount) S::store(target + d, Vec<T>{});
  }
  for (std::int64_t row = count; row < padded; ++row) fill_zeros(to + row * stride, columns);
  return !S::any(S::complement(S::equal(zeros, Vec<T>{})));
}

template <DType kStored, typename T>
void store_tile(const T* from, std::int64_t stride, std::int64_t dim, std::int64_t count,
                const UnitRow& to) {
  constexpr int kCount = kLanes<T>;
  constexpr std::int64_t kSize = sizeof(typename Arithmetic<kStored>::Element);
  for (std::int64_t row = 0; row < count; ++row) {
    std::byte* target = to.data + row * to.row_stride;
    for (std::int64_t d = 0; d < dim; d += kCount) {
      const int width = static_cast<int>(dim - d < kCount ? dim - d : std::int64_t{kCount});
      store_numbers<kStored, T>(target + d * kSize, Simd<T>::load(from + row * stride + d), width);
    }
  }
}

// to[column][row] = from[row][column] for `rows` and `columns` rounded up to whole vectors; `from`
// has padded_rows(rows) rows of whole vectors, and zeros stand for the rows after them.
template <typename T>
void transpose_tile(const T* from, std::int64_t from_stride, std::int64_t rows,
                    std::int64_t columns, T* to, std::int64_t to_stride) {
  using S = Simd<T>;
  constexpr int kCount = kLanes<T>;
  const std::int64_t filled = padded_rows(rows);
  for (std::int64_t row = 0; row < filled; row += kCount) {
    for (std::int64_t column = 0; column < columns; column += kCount) {
      Vec<T> square[kCount];
      for (int i = 0; i < kCount; ++i) {
        square[i] = row + i < filled ? S::load(from + (row + i) * from_stride + column) : Vec<T>{};
      }
      transpose<T>(square);
      for (int i = 0; i < kCount; ++i) {
        S::store(to + (column + i) * to_stride + row, square[i]);
      }
    }
  }
}

// Row-major [padded_rows(dk)][tile_stride(width)]; the last used column is the normaliser, and all
// past it is 0.
template <typename T>
struct StateTile {
  std::int64_t dk = 0;
  std::int64_t dv = 0;
  std::int64_t width = 0;  // dv, and one more for the normaliser
  std::int64_t rows = 0;
  std::int64_t columns = 0;  // whole vectors
  std::int64_t stride = 0;

  explicit StateTile(const LinearShape& shape)
      : dk(shape.head_dim_k),
        dv(shape.head_dim_v),
        width(shape.head_dim_v + (shape.normalised ? 1 : 0)),
        rows(padded_rows(shape.head_dim_k)),
        columns(whole_vectors<T>(width)),
        stride(tile_stride<T>(width)) {}

  std::int64_t size() const { return rows * stride; }
};

template <typename T, DType kStored>
ONCHIP_INLINE T state_number(const std::byte* from) {
  if constexpr (kStored == DType::f32) {
    float x;
    __builtin_memcpy(&x, from, sizeof(x));
    return static_cast<T>(x);
  } else if constexpr (kStored == DType::f64) {
    double x;
    __builtin_memcpy(&x, from, sizeof(x));
    return static_cast<T>(x);
  } else {
    return static_cast<T>(load_as_double(from, kStored));
  }
}

template <typename T, DType kStored>
ONCHIP_INLINE void store_state_number(std::byte* to, T value) {
  if constexpr (kStored == DType::f32) {
    const auto x = static_cast<float>(value);
    __builtin_memcpy(to, &x, sizeof(x));
  } else {
    store_from_double(to, kStored, static_cast<double>(value));
  }
}

// Absent parts are 0. Whether any number of it is not 0.
template <typename T>
bool load_state_tile(const StateTile<T>& tile, const UnitState& matrix, const UnitState& normaliser,
                     T* state) {
  fill_zeros(state, tile.size());
  bool any = false;
  if (matrix.data != nullptr) {
    with_stored(matrix.dtype, [&](auto stored) {
      for (std::int64_t i = 0; i < tile.dk; ++i) {
        const std::byte* row = matrix.data + i * matrix.row_stride;
        T* to = state + i * tile.stride;
        for (std::int64_t j = 0; j < tile.dv; ++j) {
          to[j] = state_number<T, decltype(stored)::kDType>(row + j * matrix.column_stride);
          any = any || to[j] != T{0};
        }
      }
    });
  }
  if (normaliser.data != nullptr && tile.width > tile.dv) {
    with_stored(normaliser.dtype, [&](auto stored) {
      for (std::int64_t i = 0; i < tile.dk; ++i) {
        const T x =
            state_number<T, decltype(stored)::kDType>(normaliser.data + i * normaliser.row_stride);
        state[i * tile.stride + tile.dv] = x;
        any = any || x != T{0};
      }
    });
  }
  return any;
}

template <typename T>
void store_state_tile(const StateTile<T>& tile, const T* state, const UnitState& matrix,
                      const UnitState& normaliser) {
  if (matrix.data != nullptr) {
    with_stored(matrix.dtype, [&](auto stored) {
      for (std::int64_t i = 0; i < tile.dk; ++i) {
        std::byte* row = matrix.data + i * matrix.row_stride;
        const T* from = state + i * tile.stride;
        for (std::int64_t j = 0; j < tile.dv; ++j) {
          store_state_number<T, decltype(stored)::kDType>(row + j * matrix.column_stride, from[j]);
        }
      }
    });
  }
  if (normaliser.data != nullptr && tile.width > tile.dv) {
    with_stored(normaliser.dtype, [&](auto stored) {
      for (std::int64_t i = 0; i < tile.dk; ++i) {
        store_state_number<T, decltype(stored)::kDType>(normaliser.data + i * normaliser.row_stride,
                                                        state[i * tile.stride + tile.dv]);
      }
    });
  }
}

}  // namespace
}  // namespace onchip::cpu::ONCHIP_CPU_ISA
