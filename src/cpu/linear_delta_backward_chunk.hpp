// delta_rule backward, one chunk of one head, last chunk first (linear_delta_chunk.hpp has the
// forward equations and names). With dO and the gradient dS' of the state after the chunk, [Q; E]
// scaled as in forward and Z = [dO; dX]:
//   dU = P^T dO + (K R) dS',  (I + A)^T dX = dU,  dS = D_L dS' + [scale Q D; -E D]^T Z,
//   d[scale Q D; -E D] = Z S^T,  d[P; -A] = Z U^T on the pairs,  d(K R) = U dS'^T.
// The gradient of row t's log decay is the sum of what crosses it: pairs (i, j) with j < t <= i,
// the state before the chunk into rows from t on, rows before t into the state after it, and the
// state through the chunk. Terms that do not cross it are left out, not subtracted: where keys are
// similar or decay is strong they are much larger than the rest.
#pragma once

#include "cpu/linear_delta_advance.hpp"

namespace onchip::cpu::ONCHIP_CPU_ISA {
namespace {

// What one part of a chunk's backward leaves to the next.
template <typename T>
struct DeltaBackwardRecord {
  DeltaBackwardRecord(const DeltaShape& shape, std::byte* base)
      : pieces(base),
        tiles(shape, pieces),
        z(pieces.take<T>(2 * kDeltaRows * tiles.value)),
        pairs(pieces.take<T>(2 * kDeltaRows * DeltaTiles<T>::kToken)) {}

  Pieces pieces;
  DeltaTiles<T> tiles;
  T* z;      // [2 rows][dv]: dO, then dX
  T* pairs;  // [2 rows][j]: P, then -A
};

// What only the rows' gradients need.
template <typename T>
struct DeltaBackwardScratch {
  DeltaBackwardScratch(const DeltaTiles<T>& tiles, std::byte* base) : pieces(base) {
    const std::int64_t token = DeltaTiles<T>::kToken;
    z_t = pieces.take<T>(tiles.value_columns * token);
    u_t = pieces.take<T>(tiles.value_columns * token);
    state_t = pieces.take<T>(tiles.value_columns * tiles.key);
    d_state_t = pieces.take<T>(tiles.value_columns * tiles.key);
    d_pairs_t = pieces.take<T>(kDeltaRows * token);
    d_pairs = pieces.take<T>(2 * kDeltaRows * token);
    d_qe = pieces.take<T>(2 * kDeltaRows * tiles.key);
    d_k = pieces.take<T>(kDeltaRows * tiles.key);
    d_alpha = pieces.take<T>(kDeltaRows * tiles.key);
    through = pieces.take<T>(tiles.key);
  }

  Pieces pieces;
  T* z_t;        // [dv][2 rows]
  T* u_t;        // [dv][rows]
  T* state_t;    // [dv][dk]
  T* d_state_t;  // [dv][dk]
  T* d_pairs_t;  // [j][2 rows]
  T* d_pairs;    // [2 rows][j]
  T* d_qe;       // [2 rows][dk]
  T* d_k;        // [rows][dk]
  T* d_alpha;    // [rows][dk], of log decays, where channels have one
  T* through;    // [dk]: of the state through the chunk
};

template <typename T>
class DeltaBackward {
 public:
  // `scratch` is for pull_rows and run alone.
  DeltaBackward(const DeltaBackwardChunk& chunk, std::byte* record, std::byte* scratch)
      : chunk_(chunk),
        shape_(chunk.forward.shape),
        gates_(*chunk.forward.gates),
        state_tile_(shape_.linear),
        r_(shape_, record),
        t_(r_.tiles),
        s_(t_, scratch),
        algebra_(chunk.forward, t_),
        rows_(algebra_.rows()),
        padded_(algebra_.padded()) {}

  bool prepare() {
    const bool finite = algebra_.load();
    algebra_.prepare();
    algebra_.load_reads(chunk_.d_o, t_.dv, r_.z, t_.value);
    prepare_operands();
    return finite;
  }

  // U too, whether rows are walked or not: what is left of X then is not.
  void advance(const DeltaColumns& columns, const T* before, T* after) {
    const DeltaColumns padded = t_.padded(columns);
    DeltaAdvance<T> advance(chunk_.forward, t_, nullptr);
    advance.run(padded, before, after);
    if (advance.walks()) algebra_.solve(padded, before);
  }

  void pull_values(const DeltaColumns& columns, const T* d_after, T* d_before) {
    const DeltaColumns padded = t_.padded(columns);
    solve_values(padded, d_after);
    pull_state(padded, d_after, d_before);
  }

  void pull_rows(const T* before, const T* d_after) {
    transpose_operands(before, d_after);
    pull_through(before, d_after);
    pull_pairs();
    pull_keys();
    store_decays();
    pull_erase();
    store_shared();
  }

  // All at once; gradients of rows come before that of the state is overwritten.
  void run(const T* state, T* d_state) {
    prepare();
    algebra_.solve(t_.all(), state);
    solve_values(t_.all(), d_state);
    pull_rows(state, d_state);
    pull_state(t_.all(), d_state, d_state);
  }

 private:
  static constexpr std::int64_t kToken = DeltaTiles<T>::kToken;

  bool forgets() const { return gates_.reset && !shape_.exclusive; }
  T* d_e() { return s_.d_qe + padded_ * t_.key; }
  T* d_x() { return r_.z + padded_ * t_.value; }
  const T* e() const { return t_.qe + padded_ * t_.key; }

  void prepare_operands() {
    transpose_tile<T>(t_.pairs_t, kToken, padded_, whole_vectors<T>(2 * padded_), r_.pairs, kToken);
    transpose_tile<T>(t_.scaled_k, t_.key, padded_, t_.key_columns, t_.k_t, kToken);
    if (shape_.channels) return;
    for (std::int64_t i = 0; i < padded_; ++i) {
      const std::int64_t at = i * t_.key;
      const std::int64_t below = (padded_ + i) * t_.key;
      scale_row<T>(t_.qe + at, t_.q_factor[i], t_.key_columns, t_.scaled_qe + at);
      scale_row<T>(t_.qe + below, t_.e_factor[i], t_.key_columns, t_.scaled_qe + below);
    }
  }

  // Columns of dU, and of dX in its place.
  void solve_values(const DeltaColumns& columns, const T* d_state) {
    const std::int64_t width = columns.end - columns.begin;
    T* d_u = d_x() + columns.begin;
    products<T>(padded_, width, {t_.k_t, kToken, d_state + columns.begin, t_.value, 0, t_.dk},
                nullptr, {r_.pairs, kToken, r_.z + columns.begin, t_.value, 0, rows_},
                Steps::from_row, d_u, t_.value);
    const T* a = r_.pairs + padded_ * kToken;  // -A_ij at [i][j]
    for (std::int64_t first = (padded_ - 1) / kSolveRows * kSolveRows; first >= 0;
         first -= kSolveRows) {
      const std::int64_t count = padded_ - first < kSolveRows ? padded_ - first : kSolveRows;
      T* rows = d_u + first * t_.value;
      if (first + count < padded_) {
        update<T>(count, width, {a + first, kToken, d_u, t_.value, first + count, padded_}, rows,
                  T{1}, rows, t_.value);
      }
      const T* triangle = a + first * kToken + first;
      if (count == kSolveRows) {
        solve_triangle<kSolveRows>(triangle, width, rows);
      } else {
        solve_triangle<kRowUnit>(triangle, width, rows);
      }
    }
  }

  // Row j gets every row below it, of what `triangle` has as [i][j].
  template <int kRows>
  void solve_triangle(const T* triangle, std::int64_t width, T* rows) {
    using S = Simd<T>;
    for (std::int64_t n = 0; n < width; n += kLanes<T>) {
      Vec<T> row[kRows];
      unroll<kRows>([&](auto i) { row[i] = S::load(rows + i * t_.value + n); });
      unroll<kRows>([&](auto from_last) {
        constexpr int kRow = kRows - 1 - from_last;
        const T* factors = triangle + kRow * kToken;
        for (int j = 0; j < kRow; ++j) {
          row[j] = S::fma(S::broadcast(factors[j]), row[kRow], row[j]);
        }
      });
      unroll<kRows>([&](auto i) { S::store(rows + i * t_.value + n, row[i]); });
    }
  }

  void transpose_operands(const T* state, const T* d_state) {
    transpose_tile<T>(r_.z, t_.value, 2 * padded_, t_.value_columns, s_.z_t, kToken);
    transpose_tile<T>(t_.u, t_.value, padded_, t_.value_columns, s_.u_t, kToken);
    transpose_tile<T>(d_state, t_.value, t_.dk, t_.value_columns, s_.d_state_t, t_.key);
    if (!chunk_.forward.empty) {
      transpose_tile<T>(state, t_.value, t_.dk, t_.value_columns, s_.state_t, t_.key);
    }
  }

  // Of the state through the chunk, to any log decay of a channel.
  void pull_through(const T* state, const T* d_state) {
    for (std::int64_t d = 0; d < t_.key_columns; ++d) {
      const bool passes = d < t_.dk && !chunk_.forward.empty && t_.whole[d] != T{0};
      s_.through[d] = passes ? t_.whole[d] * dot<T>(state + d * t_.value, d_state + d * t_.value,
                                                    t_.value_columns)
                             : T{0};
    }
  }

  // Of the products q_i . k_j and e_i . k_j; where channels decay, of P_ij and -A_ij.
  void pull_pairs() {
    products<T>(padded_, whole_vectors<T>(2 * padded_), {s_.u_t, kToken, s_.z_t, kToken, 0, t_.dv},
                nullptr, {}, Steps::all, s_.d_pairs_t, kToken);
    if (shape_.channels) return;
    if (chunk_.d_decay != nullptr) cross_pairs();
    algebra_.weigh_pairs(s_.d_pairs_t);
    transpose_tile<T>(s_.d_pairs_t, kToken, padded_, whole_vectors<T>(2 * padded_), s_.d_pairs,
                      kToken);
  }

  void cross_pairs() {
    for (std::int64_t i = 0; i < rows_; ++i) chunk_.d_decay[i] = 0.0;
    for (std::int64_t j = 0; j < rows_; ++j) {
      const T* pairs = t_.pairs_t + j * kToken;
      const T* d_pairs = s_.d_pairs_t + j * kToken;
      double sum = 0.0;
      double erased = 0.0;
      for (std::int64_t i = rows_ - 1; i > j; --i) {
        const double own =
            static_cast<double>(pairs[padded_ + i]) * static_cast<double>(d_pairs[padded_ + i]);
        sum += static_cast<double>(pairs[i]) * static_cast<double>(d_pairs[i]);
        chunk_.d_decay[i] += sum + (shape_.exclusive ? erased : erased + own);
        erased += own;
      }
    }
  }

  void pull_keys() {
    const std::int64_t steps = chunk_.forward.empty ? 0 : t_.dv;
    const Product<T> read{s_.z_t, kToken, s_.state_t, t_.key, 0, steps};
    const Product<T> written{s_.u_t, kToken, s_.d_state_t, t_.key, 0, t_.dv};
    if (shape_.channels) {
      products<T>(2 * padded_, t_.key_columns, read, nullptr, {}, Steps::all, s_.d_qe, t_.key);
      products<T>(padded_, t_.key_columns, written, nullptr, {}, Steps::all, s_.d_k, t_.key);
      decay_channels();
      pair_channels();
      return;
    }
    T factor[2 * kDeltaRows];
    for (std::int64_t i = 0; i < padded_; ++i) {
      factor[i] = t_.q_factor[i];
      factor[padded_ + i] = t_.e_factor[i];
    }
    products<T>(2 * padded_, t_.key_columns, read, steps == 0 ? nullptr : factor, {}, Steps::all,
                s_.d_qe, t_.key);
    products<T>(padded_, t_.key_columns, written, t_.k_factor, {}, Steps::all, s_.d_k, t_.key);
    if (chunk_.d_decay != nullptr) cross_ends();
    add_products<T>(2 * padded_, t_.key_columns, {s_.d_pairs_t, kToken, t_.k, t_.key, 0, rows_},
                    Steps::all, s_.d_qe, t_.key);
    add_products<T>(padded_, t_.key_columns, {s_.d_pairs, kToken, t_.qe, t_.key, 0, 2 * padded_},
                    Steps::all, s_.d_k, t_.key);
  }

  // The gradients of rows hold what passed the chunk's ends, not yet the pairs.
  void cross_ends() {
    double read = 0.0;
    for (std::int64_t i = rows_ - 1; i >= 0; --i) {
      const std::int64_t at = i * t_.key;
      const double erased = static_cast<double>(dot<T>(e() + at, d_e() + at, t_.key_columns));
      read += static_cast<double>(dot<T>(t_.qe + at, s_.d_qe + at, t_.key_columns));
      chunk_.d_decay[i] += shape_.exclusive ? read : read + erased;
      read += erased;
    }
    double kept = 0.0;
    for (std::int64_t d = 0; d < t_.dk; ++d) kept += static_cast<double>(s_.through[d]);
    for (std::int64_t i = 0; i < rows_; ++i) {
      const std::int64_t at = i * t_.key;
      chunk_.d_decay[i] += kept;
      kept += static_cast<double>(dot<T>(t_.k + at, s_.d_k + at, t_.key_columns));
    }
  }

  // From the gradients of the scaled rows to those of the rows, and what they cross.
  void decay_channels() {
    using S = Simd<T>;
    const std::int64_t columns = t_.key_columns;
    const Vec<T> scale = S::broadcast(static_cast<T>(shape_.scale));
    for (std::int64_t d = 0; d < columns; d += kLanes<T>) {
      Vec<T> decay = S::broadcast(T{1});
      for (std::int64_t i = 0; i < rows_ && !chunk_.forward.empty; ++i) {
        T* q = s_.d_qe + i * t_.key + d;
        T* e = d_e() + i * t_.key + d;
        const Vec<T> before = decay;
        decay = decay * S::load(t_.alpha + i * t_.key + d);
        S::store(q, scale * decay * S::load(q));
        S::store(e, (shape_.exclusive ? before : decay) * -S::load(e));
      }
      decay = S::broadcast(T{1});
      for (std::int64_t j = rows_ - 1; j >= 0; --j) {
        T* k = s_.d_k + j * t_.key + d;
        S::store(k, decay * S::load(k));
        decay = decay * S::load(t_.alpha + j * t_.key + d);
      }
      cross_channel_ends(d);
    }
  }

  void cross_channel_ends(std::int64_t d) {
    using S = Simd<T>;
    Vec<T> read{};
    for (std::int64_t i = rows_ - 1; i >= 0; --i) {
      const std::int64_t at = i * t_.key + d;
      const Vec<T> erased = S::load(e() + at) * S::load(d_e() + at);
      read = S::fma(S::load(t_.qe + at), S::load(s_.d_qe + at), read);
      S::store(s_.d_alpha + at, shape_.exclusive ? read : read + erased);
      read = read + erased;
    }
    Vec<T> kept = S::load(s_.through + d);
    for (std::int64_t i = 0; i < rows_; ++i) {
      const std::int64_t at = i * t_.key + d;
      S::store(s_.d_alpha + at, S::load(s_.d_alpha + at) + kept);
      kept = S::fma(S::load(t_.k + at), S::load(s_.d_k + at), kept);
    }
  }

  void pair_channels() {
    using S = Simd<T>;
    const T scale = static_cast<T>(shape_.scale);
    // What crosses rows up to this one, and not the next.
    Vec<T> crossing[kDeltaChannelRows];
    for (std::int64_t j = 0; j < rows_; ++j) {
      const T* pairs = s_.d_pairs_t + j * kToken;
      for (std::int64_t d = 0; d < t_.key_columns; d += kLanes<T>) {
        const Vec<T> key = S::load(t_.k + j * t_.key + d);
        Vec<T> sum = S::load(s_.d_k + j * t_.key + d);
        Vec<T> decay = S::broadcast(T{1});
        for (std::int64_t i = j; i < rows_; ++i) {
          const std::int64_t at = i * t_.key + d;
          const Vec<T> before = decay;
          if (i > j) decay = decay * S::load(t_.alpha + at);
          const Vec<T> read = S::broadcast(scale * pairs[i]) * decay;
          const Vec<T> query = S::load(t_.qe + at);
          sum = S::fma(read, query, sum);
          S::store(s_.d_qe + at, S::fma(read, key, S::load(s_.d_qe + at)));
          crossing[i] = read * key * query;
          if (i == j) continue;
          const Vec<T> erased =
              S::broadcast(-pairs[padded_ + i]) * (shape_.exclusive ? before : decay);
          const Vec<T> erase = S::load(e() + at);
          sum = S::fma(erased, erase, sum);
          S::store(d_e() + at, S::fma(erased, key, S::load(d_e() + at)));
          Vec<T>& crossed = crossing[shape_.exclusive ? i - 1 : i];
          crossed = S::fma(erased * key, erase, crossed);
        }
        S::store(s_.d_k + j * t_.key + d, sum);
        Vec<T> crossed{};
        for (std::int64_t i = rows_ - 1; i > j; --i) {
          T* to = s_.d_alpha + i * t_.key + d;
          crossed = crossed + crossing[i];
          S::store(to, S::load(to) + crossed);
        }
      }
    }
  }

  void store_decays() {
    const bool meets_nothing = gates_.reset || chunk_.forward.empty;
    if (!shape_.channels) {
      if (chunk_.d_decay != nullptr && meets_nothing) chunk_.d_decay[0] = 0.0;
      return;
    }
    using S = Simd<T>;
    for (std::int64_t i = 0; i < rows_; ++i) {
      for (std::int64_t d = 0; d < t_.key_columns; d += kLanes<T>) {
        const std::int64_t at = i * t_.key + d;
        // What is not finite crosses no reset either.
        const auto reset = S::equal(S::load(t_.alpha + at), Vec<T>{});
        const Vec<T> sum = S::select(reset, Vec<T>{}, S::load(s_.d_alpha + at));
        S::store(s_.d_alpha + at, i == 0 && meets_nothing ? Vec<T>{} : sum);
      }
    }
    if (chunk_.forward.raw != nullptr) pull_raw_gates<T>(chunk_, t_, s_.d_alpha);
    if (chunk_.d_gate.data != nullptr) {
      store_any_tile<T>(s_.d_alpha, t_.key, t_.dk, rows_, chunk_.d_gate, chunk_.forward.gate_dtype);
    }
  }

  void pull_state(const DeltaColumns& columns, const T* d_after, T* d_before) {
    const std::int64_t width = columns.end - columns.begin;
    if (forgets()) {
      for (std::int64_t d = 0; d < state_tile_.rows; ++d) {
        fill_zeros(d_before + d * t_.value + columns.begin, width);
      }
      return;
    }
    decayed_update<T>(state_tile_.rows, width,
                      {t_.scaled_qe, t_.key, r_.z + columns.begin, t_.value, 0, 2 * padded_},
                      t_.whole, d_after + columns.begin, d_before + columns.begin, t_.value);
  }

  // From e and x to k, v, beta and what else made them.
  void pull_erase() {
    const EraseForm form = shape_.erase;
    for (std::int64_t i = 0; i < rows_; ++i) {
      const T* de = d_e() + i * t_.key;
      const T* dx = d_x() + i * t_.value;
      T* k = t_.k + i * t_.key;
      T* a = t_.a + i * t_.key;
      T* v = t_.v + i * t_.value;
      T* b = t_.b + i * t_.value;
      T* dv = t_.u + i * t_.value;
      T* dk = s_.d_k + i * t_.key;
      if (form == EraseForm::channels) {
        using S = Simd<T>;
        for (std::int64_t d = 0; d < t_.key_columns; d += kLanes<T>) {
          S::store(dk + d, S::fma(S::load(de + d), S::load(a + d), S::load(dk + d)));
        }
        multiply_rows<T>(de, k, t_.key_columns, a);
        multiply_rows<T>(dx, b, t_.value_columns, dv);
        multiply_rows<T>(dx, v, t_.value_columns, b);
        continue;
      }
      const T beta = static_cast<T>(gates_.beta[i]);
      const T* from = form == EraseForm::keys ? k : a;
      chunk_.d_beta[i] = static_cast<double>(dot<T>(de, from, t_.key_columns)) +
                         static_cast<double>(dot<T>(dx, v, t_.value_columns));
      scale_row<T>(dx, beta, t_.value_columns, dv);
      if (form == EraseForm::keys) {
        add_row<T>(de, beta, t_.key_columns, dk);
      } else {
        scale_row<T>(de, beta, t_.key_columns, a);
      }
    }
    if (chunk_.dv.data != nullptr) {
      store_any_tile<T>(t_.u, t_.value, t_.dv, rows_, chunk_.dv, shape_.linear.dtype);
    }
    if (form == EraseForm::channels && chunk_.db.data != nullptr) {
      store_any_tile<T>(t_.b, t_.value, t_.dv, rows_, chunk_.db, chunk_.forward.b_dtype);
    }
  }

  // Adds the chunk's rows to those of the heads before; whether they are the last.
  bool add_to(std::byte* sums, T* rows) {
    if (sums == nullptr) return true;
    T* total = reinterpret_cast<T*>(sums);
    for (std::int64_t i = 0; i < rows_; ++i) {
      T* own = rows + i * t_.key;
      if (!chunk_.first_head) add_row<T>(total + i * t_.key, T{1}, t_.key_columns, own);
      if (!chunk_.last_head) {
        __builtin_memcpy(total + i * t_.key, own,
                         static_cast<std::size_t>(t_.key_columns) * sizeof(T));
      }
    }
    return chunk_.last_head;
  }

  // From the gradient of x / sqrt(|x|^2 + eps) to that of x, in place.
  void pull_norms(const T* normalised, const T* norms, T* gradient) {
    using S = Simd<T>;
    for (std::int64_t i = 0; i < rows_; ++i) {
      const T* x = normalised + i * t_.key;
      T* dx = gradient + i * t_.key;
      T factor = norms[i];
      if (t_.dk == 1) {
        // Only eps keeps x / |x| from being constant: dx - x (x dx) would be rounding.
        factor *= static_cast<T>(kL2NormEps) * norms[i] * norms[i];
      } else {
        add_row<T>(x, -dot<T>(x, dx, t_.key_columns), t_.key_columns, dx);
      }
      const Vec<T> by = S::broadcast(factor);
      for (std::int64_t d = 0; d < t_.key_columns; d += kLanes<T>) {
        S::store(dx + d, by * S::load(dx + d));
      }
    }
  }

  void store_shared() {
    if (add_to(chunk_.q_sums, s_.d_qe)) {
      if (shape_.l2norm) pull_norms(t_.qe, t_.q_norm, s_.d_qe);
      algebra_.store_reads(s_.d_qe, t_.key, t_.dk, chunk_.dq);
    }
    if (add_to(chunk_.k_sums, s_.d_k)) {
      if (shape_.l2norm) pull_norms(t_.k, t_.k_norm, s_.d_k);
      if (chunk_.dk.data != nullptr) {
        store_any_tile<T>(s_.d_k, t_.key, t_.dk, rows_, chunk_.dk, shape_.linear.dtype);
      }
    }
    if (shape_.erase == EraseForm::keys) return;
    // Erase channels have their own head's rows.
    std::byte* sums = shape_.erase == EraseForm::channels ? nullptr : chunk_.a_sums;
    if (add_to(sums, t_.a) && chunk_.da.data != nullptr) {
      store_any_tile<T>(t_.a, t_.key, t_.dk, rows_, chunk_.da, chunk_.forward.a_dtype);
    }
  }

  const DeltaBackwardChunk& chunk_;
  const DeltaShape& shape_;
  const DeltaGates& gates_;
  StateTile<T> state_tile_;
  DeltaBackwardRecord<T> r_;
  DeltaTiles<T>& t_;
  DeltaBackwardScratch<T> s_;
  DeltaAlgebra<T> algebra_;
  std::int64_t rows_;
  std::int64_t padded_;
};

}  // namespace
}  // namespace onchip::cpu::ONCHIP_CPU_ISA
