// What forward and backward of scalar_decay share inside a chunk: its weights, the engine's rows as
// tiles, the walk token by token, the operator's output from what was read.
#pragma once

#include "cpu/linear_products.hpp"
#include "cpu/linear_scalar.hpp"
#include "cpu/linear_tiles.hpp"
#include "cpu/simd.hpp"

namespace onchip::cpu::ONCHIP_CPU_ISA {
namespace {

// Weights of a chunk's rows: 0 exactly where a reset lies between.
template <typename T>
struct ChunkWeights {
  T carry[kChunkRows];    // of the state before, in what row i reads; scale included
  T keep[kChunkRows];     // of row j in the state after
  T segment[kChunkRows];  // the first row that row i sees
  T index[kChunkRows];
  T whole = T{0};  // of the state before in the state after
};

// to[i] = 2^(cumulative[i] - offset); beyond `rows` anything.
template <typename T>
ONCHIP_INLINE void powers(const double (&cumulative)[kChunkRows], std::int64_t rows, double offset,
                          double sign, T* to) {
  for (std::int64_t i = 0; i < rows; i += kLanes<T>) {
    T x[kLanes<T>];
    for (int lane = 0; lane < kLanes<T>; ++lane) {
      x[lane] = static_cast<T>(sign * (cumulative[i + lane] - offset));
    }
    Simd<T>::store(to + i, power<T>(Simd<T>::load(x)));
  }
}

// No chunk is empty.
std::int64_t last_row(const ChunkGates& gates) { return gates.rows > 1 ? gates.rows - 1 : 0; }

// The weight of the state before a chunk in the state after it.
template <typename T>
T whole_decay(const ChunkGates& gates) {
  const std::int64_t last = last_row(gates);
  if (gates.segment[last] >= 0) return T{0};
  T x[kLanes<T>] = {static_cast<T>(gates.cumulative[last])};
  Simd<T>::store(x, power<T>(Simd<T>::load(x)));
  return x[0];
}

// after = whole before + local in rows begin .. end; `after` may be either.
template <typename T>
void join_states(const StateTile<T>& tile, std::int64_t begin, std::int64_t end, T whole,
                 const T* before, const T* local, T* after) {
  using S = Simd<T>;
  const Vec<T> by = S::broadcast(whole);
  for (std::int64_t i = begin; i < end; ++i) {
    for (std::int64_t n = 0; n < tile.columns; n += kLanes<T>) {
      const std::int64_t at = i * tile.stride + n;
      Vec<T> sum = S::load(local + at);
      if (whole != T{0}) sum = S::fma(by, S::load(before + at), sum);
      S::store(after + at, sum);
    }
  }
}

template <typename T>
void fill_weights(const ChunkGates& gates, double scale, ChunkWeights<T>& weights) {
  const std::int64_t rows = gates.rows;
  const std::int64_t last = last_row(gates);
  const std::int32_t last_segment = gates.segment[last];
  weights.whole = whole_decay<T>(gates);
  const double total = gates.cumulative[last];
  powers<T>(gates.cumulative, rows, 0.0, 1.0, weights.carry);
  powers<T>(gates.cumulative, rows, total, -1.0, weights.keep);
  for (std::int64_t i = 0; i < kChunkRows; ++i) {
    weights.index[i] = static_cast<T>(i);
    const bool used = i < rows;
    weights.segment[i] = static_cast<T>(used ? gates.segment[i] : 0);
    weights.carry[i] =
        used && gates.segment[i] < 0 ? weights.carry[i] * static_cast<T>(scale) : T{0};
    if (!used || i < last_segment) weights.keep[i] = T{0};
  }
}

// Of the pairs (i, j) of lanes i .. and one j: scale e^(b_i - b_j), 0 unless j <= i in one segment.
template <typename T>
ONCHIP_INLINE Vec<T> weights_of_key(const ChunkGates& gates, const ChunkWeights<T>& weights,
                                    std::int64_t i, std::int64_t j, T scale) {
  using S = Simd<T>;
  T x[kLanes<T>];
  for (int lane = 0; lane < kLanes<T>; ++lane) {
    x[lane] = static_cast<T>(gates.cumulative[i + lane] - gates.cumulative[j]);
  }
  const Vec<T> at = S::broadcast(weights.index[j]);
  const auto sees = S::both(S::less_equal(at, S::load(weights.index + i)),
                            S::less_equal(S::load(weights.segment + i), at));
  return S::select(sees, S::broadcast(scale) * power<T>(S::load(x)), Vec<T>{});
}

// s w, and 0 where w is 0, whatever s.
template <typename T>
ONCHIP_INLINE Vec<T> weighed(Vec<T> s, Vec<T> w) {
  return Simd<T>::select(Simd<T>::equal(w, Vec<T>{}), Vec<T>{}, s * w);
}

// Strides of a chunk's tiles, in elements.
template <typename T>
struct ChunkStrides {
  explicit ChunkStrides(const LinearShape& shape)
      : key(tile_stride<T>(shape.head_dim_k)),
        value(tile_stride<T>(shape.head_dim_v + (shape.normalised ? 1 : 0))) {}

  std::int64_t key;
  std::int64_t value;
  static std::int64_t token() { return tile_stride<T>(kChunkRows); }
};

// Values as the engine has them, w_j x_j with the normaliser's column, from rows of raw values.
template <typename T>
void weigh_values(const ScalarChunk& chunk, const StateTile<T>& tile, T* x) {
  using S = Simd<T>;
  const ChunkGates& gates = *chunk.gates;
  const std::int64_t padded = padded_rows(gates.rows);
  const std::int64_t filled = whole_vectors<T>(tile.dv);
  for (std::int64_t j = 0; j < padded; ++j) {
    T* row = x + j * tile.stride;
    for (std::int64_t d = filled; d < tile.columns; ++d) row[d] = T{0};
    if (j >= gates.rows) continue;
    const T write = static_cast<T>(gates.write[j]);
    if (chunk.weighs) {
      const Vec<T> by = S::broadcast(write);
      for (std::int64_t d = 0; d < filled; d += kLanes<T>) {
        S::store(row + d, by * S::load(row + d));
      }
    }
    if (tile.width > tile.dv) row[tile.dv] = write;
  }
}

// Token by token from `state`, in place. Reads q, k and weighed x; `read` NULL: no row is read.
template <typename T>
void run_recurrence(const ScalarChunk& chunk, const StateTile<T>& tile, const T* q, const T* k,
                    std::int64_t key_stride, const T* x, T* state, T* read) {
  using S = Simd<T>;
  const ChunkGates& gates = *chunk.gates;
  const T scale = static_cast<T>(chunk.scale);
  for (std::int64_t t = 0; t < gates.rows; ++t) {
    const double decay = gates.decay[t];
    const T alpha = decay < kSegmentLogDecay ? T{0} : static_cast<T>(__builtin_exp(decay));
    const bool forgets = alpha == T{0} || (chunk.empty && t == 0);
    for (std::int64_t n = 0; n < tile.columns; n += kLanes<T>) {
      const Vec<T> value = S::load(x + t * tile.stride + n);
      Vec<T> sum{};
      for (std::int64_t d = 0; d < tile.dk; ++d) {
        T* at = state + d * tile.stride + n;
        const Vec<T> before = forgets ? Vec<T>{} : S::broadcast(alpha) * S::load(at);
        const Vec<T> now = S::fma(S::broadcast(k[t * key_stride + d]), value, before);
        S::store(at, now);
        if (read != nullptr) sum = S::fma(S::broadcast(q[t * key_stride + d]), now, sum);
      }
      if (read != nullptr) S::store(read + t * tile.stride + n, sum * S::broadcast(scale));
    }
  }
}

// The numbers of D that stand beside channels d .. of a row.
template <typename T>
ONCHIP_INLINE Vec<T> skip_vector(const ScalarChunk& chunk, std::int64_t d, int width) {
  T x[kLanes<T>] = {};
  const std::int64_t size = dtype_size(chunk.skip_dtype);
  for (int lane = 0; lane < width; ++lane) {
    const std::int64_t at = chunk.skip_width == 1 ? 0 : d + lane;
    x[lane] = static_cast<T>(load_as_double(chunk.skip + at * size, chunk.skip_dtype));
  }
  return Simd<T>::load(x);
}

// What row i's read is divided by.
template <typename T>
struct Denominator {
  T value;
  T sum;          // what the normaliser read
  bool constant;  // no gradient goes through it
};

template <typename T>
Denominator<T> denominator_of(const ScalarChunk& chunk, std::int64_t i, T sum) {
  if (chunk.read == ReadForm::sum_normalised) {
    return {sum + static_cast<T>(kSumNormaliserEps), sum, false};
  }
  // Below the smallest normal number e^-m would become 0, and 0 / 0 NaN.
  constexpr double kSmallest = sizeof(T) == sizeof(float) ? double{__FLT_MIN__} : __DBL_MIN__;
  const double given = chunk.gates->floor[i];
  const T floor = static_cast<T>(given < kSmallest ? kSmallest : given);
  const T size = sum < T{0} ? -sum : sum;
  return {(size < floor ? floor : size) + static_cast<T>(chunk.eps), sum,
          chunk.detach_normalizer || !(size > floor)};
}

// From what was read to the operator's output, in place.
template <DType kStored, typename T>
void finish_rows(const ScalarChunk& chunk, const StateTile<T>& tile, T* read) {
  using S = Simd<T>;
  constexpr std::int64_t kSize = sizeof(typename Arithmetic<kStored>::Element);
  if (chunk.read == ReadForm::plain) return;
  for (std::int64_t i = 0; i < chunk.gates->rows; ++i) {
    T* row = read + i * tile.stride;
    if (chunk.read == ReadForm::mamba2) {
      for (std::int64_t d = 0; d < tile.dv; d += kLanes<T>) {
        const int width =
            static_cast<int>(tile.dv - d < kLanes<T> ? tile.dv - d : std::int64_t{kLanes<T>});
        Vec<T> y = S::load(row + d);
        if (chunk.skip != nullptr) {
          const std::byte* v = chunk.v.data + i * chunk.v.row_stride + d * kSize;
          y = S::fma(skip_vector<T>(chunk, d, width), load_numbers<kStored, T>(v, width), y);
        }
        if (chunk.z.data != nullptr) {
          const Vec<T> z =
              load_any<T>(chunk.z.data + i * chunk.z.row_stride + d * dtype_size(chunk.z_dtype),
                          chunk.z_dtype, width);
          y = y * (z * sigmoid<T>(z));
        }
        S::store(row + d, y);
      }
    } else if (tile.width > tile.dv) {
      const Vec<T> by = S::broadcast(denominator_of<T>(chunk, i, row[tile.dv]).value);
      for (std::int64_t d = 0; d < tile.dv; d += kLanes<T>) {
        S::store(row + d, S::load(row + d) / by);
      }
    }
  }
}

}  // namespace
}  // namespace onchip::cpu::ONCHIP_CPU_ISA
