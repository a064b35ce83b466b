// A chunk of scalar_decay as forward computes it, and as backward does again: its read rows and the
// state that it leaves.
#pragma once

#include "cpu/linear_scalar_chunk.hpp"

namespace onchip::cpu::ONCHIP_CPU_ISA {
namespace {

template <typename T>
struct ForwardScratch {
  explicit ForwardScratch(const LinearShape& shape, std::byte* base) : tile(shape), strides(shape) {
    Pieces pieces(base);
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

  // [rows][width], what the rows read of `before`; a walk token by token leaves its state in
  // `after`.
  T* read(const T* before, T* after) {
    const bool queries =
        load_tile<kStored, T>(chunk_.q, s_.tile.dk, rows_, padded_, s_.q, s_.strides.key);
    if (recurrent_ || !queries) {
      read_recurrence(before, chunk_.recurrent ? after : nullptr);
    } else {
      read_chunk(before);
    }
    return s_.o;
  }

  // The operator's outputs, and the state after the chunk unless `after` is NULL.
  void outputs(const T* before, T* after) {
    read(before, after);
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
}  // namespace onchip::cpu::ONCHIP_CPU_ISA
