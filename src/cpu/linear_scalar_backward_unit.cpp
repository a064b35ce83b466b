// scalar_decay backward, one chunk of L rows of one head. With S and S' the states before and after
// the chunk, dS' the gradient of S', R the gradient of what the rows read, and D_ij = scale
// e^(b_i - b_j) for j <= i:
//   P = (Q K^T) * D,  E = (R X^T) * D,
//   dX = diag(e^(b_L - b)) K dS' + P^T R,
//   dQ = diag(scale e^b) R S^T + E K,
//   dK = diag(e^(b_L - b)) X dS'^T + E^T Q,
//   dS = e^(b_L) dS' + Q^T diag(scale e^b) R.
// The gradient of row t's log decay is the sum of what crosses it: pairs (i, j) with j < t <= i,
// the state before into rows i >= t, rows j < t into the state after, and the state before into the
// one after. Terms that do not cross it are left out, not subtracted: with strong decay the pairs
// (i, i) are much larger than all others.
#include "cpu/linear_scalar_forward.hpp"

namespace onchip::cpu::ONCHIP_CPU_ISA {
namespace {

template <typename T>
struct BackwardScratch {
  BackwardScratch(const LinearShape& shape, std::byte* base) : tile(shape), strides(shape) {
    Pieces pieces(base);
    const std::int64_t keys = whole_vectors<T>(shape.head_dim_k);
    const std::int64_t token = strides.token();
    q = pieces.take<T>(kChunkRows * strides.key);
    k = pieces.take<T>(kChunkRows * strides.key);
    x = pieces.take<T>(kChunkRows * strides.value);
    d_x = pieces.take<T>(kChunkRows * strides.value);
    d_q = pieces.take<T>(kChunkRows * strides.key);
    d_k = pieces.take<T>(kChunkRows * strides.key);
    sum_q = pieces.take<T>(kChunkRows * strides.key);
    sum_k = pieces.take<T>(kChunkRows * strides.key);
    q_t = pieces.take<T>(keys * token);
    k_t = pieces.take<T>(keys * token);
    x_t = pieces.take<T>(tile.columns * token);
    read_t = pieces.take<T>(tile.columns * token);
    p = pieces.take<T>(kChunkRows * token);
    e = pieces.take<T>(kChunkRows * token);
    e_t = pieces.take<T>(kChunkRows * token);
    state_t = pieces.take<T>(tile.columns * strides.key);
    d_state_t = pieces.take<T>(tile.columns * strides.key);
    weights = pieces.take<ChunkWeights<T>>(1);
    bytes = pieces.bytes();
  }

  StateTile<T> tile;
  ChunkStrides<T> strides;
  T* q = nullptr;          // [rows][dk]
  T* k = nullptr;          // [rows][dk]
  T* x = nullptr;          // [rows][width], weighed
  T* d_x = nullptr;        // [rows][width]
  T* d_q = nullptr;        // [rows][dk], of one value head
  T* d_k = nullptr;        // [rows][dk]
  T* sum_q = nullptr;      // [rows][dk], of the value heads of one key head
  T* sum_k = nullptr;      // [rows][dk]
  T* q_t = nullptr;        // [dk][rows]
  T* k_t = nullptr;        // [dk][rows]
  T* x_t = nullptr;        // [width][rows]
  T* read_t = nullptr;     // [width][rows], R transposed
  T* p = nullptr;          // [i][j]
  T* e = nullptr;          // [i][j]
  T* e_t = nullptr;        // [j][i]
  T* state_t = nullptr;    // [width][dk]
  T* d_state_t = nullptr;  // [width][dk]
  ChunkWeights<T>* weights = nullptr;
  std::size_t bytes = 0;
};

template <typename T>
double total(Vec<T> x) {
  double sum = 0.0;
  for (int lane = 0; lane < kLanes<T>; ++lane) sum += static_cast<double>(x[lane]);
  return sum;
}

template <typename T>
double dot(const T* a, const T* b, std::int64_t count) {
  using S = Simd<T>;
  Vec<T> sum{};
  for (std::int64_t d = 0; d < count; d += kLanes<T>) {
    sum = S::fma(S::load(a + d), S::load(b + d), sum);
  }
  return total<T>(sum);
}

// ---- from the outputs' gradients to those of what was read --------------------------------------

template <DType kStored>
class PullRead {
 public:
  using T = Arithmetic<kStored>::T;
  using S = Simd<T>;
  static constexpr std::int64_t kSize = sizeof(typename Arithmetic<kStored>::Element);

  PullRead(const ScalarChunk& chunk, const ScalarGradients& gradients)
      : chunk_(chunk), gradients_(gradients), tile_(chunk.shape) {}

  // `read`: what the rows read, where the operator's output is more than that.
  void run(const T* read, T* d_read) const {
    const std::int64_t rows = chunk_.gates->rows;
    load_tile<kStored, T>(gradients_.d_o, tile_.dv, rows, padded_rows(rows), d_read, tile_.stride);
    for (std::int64_t i = 0; i < padded_rows(rows); ++i) {
      T* row = d_read + i * tile_.stride;
      for (std::int64_t d = whole_vectors<T>(tile_.dv); d < tile_.columns; ++d) row[d] = T{0};
      if (i >= rows) continue;
      if (chunk_.read == ReadForm::mamba2) {
        pull_skip(i, read == nullptr ? nullptr : read + i * tile_.stride, row);
      } else if (tile_.width > tile_.dv) {
        pull_division(i, read + i * tile_.stride, row);
      }
    }
  }

 private:
  void pull_division(std::int64_t i, const T* read, T* row) const {
    const Denominator<T> by = denominator_of<T>(chunk_, i, read[tile_.dv]);
    T d_denominator = T{0};
    for (std::int64_t d = 0; d < tile_.dv; ++d) {
      row[d] /= by.value;
      d_denominator -= row[d] * (read[d] / by.value);
    }
    if (chunk_.read == ReadForm::mlstm && by.sum < T{0}) d_denominator = -d_denominator;
    row[tile_.dv] = by.constant ? T{0} : d_denominator;
  }

  void pull_skip(std::int64_t i, const T* read, T* row) const {
    const bool gated = chunk_.z.data != nullptr;
    for (std::int64_t d = 0; d < tile_.dv; d += kLanes<T>) {
      const int width =
          static_cast<int>(tile_.dv - d < kLanes<T> ? tile_.dv - d : std::int64_t{kLanes<T>});
      Vec<T> d_y = S::load(row + d);
      Vec<T> v{};
      if (chunk_.skip != nullptr) {
        v = load_numbers<kStored, T>(chunk_.v.data + i * chunk_.v.row_stride + d * kSize, width);
      }
      if (gated) {
        const std::int64_t z_at = d * dtype_size(chunk_.z_dtype);
        const Vec<T> z =
            load_any<T>(chunk_.z.data + i * chunk_.z.row_stride + z_at, chunk_.z_dtype, width);
        const Vec<T> s = sigmoid<T>(z);
        if (gradients_.dz.data != nullptr) {
          Vec<T> y = S::load(read + d);
          if (chunk_.skip != nullptr) y = S::fma(skip_vector<T>(chunk_, d, width), v, y);
          const Vec<T> one = S::broadcast(T{1});
          store_any<T>(gradients_.dz.data + i * gradients_.dz.row_stride + z_at, chunk_.z_dtype,
                       d_y * y * s * S::fma(z, one - s, one), width);
        }
        d_y = d_y * (z * s);
        S::store(row + d, d_y);
      }
      if (gradients_.d_skip != nullptr) {
        const Vec<T> product = d_y * v;
        for (int lane = 0; lane < width; ++lane) {
          gradients_.d_skip[chunk_.skip_width == 1 ? 0 : d + lane] +=
              static_cast<double>(product[lane]);
        }
      }
    }
    // Lanes past dv came from padding.
    for (std::int64_t d = tile_.dv; d < tile_.columns; ++d) row[d] = T{0};
  }

  const ScalarChunk& chunk_;
  const ScalarGradients& gradients_;
  StateTile<T> tile_;
};

// Whether the gradient of the read rows depends on what they read.
bool needs_read(const ScalarChunk& chunk, const ScalarGradients& gradients) {
  return chunk.shape.normalised || (chunk.z.data != nullptr && gradients.dz.data != nullptr);
}

// ---- the chunk ----------------------------------------------------------------------------------

template <DType kStored>
class BackwardChunk {
 public:
  using T = Arithmetic<kStored>::T;
  using S = Simd<T>;
  static constexpr std::int64_t kSize = sizeof(typename Arithmetic<kStored>::Element);

  BackwardChunk(const ScalarChunk& chunk, std::byte* memory)
      : chunk_(chunk),
        gates_(*chunk.gates),
        s_(chunk.shape, memory),
        token_(s_.strides.token()),
        rows_(gates_.rows),
        padded_(padded_rows(rows_)) {
    fill_weights<T>(gates_, chunk.scale, *s_.weights);
    load_tile<kStored, T>(chunk.q, s_.tile.dk, rows_, padded_, s_.q, s_.strides.key);
  }

  void local_gradient(const T* d_read, T* local) {
    for (std::int64_t i = 0; i < rows_; ++i) {
      const Vec<T> by = S::broadcast(s_.weights->carry[i]);
      for (std::int64_t d = 0; d < s_.tile.columns; d += kLanes<T>) {
        const std::int64_t at = i * s_.strides.value + d;
        S::store(s_.d_x + at, weighed<T>(S::load(d_read + at), by));
      }
    }
    update<T>(s_.tile.rows, s_.tile.columns,
              {s_.q, s_.strides.key, s_.d_x, s_.strides.value, 0, rows_}, nullptr, T{0}, local,
              s_.strides.value);
  }

  void gradients(const ScalarGradients& out, const T* before, const T* d_after, const T* d_read) {
    load_tile<kStored, T>(chunk_.k, s_.tile.dk, rows_, padded_, s_.k, s_.strides.key);
    load_tile<kStored, T>(chunk_.v, s_.tile.dv, rows_, padded_, s_.x, s_.strides.value);
    weigh_values<T>(chunk_, s_.tile, s_.x);
    transpose_all(before, d_after, d_read);
    fill_pairs();
    multiply(d_after, d_read);
    if (out.d_decay != nullptr) fill_d_decay(before, d_after, out.d_decay);
    store_values(out, d_read);
    store_keys(out);
  }

 private:
  std::int64_t keys() const { return whole_vectors<T>(s_.tile.dk); }

  void transpose_all(const T* before, const T* d_after, const T* d_read) {
    transpose_tile<T>(s_.q, s_.strides.key, rows_, keys(), s_.q_t, token_);
    transpose_tile<T>(s_.k, s_.strides.key, rows_, keys(), s_.k_t, token_);
    transpose_tile<T>(s_.x, s_.strides.value, rows_, s_.tile.columns, s_.x_t, token_);
    transpose_tile<T>(d_read, s_.strides.value, rows_, s_.tile.columns, s_.read_t, token_);
    if (!chunk_.empty) {
      transpose_tile<T>(before, s_.strides.value, s_.tile.dk, s_.tile.columns, s_.state_t,
                        s_.strides.key);
    }
    transpose_tile<T>(d_after, s_.strides.value, s_.tile.dk, s_.tile.columns, s_.d_state_t,
                      s_.strides.key);
  }

  // P, E, E^T, and the pairs' part in the gradients of b. Register tiles reach kProductRows - 1
  // columns above the diagonal.
  void fill_pairs() {
    const std::int64_t columns = whole_vectors<T>(rows_);
    lower_product<T>(padded_, columns, {s_.q_t, token_, s_.k_t, token_, 0, s_.tile.dk}, s_.p,
                     token_);
    lower_product<T>(padded_, columns, {s_.read_t, token_, s_.x_t, token_, 0, s_.tile.width}, s_.e,
                     token_);
    fill_zeros(column_sums_, kChunkRows);
    const Vec<T> scale = S::broadcast(static_cast<T>(chunk_.scale));
    for (std::int64_t i = 0; i < rows_; ++i) {
      const Vec<T> at = S::broadcast(s_.weights->index[i]);
      const Vec<T> segment = S::broadcast(s_.weights->segment[i]);
      Vec<T> row_sum{};
      for (std::int64_t j = 0; j < columns && j < i + kProductRows; j += kLanes<T>) {
        T x[kLanes<T>];
        for (int lane = 0; lane < kLanes<T>; ++lane) {
          x[lane] = static_cast<T>(gates_.cumulative[i] - gates_.cumulative[j + lane]);
        }
        const Vec<T> key = S::load(s_.weights->index + j);
        const auto sees = S::both(S::less_equal(key, at), S::less_equal(segment, key));
        const Vec<T> weight = S::select(sees, scale * power<T>(S::load(x)), Vec<T>{});
        T* p_at = s_.p + i * token_ + j;
        T* e_at = s_.e + i * token_ + j;
        const Vec<T> p = weighed<T>(S::load(p_at), weight);
        const Vec<T> e = S::load(e_at);
        S::store(p_at, p);
        S::store(e_at, weighed<T>(e, weight));
        const Vec<T> pair = S::select(S::less(key, at), weighed<T>(e, p), Vec<T>{});
        row_sum = row_sum + pair;
        S::store(column_sums_ + j, S::load(column_sums_ + j) + pair);
      }
      row_sums_[i] = total<T>(row_sum);
    }
    transpose_tile<T>(s_.e, token_, rows_, columns, s_.e_t, token_);
  }

  void multiply(const T* d_after, const T* d_read) {
    const std::int64_t key = s_.strides.key;
    const std::int64_t value = s_.strides.value;
    products<T>(padded_, s_.tile.columns, {s_.k_t, token_, d_after, value, 0, s_.tile.dk},
                s_.weights->keep, {s_.p, token_, d_read, value, 0, rows_}, Steps::from_row, s_.d_x,
                value);
    products<T>(padded_, keys(),
                {s_.read_t, token_, s_.state_t, key, 0, chunk_.empty ? 0 : s_.tile.width},
                s_.weights->carry, {}, Steps::all, s_.d_q, key);
    products<T>(padded_, keys(), {s_.x_t, token_, s_.d_state_t, key, 0, s_.tile.width},
                s_.weights->keep, {}, Steps::all, s_.d_k, key);
    for (std::int64_t t = 0; t < rows_; ++t) {
      carried_[t] = dot<T>(s_.q + t * key, s_.d_q + t * key, keys());
      kept_[t] = dot<T>(s_.k + t * key, s_.d_k + t * key, keys());
    }
    add_products<T>(padded_, keys(), {s_.e_t, token_, s_.k, key, 0, rows_}, Steps::up_to_row,
                    s_.d_q, key);
    add_products<T>(padded_, keys(), {s_.e, token_, s_.q, key, 0, rows_}, Steps::from_row, s_.d_k,
                    key);
  }

  void fill_d_decay(const T* before, const T* d_after, double* d_decay) {
    double through = 0.0;
    if (s_.weights->whole != T{0} && !chunk_.empty) {
      for (std::int64_t d = 0; d < s_.tile.dk; ++d) {
        const std::int64_t at = d * s_.strides.value;
        through += dot<T>(before + at, d_after + at, s_.tile.columns);
      }
      through *= static_cast<double>(s_.weights->whole);
    }
    double pairs = 0.0;
    double carried = 0.0;
    for (std::int64_t t = rows_; t-- > 0;) {
      pairs += row_sums_[t] - static_cast<double>(column_sums_[t]);
      carried += carried_[t];
      d_decay[t] = pairs + carried;
      if (gates_.segment[t] == t) pairs = 0.0;
    }
    double kept = 0.0;
    for (std::int64_t t = 0; t < rows_; ++t) {
      d_decay[t] += kept + through;
      kept += kept_[t];
      // Nothing crosses a reset, and it has no slope.
      if (gates_.segment[t] == t) d_decay[t] = 0.0;
    }
    // What the first decay multiplies is 0.
    if (chunk_.empty) d_decay[0] = 0.0;
  }

  void store_values(const ScalarGradients& out, const T* d_read) {
    const bool skips = chunk_.skip != nullptr;
    for (std::int64_t j = 0; j < rows_; ++j) {
      T* row = s_.d_x + j * s_.strides.value;
      const double d_write =
          s_.tile.width > s_.tile.dv ? static_cast<double>(row[s_.tile.dv]) : 0.0;
      const Vec<T> write = S::broadcast(static_cast<T>(gates_.write[j]));
      Vec<T> sum{};
      for (std::int64_t d = 0; d < s_.tile.dv; d += kLanes<T>) {
        const int width =
            static_cast<int>(s_.tile.dv - d < kLanes<T> ? s_.tile.dv - d : std::int64_t{kLanes<T>});
        Vec<T> dx = S::load(row + d);
        if (out.d_write != nullptr) {
          const std::byte* v = chunk_.v.data + j * chunk_.v.row_stride + d * kSize;
          sum = S::fma(load_numbers<kStored, T>(v, width), dx, sum);
        }
        if (chunk_.weighs) dx = dx * write;
        if (skips) {
          dx = S::fma(skip_vector<T>(chunk_, d, width), S::load(d_read + j * s_.strides.value + d),
                      dx);
        }
        if (out.dv.data != nullptr) {
          store_numbers<kStored, T>(out.dv.data + j * out.dv.row_stride + d * kSize, dx, width);
        }
      }
      if (out.d_write == nullptr) continue;
      out.d_write[j] = d_write + total<T>(sum);
    }
  }

  void store_keys(const ScalarGradients& out) {
    store_sum(out, s_.d_q, s_.sum_q, out.dq);
    store_sum(out, s_.d_k, s_.sum_k, out.dk);
  }

  void store_sum(const ScalarGradients& out, const T* one, T* sum, const UnitRow& to) {
    if (to.data == nullptr) return;
    if (!out.first_head) {
      for (std::int64_t i = 0; i < rows_; ++i) {
        for (std::int64_t d = 0; d < keys(); d += kLanes<T>) {
          T* at = sum + i * s_.strides.key + d;
          S::store(at, S::load(at) + S::load(one + i * s_.strides.key + d));
        }
      }
    } else if (!out.last_head) {
      __builtin_memcpy(sum, one, static_cast<std::size_t>(rows_ * s_.strides.key) * sizeof(T));
    }
    if (out.last_head) {
      store_tile<kStored, T>(out.first_head ? one : sum, s_.strides.key, s_.tile.dk, rows_, to);
    }
  }

  const ScalarChunk& chunk_;
  const ChunkGates& gates_;
  BackwardScratch<T> s_;
  std::int64_t token_;
  std::int64_t rows_;
  std::int64_t padded_;
  // What reaches or leaves a row, for the gradients of log decays.
  double row_sums_[kChunkRows];  // of pairs (t, j), j < t
  T column_sums_[kChunkRows];    // of pairs (i, t), i > t
  double carried_[kChunkRows];   // from the state before
  double kept_[kChunkRows];      // to the state after
};

}  // namespace

double linear_state_dot(const LinearShape& shape, const std::byte* a, const std::byte* b) {
  double sum = 0.0;
  with_arithmetic(shape.dtype, [&](auto number) {
    using T = decltype(number);
    const StateTile<T> tile(shape);
    for (std::int64_t d = 0; d < tile.dk; ++d) {
      sum += dot<T>(reinterpret_cast<const T*>(a) + d * tile.stride,
                    reinterpret_cast<const T*>(b) + d * tile.stride, tile.columns);
    }
  });
  return sum;
}

std::size_t scalar_backward_scratch_bytes(const LinearShape& shape) {
  std::size_t bytes = 0;
  with_arithmetic(shape.dtype, [&](auto number) {
    using T = decltype(number);
    const std::size_t forward = ForwardScratch<T>(shape, nullptr).bytes;
    const std::size_t backward = BackwardScratch<T>(shape, nullptr).bytes;
    bytes = backward < forward ? forward : backward;
  });
  return bytes;
}

std::size_t scalar_read_bytes(const LinearShape& shape) {
  std::size_t bytes = 0;
  with_arithmetic(shape.dtype, [&](auto number) {
    using T = decltype(number);
    bytes = static_cast<std::size_t>(kChunkRows * StateTile<T>(shape).stride) * sizeof(T);
  });
  return bytes;
}

void scalar_pull_read(const ScalarChunk& chunk, const ScalarGradients& gradients,
                      const std::byte* before, std::byte* d_read, std::byte* scratch) {
  with_stored(chunk.shape.dtype, [&](auto stored) {
    constexpr DType kStored = decltype(stored)::kDType;
    using T = Arithmetic<kStored>::T;
    const T* read = nullptr;
    if (needs_read(chunk, gradients)) {
      read =
          ForwardChunk<kStored>(chunk, scratch).read(reinterpret_cast<const T*>(before), nullptr);
    }
    PullRead<kStored>(chunk, gradients).run(read, reinterpret_cast<T*>(d_read));
  });
}

void scalar_local_gradient(const ScalarChunk& chunk, const std::byte* d_read, std::byte* local,
                           std::byte* scratch) {
  with_stored(chunk.shape.dtype, [&](auto stored) {
    constexpr DType kStored = decltype(stored)::kDType;
    using T = Arithmetic<kStored>::T;
    BackwardChunk<kStored>(chunk, scratch)
        .local_gradient(reinterpret_cast<const T*>(d_read), reinterpret_cast<T*>(local));
  });
}

void scalar_gradients(const ScalarChunk& chunk, const ScalarGradients& gradients,
                      const std::byte* before, const std::byte* d_after, const std::byte* d_read,
                      std::byte* scratch) {
  with_stored(chunk.shape.dtype, [&](auto stored) {
    constexpr DType kStored = decltype(stored)::kDType;
    using T = Arithmetic<kStored>::T;
    BackwardChunk<kStored>(chunk, scratch)
        .gradients(gradients, reinterpret_cast<const T*>(before),
                   reinterpret_cast<const T*>(d_after), reinterpret_cast<const T*>(d_read));
  });
}

}  // namespace onchip::cpu::ONCHIP_CPU_ISA
