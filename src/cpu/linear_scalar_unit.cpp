// scalar_decay forward, one chunk of L rows of one head (linear attention as chunks: Hua et al. 2022;
// Sun et al. 2023; Yang et al. 2023). With b_i the sum of log decays up to row i:
//   O = diag(scale e^b) Q S + P X,  P_ij = scale (q_i . k_j) e^(b_i - b_j) for j <= i,
//   S' = e^(b_L) S + K^T diag(e^(b_L - b)) X.
// Compiled once per instruction set. Only sums that every way of cutting the work shares are made: the
// state after a chunk is e^(b_L) S + (the chunk's own sum), so that chunks may be computed in order or
// side by side with the same bits.
#include "cpu/linear_scalar_chunk.hpp"

namespace onchip::cpu::ONCHIP_CPU_ISA {
namespace {

template <typename T>
struct ForwardScratch {
  explicit ForwardScratch(const LinearShape& shape, std::byte* base) : tile(shape), strides(shape) {
    LinearPieces pieces(base);
    const std::int64_t keys = whole_vectors<T>(shape.head_dim_k);
    q = pieces.take<T>(kChunkRows * strides.key);
    k = pieces.take<T>(kChunkRows * strides.key);
    x = pieces.take<T>(kChunkRows * strides.value);
    q_t = pieces.take<T>(keys * strides.token());
    k_t = pieces.take<T>(keys * strides.token());
    p_t = pieces.take<T>(kChunkRows * strides.token());
    o = pieces.take<T>(kChunkRows * strides.value);
    state = pieces.take<T>(tile.size());
    weights = pieces.take<ChunkWeights<T>>(1);
    bytes = pieces.bytes();
  }

  StateTile<T> tile;
  ChunkStrides<T> strides;
  T* q = nullptr;      // [rows][dk]
  T* k = nullptr;      // [rows][dk]
  T* x = nullptr;      // [rows][width], weighed
  T* q_t = nullptr;    // [dk][rows]
  T* k_t = nullptr;    // [dk][rows]
  T* p_t = nullptr;    // [j][i]
  T* o = nullptr;      // [rows][width]; before the outputs, kept values
  T* state = nullptr;  // of a walk token by token
  ChunkWeights<T>* weights = nullptr;
  std::size_t bytes = 0;
};

template <DType kStored>
class ForwardChunk {
 public:
  using T = Arithmetic<kStored>::T;

  ForwardChunk(const ScalarChunk& chunk, std::byte* memory)
      : chunk_(chunk),
        gates_(*chunk.gates),
        s_(chunk.shape, memory),
        rows_(gates_.rows),
        padded_(padded_rows(rows_)) {
    const bool keys =
        load_tile<kStored, T>(chunk.k, s_.tile.dk, rows_, padded_, s_.k, s_.strides.key);
    const bool values =
        load_tile<kStored, T>(chunk.v, s_.tile.dv, rows_, padded_, s_.x, s_.strides.value);
    weigh_values<T>(chunk, s_.tile, s_.x);
    fill_weights<T>(gates_, chunk.scale, *s_.weights);
    // A weight of 0 does not silence what is not finite: token by token nothing meets what it does
    // not see.
    recurrent_ = chunk.recurrent || !keys || !values;
  }

  void outputs(const T* before, T* after) {
    const bool queries =
        load_tile<kStored, T>(chunk_.q, s_.tile.dk, rows_, padded_, s_.q, s_.strides.key);
    if (recurrent_ || !queries) {
      read_recurrence(before, chunk_.recurrent ? after : nullptr);
    } else {
      read_chunk(before);
    }
    finish_rows<kStored, T>(chunk_, s_.tile, s_.o);
    store_tile<kStored, T>(s_.o, s_.strides.value, s_.tile.dv, rows_, chunk_.o);
    if (after == nullptr || chunk_.recurrent) return;
    if (recurrent_) {
      local_recurrence(s_.state);
      join(before, s_.state, after);
    } else {
      add_chunk(before, after);
    }
  }

  void local_state(T* local) {
    if (recurrent_) {
      local_recurrence(local);
    } else {
      add_chunk(nullptr, local);
    }
  }

 private:
  void read_recurrence(const T* before, T* after) {
    T* state = after == nullptr ? s_.state : after;
    if (state != before) {
      __builtin_memcpy(state, before, static_cast<std::size_t>(s_.tile.size()) * sizeof(T));
    }
    run_recurrence<T>(chunk_, s_.tile, s_.q, s_.k, s_.strides.key, s_.x, state, s_.o);
  }

  void local_recurrence(T* local) {
    fill_zeros(local, s_.tile.size());
    run_recurrence<T>(chunk_, s_.tile, nullptr, s_.k, s_.strides.key, s_.x, local, nullptr);
  }

  void read_chunk(const T* before) {
    const std::int64_t token = s_.strides.token();
    const std::int64_t columns = whole_vectors<T>(rows_);
    transpose_tile<T>(s_.q, s_.strides.key, rows_, whole_vectors<T>(s_.tile.dk), s_.q_t, token);
    transpose_tile<T>(s_.k, s_.strides.key, rows_, whole_vectors<T>(s_.tile.dk), s_.k_t, token);
    upper_product<T>(padded_, columns, {s_.k_t, token, s_.q_t, token, 0, s_.tile.dk}, s_.p_t,
                     token);
    const T scale = static_cast<T>(chunk_.scale);
    for (std::int64_t j = 0; j < rows_; ++j) {
      // Register tiles reach up to kProductRows - 1 rows above the diagonal.
      const std::int64_t first = j < kProductRows ? 0 : (j - kProductRows + 1);
      for (std::int64_t i = first / kLanes<T> * kLanes<T>; i < columns; i += kLanes<T>) {
        T* at = s_.p_t + j * token + i;
        Simd<T>::store(
            at, weighed<T>(Simd<T>::load(at), weights_of_key<T>(gates_, *s_.weights, i, j, scale)));
      }
    }
    products<T>(padded_, s_.tile.columns,
                {s_.q_t, token, before, s_.strides.value, 0, chunk_.empty ? 0 : s_.tile.dk},
                s_.weights->carry, {s_.p_t, token, s_.x, s_.strides.value, 0, rows_},
                Steps::up_to_row, s_.o, s_.strides.value);
  }

  void add_chunk(const T* before, T* after) {
    for (std::int64_t j = 0; j < rows_; ++j) {
      const Vec<T> by = Simd<T>::broadcast(s_.weights->keep[j]);
      for (std::int64_t d = 0; d < s_.tile.columns; d += kLanes<T>) {
        const std::int64_t at = j * s_.strides.value + d;
        Simd<T>::store(s_.o + at, by * Simd<T>::load(s_.x + at));
      }
    }
    update<T>(s_.tile.rows, s_.tile.columns,
              {s_.k, s_.strides.key, s_.o, s_.strides.value, 0, rows_},
              chunk_.empty ? nullptr : before, s_.weights->whole, after, s_.strides.value);
  }

  void join(const T* before, const T* local, T* after) {
    join_states<T>(s_.tile, 0, s_.tile.rows, chunk_.empty ? T{0} : s_.weights->whole, before, local,
                   after);
  }

  const ScalarChunk& chunk_;
  const ChunkGates& gates_;
  ForwardScratch<T> s_;
  std::int64_t rows_;
  std::int64_t padded_;
  bool recurrent_ = false;
};

template <typename F>
ONCHIP_INLINE void with_arithmetic(DType dtype, F&& f) {
  if (dtype == DType::f64) {
    f(double{});
  } else {
    f(float{});
  }
}

}  // namespace

std::size_t linear_state_bytes(const LinearShape& shape) {
  std::size_t bytes = 0;
  with_arithmetic(shape.dtype, [&](auto number) {
    using T = decltype(number);
    bytes = static_cast<std::size_t>(StateTile<T>(shape).size()) * sizeof(T);
  });
  return bytes;
}

bool linear_load_state(const LinearShape& shape, const UnitState& matrix,
                       const UnitState& normaliser, std::byte* state) {
  bool any = false;
  with_arithmetic(shape.dtype, [&](auto number) {
    using T = decltype(number);
    any = load_state_tile<T>(StateTile<T>(shape), matrix, normaliser, reinterpret_cast<T*>(state));
  });
  return any;
}

void linear_store_state(const LinearShape& shape, const std::byte* state, const UnitState& matrix,
                        const UnitState& normaliser) {
  with_arithmetic(shape.dtype, [&](auto number) {
    using T = decltype(number);
    store_state_tile<T>(StateTile<T>(shape), reinterpret_cast<const T*>(state), matrix, normaliser);
  });
}

std::size_t scalar_forward_scratch_bytes(const LinearShape& shape) {
  std::size_t bytes = 0;
  with_arithmetic(shape.dtype, [&](auto number) {
    bytes = ForwardScratch<decltype(number)>(shape, nullptr).bytes;
  });
  return bytes;
}

void scalar_outputs(const ScalarChunk& chunk, const std::byte* before, std::byte* after,
                    std::byte* scratch) {
  with_stored(chunk.shape.dtype, [&](auto stored) {
    constexpr DType kStored = decltype(stored)::kDType;
    using T = Arithmetic<kStored>::T;
    ForwardChunk<kStored>(chunk, scratch)
        .outputs(reinterpret_cast<const T*>(before), reinterpret_cast<T*>(after));
  });
}

void scalar_local_state(const ScalarChunk& chunk, std::byte* local, std::byte* scratch) {
  with_stored(chunk.shape.dtype, [&](auto stored) {
    constexpr DType kStored = decltype(stored)::kDType;
    using T = Arithmetic<kStored>::T;
    ForwardChunk<kStored>(chunk, scratch).local_state(reinterpret_cast<T*>(local));
  });
}

void scalar_join(const LinearShape& shape, const ChunkGates& gates, bool empty, std::int64_t slice,
                 std::int64_t slices, const std::byte* before, const std::byte* local,
                 std::byte* after) {
  with_arithmetic(shape.dtype, [&](auto number) {
    using T = decltype(number);
    const StateTile<T> tile(shape);
    join_states<T>(tile, tile.rows * slice / slices, tile.rows * (slice + 1) / slices,
                   empty ? T{0} : whole_decay<T>(gates), reinterpret_cast<const T*>(before),
                   reinterpret_cast<const T*>(local), reinterpret_cast<T*>(after));
  });
}

}  // namespace onchip::cpu::ONCHIP_CPU_ISA
