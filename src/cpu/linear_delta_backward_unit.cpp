// delta_rule backward, one chunk of one head, last chunk first (linear_delta_chunk.hpp has the
// forward equations and names). With dO and the gradient dS' of the state after the chunk, [Q; E]
// scaled as in forward and Z = [dO; dX]:
//   dU = P^T dO + (K R) dS',  (I + A)^T dX = dU,  dS = D_L dS' + [scale Q D; -E D]^T Z,
//   d[scale Q D; -E D] = Z S^T,  d[P; -A] = Z U^T on the pairs,  d(K R) = U dS'^T.
// A pair's decay and the decays to the chunk's ends are powers of differences of sums of log
// decays, so the gradient of such a sum is q dq + e de - k dk of its row, and of the last one also
// S' dS'. Compiled once per instruction set.
#include "cpu/linear_delta_chunk.hpp"

namespace onchip::cpu::ONCHIP_CPU_ISA {
namespace {

template <typename T>
struct DeltaBackwardScratch {
  DeltaBackwardScratch(const DeltaShape& shape, std::byte* base)
      : pieces(base), tiles(shape, pieces) {
    const std::int64_t token = DeltaTiles<T>::kToken;
    z = pieces.take<T>(2 * kDeltaRows * tiles.value);
    z_t = pieces.take<T>(tiles.value_columns * token);
    u_t = pieces.take<T>(tiles.value_columns * token);
    state_t = pieces.take<T>(tiles.value_columns * tiles.key);
    d_state_t = pieces.take<T>(tiles.value_columns * tiles.key);
    pairs = pieces.take<T>(2 * kDeltaRows * token);
    d_pairs_t = pieces.take<T>(kDeltaRows * token);
    d_pairs = pieces.take<T>(2 * kDeltaRows * token);
    d_qe = pieces.take<T>(2 * kDeltaRows * tiles.key);
    d_k = pieces.take<T>(kDeltaRows * tiles.key);
  }

  LinearPieces pieces;
  DeltaTiles<T> tiles;
  T* z;          // [2 rows][dv]: dO, then dX
  T* z_t;        // [dv][2 rows]
  T* u_t;        // [dv][rows]
  T* state_t;    // [dv][dk]
  T* d_state_t;  // [dv][dk]
  T* pairs;      // [2 rows][j]: P, then -A
  T* d_pairs_t;  // [j][2 rows]
  T* d_pairs;    // [2 rows][j]
  T* d_qe;       // [2 rows][dk]
  T* d_k;        // [rows][dk]
};

template <typename T>
class DeltaBackward {
 public:
  DeltaBackward(const DeltaBackwardChunk& chunk, const T* state, T* d_state, T* ends,
                std::byte* scratch)
      : chunk_(chunk),
        shape_(chunk.forward.shape),
        gates_(*chunk.forward.gates),
        state_tile_(shape_.linear),
        s_(shape_, scratch),
        t_(s_.tiles),
        algebra_(chunk.forward, t_),
        rows_(algebra_.rows()),
        padded_(algebra_.padded()),
        state_(state),
        d_state_(d_state),
        ends_(ends) {}

  void run() {
    algebra_.load();
    algebra_.prepare();
    algebra_.solve(state_);
    algebra_.load_reads(chunk_.d_o, t_.dv, s_.z, t_.value);
    prepare_operands();
    solve_values();
    transpose_operands();
    pull_pairs();
    pull_rows();
    pull_decays();
    pull_state();
    pull_erase();
    store_shared();
  }

 private:
  static constexpr std::int64_t kToken = DeltaTiles<T>::kToken;

  bool forgets() const { return gates_.reset && !shape_.exclusive; }
  T* d_e() { return s_.d_qe + padded_ * t_.key; }
  T* d_x() { return s_.z + padded_ * t_.value; }
  const T* e() const { return t_.qe + padded_ * t_.key; }

  void prepare_operands() {
    transpose_tile<T>(t_.pairs_t, kToken, padded_, whole_vectors<T>(2 * padded_), s_.pairs, kToken);
    transpose_tile<T>(t_.scaled_k, t_.key, padded_, t_.key_columns, t_.k_t, kToken);
    if (shape_.channels) return;
    for (std::int64_t i = 0; i < padded_; ++i) {
      const std::int64_t at = i * t_.key;
      const std::int64_t below = (padded_ + i) * t_.key;
      scale_row<T>(t_.qe + at, t_.q_factor[i], t_.key_columns, t_.scaled_qe + at);
      scale_row<T>(t_.qe + below, t_.e_factor[i], t_.key_columns, t_.scaled_qe + below);
    }
  }

  // dU, and dX in its place.
  void solve_values() {
    T* d_u = d_x();
    products<T>(padded_, t_.value_columns, {t_.k_t, kToken, d_state_, t_.value, 0, t_.dk}, nullptr,
                {s_.pairs, kToken, s_.z, t_.value, 0, rows_}, Steps::from_row, d_u, t_.value);
    const T* a = s_.pairs + padded_ * kToken;  // -A_ij at [i][j]
    for (std::int64_t first = (padded_ - 1) / kSolveRows * kSolveRows; first >= 0;
         first -= kSolveRows) {
      const std::int64_t count = padded_ - first < kSolveRows ? padded_ - first : kSolveRows;
      T* rows = d_u + first * t_.value;
      if (first + count < padded_) {
        update<T>(count, t_.value_columns,
                  {a + first, kToken, d_u, t_.value, first + count, padded_}, rows, T{1}, rows,
                  t_.value);
      }
      const T* triangle = a + first * kToken + first;
      if (count == kSolveRows) {
        solve_triangle<kSolveRows>(triangle, rows);
      } else {
        solve_triangle<kRowUnit>(triangle, rows);
      }
    }
  }

  // Row j gets every row below it, of what `triangle` has as [i][j].
  template <int kRows>
  void solve_triangle(const T* triangle, T* rows) {
    using S = Simd<T>;
    for (std::int64_t n = 0; n < t_.value_columns; n += kLanes<T>) {
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

  void transpose_operands() {
    transpose_tile<T>(s_.z, t_.value, 2 * padded_, t_.value_columns, s_.z_t, kToken);
    transpose_tile<T>(t_.u, t_.value, padded_, t_.value_columns, s_.u_t, kToken);
    transpose_tile<T>(d_state_, t_.value, t_.dk, t_.value_columns, s_.d_state_t, t_.key);
    if (!chunk_.forward.empty) {
      transpose_tile<T>(state_, t_.value, t_.dk, t_.value_columns, s_.state_t, t_.key);
    }
  }

  // Of the products q_i . k_j and e_i . k_j; where channels decay, of P_ij and -A_ij.
  void pull_pairs() {
    products<T>(padded_, whole_vectors<T>(2 * padded_), {s_.u_t, kToken, s_.z_t, kToken, 0, t_.dv},
                nullptr, {}, Steps::all, s_.d_pairs_t, kToken);
    if (shape_.channels) return;
    algebra_.weigh_pairs(s_.d_pairs_t);
    transpose_tile<T>(s_.d_pairs_t, kToken, padded_, whole_vectors<T>(2 * padded_), s_.d_pairs,
                      kToken);
  }

  void pull_rows() {
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
    products<T>(2 * padded_, t_.key_columns, read, steps == 0 ? nullptr : factor,
                {s_.d_pairs_t, kToken, t_.k, t_.key, 0, rows_}, Steps::all, s_.d_qe, t_.key);
    products<T>(padded_, t_.key_columns, written, t_.k_factor,
                {s_.d_pairs, kToken, t_.qe, t_.key, 0, 2 * padded_}, Steps::all, s_.d_k, t_.key);
  }

  // From the gradients of the scaled rows to those of the rows.
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
    }
  }

  void pair_channels() {
    using S = Simd<T>;
    const T scale = static_cast<T>(shape_.scale);
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
          sum = S::fma(read, S::load(t_.qe + at), sum);
          S::store(s_.d_qe + at, S::fma(read, key, S::load(s_.d_qe + at)));
          if (i == j) continue;
          const Vec<T> erased =
              S::broadcast(-pairs[padded_ + i]) * (shape_.exclusive ? before : decay);
          sum = S::fma(erased, S::load(e() + at), sum);
          S::store(d_e() + at, S::fma(erased, key, S::load(d_e() + at)));
        }
        S::store(s_.d_k + j * t_.key + d, sum);
      }
    }
  }

  // Sums from the chunk's end to every row. What the first row's decay multiplies may be nothing.
  void pull_decays() {
    const bool meets_nothing = gates_.reset || chunk_.forward.empty;
    if (shape_.channels) {
      pull_channel_decays(meets_nothing);
      return;
    }
    if (chunk_.d_decay == nullptr) return;
    double sum = 0.0;
    for (std::int64_t d = 0; d < t_.dk; ++d) sum += static_cast<double>(ends_[d]);
    for (std::int64_t i = rows_ - 1; i >= 0; --i) {
      const std::int64_t at = i * t_.key;
      const double erased = static_cast<double>(dot<T>(e() + at, d_e() + at, t_.key_columns));
      sum += static_cast<double>(dot<T>(t_.qe + at, s_.d_qe + at, t_.key_columns));
      sum -= static_cast<double>(dot<T>(t_.k + at, s_.d_k + at, t_.key_columns));
      if (!shape_.exclusive) sum += erased;
      chunk_.d_decay[i] = i == 0 && meets_nothing ? 0.0 : sum;
      if (shape_.exclusive) sum += erased;
    }
  }

  void pull_channel_decays(bool meets_nothing) {
    using S = Simd<T>;
    for (std::int64_t d = 0; d < t_.key_columns; d += kLanes<T>) {
      Vec<T> sum = S::load(ends_ + d);
      for (std::int64_t i = rows_ - 1; i >= 0; --i) {
        const std::int64_t at = i * t_.key + d;
        const Vec<T> erased = S::load(e() + at) * S::load(d_e() + at);
        sum = S::fma(S::load(t_.qe + at), S::load(s_.d_qe + at), sum);
        sum = sum - S::load(t_.k + at) * S::load(s_.d_k + at);
        if (!shape_.exclusive) sum = sum + erased;
        T* decay = t_.alpha + at;
        // No pair reaches over a reset: what is left of the sum there is rounding.
        const auto reset = S::equal(S::load(decay), Vec<T>{});
        sum = S::select(reset, Vec<T>{}, sum);
        S::store(decay, i == 0 && meets_nothing ? Vec<T>{} : sum);
        if (shape_.exclusive) sum = sum + erased;
      }
    }
    if (chunk_.d_channels != nullptr) {
      for (std::int64_t i = 0; i < rows_; ++i) {
        for (std::int64_t d = 0; d < t_.dk; ++d) {
          chunk_.d_channels[i * t_.dk + d] = static_cast<double>(t_.alpha[i * t_.key + d]);
        }
      }
    } else if (chunk_.d_log_decay.data != nullptr) {
      store_any_tile<T>(t_.alpha, t_.key, t_.dk, rows_, chunk_.d_log_decay,
                        chunk_.forward.log_decay_dtype);
    }
  }

  void pull_state() {
    if (forgets()) {
      fill_zeros(d_state_, state_tile_.size());
      fill_zeros(ends_, t_.key_columns);
      return;
    }
    decayed_update<T>(state_tile_.rows, t_.value_columns,
                      {t_.scaled_qe, t_.key, s_.z, t_.value, 0, 2 * padded_}, t_.whole, d_state_,
                      d_state_, t_.value);
    for (std::int64_t d = 0; d < t_.dk; ++d) {
      ends_[d] = chunk_.forward.empty
                     ? T{0}
                     : dot<T>(state_ + d * t_.value, d_state_ + d * t_.value, t_.value_columns);
    }
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
      add_row<T>(x, -dot<T>(x, dx, t_.key_columns), t_.key_columns, dx);
      const Vec<T> by = S::broadcast(norms[i]);
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
  DeltaBackwardScratch<T> s_;
  DeltaTiles<T>& t_;
  DeltaAlgebra<T> algebra_;
  std::int64_t rows_;
  std::int64_t padded_;
  const T* state_;
  T* d_state_;
  T* ends_;
};

}  // namespace

std::size_t delta_backward_scratch_bytes(const DeltaShape& shape) {
  std::size_t bytes = 0;
  with_delta_arithmetic(shape, [&](auto number) {
    bytes = DeltaBackwardScratch<decltype(number)>(shape, nullptr).pieces.bytes();
  });
  return bytes;
}

std::size_t delta_sum_row_bytes(const DeltaShape& shape) {
  std::size_t bytes = 0;
  with_delta_arithmetic(shape, [&](auto number) {
    using T = decltype(number);
    bytes = static_cast<std::size_t>(tile_stride<T>(shape.linear.head_dim_k)) * sizeof(T);
  });
  return bytes;
}

void delta_ends(const DeltaShape& shape, const std::byte* state, const std::byte* d_state,
                std::byte* ends) {
  with_delta_arithmetic(shape, [&](auto number) {
    using T = decltype(number);
    const StateTile<T> tile(shape.linear);
    T* to = reinterpret_cast<T*>(ends);
    fill_zeros(to, tile_stride<T>(tile.dk));
    for (std::int64_t d = 0; d < tile.dk; ++d) {
      to[d] = dot<T>(reinterpret_cast<const T*>(state) + d * tile.stride,
                     reinterpret_cast<const T*>(d_state) + d * tile.stride, tile.columns);
    }
  });
}

void delta_backward(const DeltaBackwardChunk& chunk, const std::byte* state, std::byte* d_state,
                    std::byte* ends, std::byte* scratch) {
  with_delta_arithmetic(chunk.forward.shape, [&](auto number) {
    using T = decltype(number);
    DeltaBackward<T>(chunk, reinterpret_cast<const T*>(state), reinterpret_cast<T*>(d_state),
                     reinterpret_cast<T*>(ends), scratch)
        .run();
  });
}

}  // namespace onchip::cpu::ONCHIP_CPU_ISA
