// What forward and backward of delta_rule share inside a chunk of L rows of one head (Yang et al.
// 2024; Yang, Kautz and Hatamizadeh 2025). With D_ij the decay from row j to row i, D_i from before
// the chunk and R_j to its end:
//   A_ij = e_i . D_ij k_j (j < i),  P_ij = scale q_i . D_ij k_j (j <= i),
//   (I + A) U = X - (E D) S,  O = scale (Q D) S + P U,  S' = D_L S + (K R)^T U.
// An exclusive erase has D_(i-1)j in A and D_(i-1) beside E. The triangular system is solved, never
// inverted: similar keys make the inverse's powers large. Every decay here is a power of a
// difference of sums or a product of single decays, so none is above 1 unless a log decay is above
// 0.
#pragma once

#include "cpu/linear_delta_gates.hpp"
#include "cpu/linear_delta_tiles.hpp"

namespace onchip::cpu::ONCHIP_CPU_ISA {
namespace {

// Rows of the triangle that registers hold.
constexpr std::int64_t kSolveRows = 8;

template <typename T>
class DeltaAlgebra {
 public:
  DeltaAlgebra(const DeltaChunk& chunk, DeltaTiles<T>& tiles)
      : chunk_(chunk),
        shape_(chunk.shape),
        gates_(*chunk.gates),
        t_(tiles),
        rows_(gates_.rows),
        padded_(padded_rows(rows_)) {}

  std::int64_t rows() const { return rows_; }
  std::int64_t padded() const { return padded_; }

  // Everything from memory, q and k normalised, e and x (in u) made. Whether all of it is finite.
  bool load() {
    const DType dtype = shape_.linear.dtype;
    T* q = t_.qe;
    T* e = t_.qe + padded_ * t_.key;
    bool finite = load_reads(chunk_.q, t_.dk, q, t_.key);
    finite &= load_any_tile<T>(chunk_.k, dtype, t_.dk, rows_, padded_, t_.k, t_.key);
    finite &= load_any_tile<T>(chunk_.v, dtype, t_.dv, rows_, padded_, t_.v, t_.value);
    if (shape_.l2norm) {
      normalise(q, t_.q_norm);
      normalise(t_.k, t_.k_norm);
    }
    if (shape_.erase != EraseForm::keys) {
      finite &= load_any_tile<T>(chunk_.a, chunk_.a_dtype, t_.dk, rows_, padded_, t_.a, t_.key);
    }
    if (shape_.erase == EraseForm::channels) {
      finite &= load_any_tile<T>(chunk_.b, chunk_.b_dtype, t_.dv, rows_, padded_, t_.b, t_.value);
      for (std::int64_t i = 0; i < padded_; ++i) {
        multiply_rows<T>(t_.a + i * t_.key, t_.k + i * t_.key, t_.key_columns, e + i * t_.key);
        multiply_rows<T>(t_.b + i * t_.value, t_.v + i * t_.value, t_.value_columns,
                         t_.u + i * t_.value);
      }
    } else {
      const T* from = shape_.erase == EraseForm::keys ? t_.k : t_.a;
      for (std::int64_t i = 0; i < padded_; ++i) {
        const double beta = i < rows_ ? gates_.beta[i] : 0.0;
        finite &= __builtin_isfinite(beta) != 0;
        scale_row<T>(from + i * t_.key, static_cast<T>(beta), t_.key_columns, e + i * t_.key);
        scale_row<T>(t_.v + i * t_.value, static_cast<T>(beta), t_.value_columns,
                     t_.u + i * t_.value);
      }
    }
    if (shape_.channels) load_channel_decays<T>(chunk_, t_, padded_);
    return finite;
  }

  // Scaled and transposed operands, and the pairs.
  void prepare() {
    if (shape_.channels) {
      prepare_channels();
    } else {
      prepare_scalar();
    }
  }

  // Columns of U from those of X, in place: the state's part first.
  void solve(const DeltaColumns& columns, const T* state) {
    const std::int64_t width = columns.end - columns.begin;
    T* all = t_.u + columns.begin;
    if (!chunk_.empty) {
      update<T>(padded_, width,
                {t_.qe_t + padded_, t_.kToken, state + columns.begin, t_.value, 0, t_.dk}, all,
                T{1}, all, t_.value);
    }
    const T* a_t = t_.pairs_t + padded_;  // -A_ij at [j][i]
    for (std::int64_t first = 0; first < padded_; first += kSolveRows) {
      const std::int64_t count = padded_ - first < kSolveRows ? padded_ - first : kSolveRows;
      T* u = all + first * t_.value;
      if (first > 0) {
        update<T>(count, width, {a_t + first, t_.kToken, all, t_.value, 0, first}, u, T{1}, u,
                  t_.value);
      }
      const T* triangle = a_t + first * t_.kToken + first;
      if (count == kSolveRows) {
        solve_triangle<kSolveRows>(triangle, width, u);
      } else {
        solve_triangle<kRowUnit>(triangle, width, u);
      }
    }
  }

  // A tile of products [j][2 rows] times the decays of its pairs: scale D_ij and, of A, -D_ij.
  void weigh_pairs(T* pairs_t) const {
    const T scale = static_cast<T>(shape_.scale);
    for (std::int64_t j = 0; j < padded_; ++j) {
      T* row = pairs_t + j * t_.kToken;
      T decay[2 * kDeltaRows + kLanes<T>] = {};
      decays_of_key(j, scale, decay);
      for (std::int64_t i = 0; i < 2 * padded_; i += kLanes<T>) {
        const Vec<T> by = Simd<T>::load(decay + i);
        Simd<T>::store(row + i, Simd<T>::select(Simd<T>::equal(by, Vec<T>{}), Vec<T>{},
                                                by * Simd<T>::load(row + i)));
      }
    }
  }

  // Rows that a token has one of, at the row that reads; zeros elsewhere.
  bool load_reads(UnitRow from, std::int64_t dim, T* to, std::int64_t stride) const {
    const DType dtype = shape_.linear.dtype;
    const std::int64_t each = shape_.rows_per_token;
    if (each == 1) return load_any_tile<T>(from, dtype, dim, rows_, padded_, to, stride);
    bool finite = true;
    fill_zeros(to, padded_ * stride);
    for (std::int64_t i = chunk_.first_read; i < rows_; i += each) {
      finite &= load_any_tile<T>(from, dtype, dim, 1, 1, to + i * stride, stride);
      from.data += from.row_stride;
    }
    return finite;
  }

  void store_reads(const T* from, std::int64_t stride, std::int64_t dim, UnitRow to) const {
    if (to.data == nullptr) return;
    const DType dtype = shape_.linear.dtype;
    const std::int64_t each = shape_.rows_per_token;
    if (each == 1) {
      store_any_tile<T>(from, stride, dim, rows_, to, dtype);
      return;
    }
    for (std::int64_t i = chunk_.first_read; i < rows_; i += each) {
      store_any_tile<T>(from + i * stride, stride, dim, 1, to, dtype);
      to.data += to.row_stride;
    }
  }

 private:
  // scale D_ij and, from `padded` on, -D_ij of A, where j reaches i; `decay` is zeros.
  void decays_of_key(std::int64_t j, T scale, T* decay) const {
    using S = Simd<T>;
    if (j >= rows_) return;
    T x[kDeltaRows + kLanes<T>] = {};
    for (std::int64_t i = j; i < rows_; ++i) {
      x[i] = static_cast<T>(gates_.cumulative[i] - gates_.cumulative[j]);
    }
    for (std::int64_t i = j / kLanes<T> * kLanes<T>; i < rows_; i += kLanes<T>) {
      S::store(x + i, power<T>(S::load(x + i)));
    }
    for (std::int64_t i = j; i < rows_; ++i) decay[i] = scale * x[i];
    for (std::int64_t i = j + 1; i < rows_; ++i) {
      decay[padded_ + i] = -x[shape_.exclusive ? i - 1 : i];
    }
  }

  void normalise(T* tile, T* norms) {
    for (std::int64_t i = 0; i < rows_; ++i) {
      T* row = tile + i * t_.key;
      norms[i] = T{1} / __builtin_sqrt(dot<T>(row, row, t_.key_columns) + T(kL2NormEps));
      scale_row<T>(row, norms[i], t_.key_columns, row);
    }
  }

  void transpose_keys() {
    transpose_tile<T>(t_.k, t_.key, padded_, t_.key_columns, t_.k_t, t_.kToken);
  }

  void prepare_scalar() {
    using S = Simd<T>;
    transpose_tile<T>(t_.qe, t_.key, 2 * padded_, t_.key_columns, t_.qe_t, t_.kToken);
    transpose_keys();
    const std::int64_t columns = whole_vectors<T>(2 * padded_);
    products<T>(padded_, columns, {t_.k_t, t_.kToken, t_.qe_t, t_.kToken, 0, t_.dk}, nullptr, {},
                Steps::all, t_.pairs_t, t_.kToken);
    weigh_pairs(t_.pairs_t);
    fill_factors();
    scale_tokens(t_.qe_t, t_.q_factor, t_.e_factor);
    for (std::int64_t i = 0; i < padded_; ++i) {
      scale_row<T>(t_.k + i * t_.key, t_.k_factor[i], t_.key_columns, t_.scaled_k + i * t_.key);
    }
    const Vec<T> whole = S::broadcast(whole_);
    for (std::int64_t d = 0; d < t_.key_columns; d += kLanes<T>) S::store(t_.whole + d, whole);
  }

  void fill_factors() {
    const T scale = static_cast<T>(shape_.scale);
    T decay[kDeltaRows];
    whole_ = T{1};
    for (std::int64_t i = 0; i < rows_; ++i) {
      decay[i] = gates_.reset ? T{0} : power_of<T>(gates_.first + gates_.cumulative[i]);
      whole_ = decay[i];
    }
    for (std::int64_t i = 0; i < rows_; ++i) {
      T erased = decay[i];
      if (shape_.exclusive) erased = i == 0 ? T{1} : decay[i - 1];
      t_.q_factor[i] = scale * decay[i];
      t_.e_factor[i] = -erased;
      t_.k_factor[i] = power_of<T>(gates_.cumulative[rows_ - 1] - gates_.cumulative[i]);
    }
    for (std::int64_t i = rows_; i < padded_; ++i) {
      t_.q_factor[i] = t_.e_factor[i] = t_.k_factor[i] = T{0};
    }
  }

  // Columns of a transposed tile [dk][2 rows].
  void scale_tokens(T* tile, const T* q_factor, const T* e_factor) {
    using S = Simd<T>;
    T factor[2 * kDeltaRows + kLanes<T>] = {};
    for (std::int64_t i = 0; i < padded_; ++i) {
      factor[i] = q_factor[i];
      factor[padded_ + i] = e_factor[i];
    }
    for (std::int64_t d = 0; d < t_.dk; ++d) {
      for (std::int64_t i = 0; i < 2 * padded_; i += kLanes<T>) {
        T* at = tile + d * t_.kToken + i;
        S::store(at, S::load(factor + i) * S::load(at));
      }
    }
  }

  void prepare_channels() {
    using S = Simd<T>;
    const std::int64_t columns = t_.key_columns;
    const T scale = static_cast<T>(shape_.scale);
    for (std::int64_t d = 0; d < columns; d += kLanes<T>) {
      S::store(t_.whole + d, S::broadcast(T{1}));
    }
    T* e = t_.qe + padded_ * t_.key;
    T* scaled_e = t_.scaled_qe + padded_ * t_.key;
    for (std::int64_t i = 0; i < padded_; ++i) {
      const std::int64_t at = i * t_.key;
      if (shape_.exclusive) scale_by_whole(e + at, T{-1}, scaled_e + at);
      if (i < rows_) multiply_rows<T>(t_.whole, t_.alpha + at, columns, t_.whole);
      scale_by_whole(t_.qe + at, scale, t_.scaled_qe + at);
      if (!shape_.exclusive) scale_by_whole(e + at, T{-1}, scaled_e + at);
    }
    for (std::int64_t d = 0; d < columns; d += kLanes<T>) {
      S::store(t_.running + d, S::broadcast(T{1}));
    }
    for (std::int64_t j = rows_ - 1; j >= 0; --j) {
      const std::int64_t at = j * t_.key;
      multiply_rows<T>(t_.k + at, t_.running, columns, t_.scaled_k + at);
      multiply_rows<T>(t_.running, t_.alpha + at, columns, t_.running);
    }
    fill_zeros(t_.scaled_k + rows_ * t_.key, (padded_ - rows_) * t_.key);
    transpose_tile<T>(t_.scaled_qe, t_.key, 2 * padded_, columns, t_.qe_t, t_.kToken);
    pair_channels();
  }

  void scale_by_whole(const T* from, T by, T* to) {
    using S = Simd<T>;
    const Vec<T> factor = S::broadcast(by);
    for (std::int64_t d = 0; d < t_.key_columns; d += kLanes<T>) {
      S::store(to + d, factor * S::load(from + d) * S::load(t_.whole + d));
    }
  }

  // Pair by pair along the rows: k_j decays as it goes, so nothing is divided.
  void pair_channels() {
    using S = Simd<T>;
    const T scale = static_cast<T>(shape_.scale);
    const T* e = t_.qe + padded_ * t_.key;
    for (std::int64_t j = 0; j < padded_; ++j) {
      T* row = t_.pairs_t + j * t_.kToken;
      fill_zeros(row, 2 * padded_);
      if (j >= rows_) continue;
      __builtin_memcpy(t_.running, t_.k + j * t_.key,
                       static_cast<std::size_t>(t_.key_columns) * sizeof(T));
      row[j] = scale * dot<T>(t_.qe + j * t_.key, t_.running, t_.key_columns);
      for (std::int64_t i = j + 1; i < rows_; ++i) {
        const std::int64_t at = i * t_.key;
        Vec<T> read{};
        Vec<T> erased{};
        for (std::int64_t d = 0; d < t_.key_columns; d += kLanes<T>) {
          const Vec<T> before = S::load(t_.running + d);
          const Vec<T> now = before * S::load(t_.alpha + at + d);
          S::store(t_.running + d, now);
          read = S::fma(S::load(t_.qe + at + d), now, read);
          erased = S::fma(S::load(e + at + d), shape_.exclusive ? before : now, erased);
        }
        row[i] = scale * sum_of_lanes<T>(read);
        row[padded_ + i] = -sum_of_lanes<T>(erased);
      }
    }
  }

  // Rows of u below each other: row i gets every row above it, of what `triangle` has as [j][i].
  template <int kRows>
  void solve_triangle(const T* triangle, std::int64_t width, T* u) {
    using S = Simd<T>;
    for (std::int64_t n = 0; n < width; n += kLanes<T>) {
      Vec<T> row[kRows];
      unroll<kRows>([&](auto i) { row[i] = S::load(u + i * t_.value + n); });
      unroll<kRows>([&](auto j) {
        const T* column = triangle + j * t_.kToken;
        for (int i = j + 1; i < kRows; ++i) {
          row[i] = S::fma(S::broadcast(column[i]), row[j], row[i]);
        }
      });
      unroll<kRows>([&](auto i) { S::store(u + i * t_.value + n, row[i]); });
    }
  }

  const DeltaChunk& chunk_;
  const DeltaShape& shape_;
  const DeltaGates& gates_;
  DeltaTiles<T>& t_;
  std::int64_t rows_;
  std::int64_t padded_;
  T whole_ = T{0};
};

}  // namespace
}  // namespace onchip::cpu::ONCHIP_CPU_ISA
