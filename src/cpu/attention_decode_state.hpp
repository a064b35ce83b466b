// The online softmax of a decode task's rows over some of the keys: where it lies in memory, how it
// starts, how two become one, and what comes of it.
#pragma once

#include "cpu/attention_decode_unit.hpp"
#include "cpu/pieces.hpp"
#include "cpu/row_products.hpp"
#include "cpu/row_softmax.hpp"
#include "cpu/simd.hpp"

namespace onchip::cpu::ONCHIP_CPU_ISA {
namespace {

std::int64_t smaller(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
std::int64_t larger(std::int64_t a, std::int64_t b) { return a < b ? b : a; }

// Numbers that `dim` channels take, however they lie.
template <typename T>
std::int64_t padded(std::int64_t dim) {
  constexpr std::int64_t kSpan = 2 * kLanes<T>;
  return (dim + kSpan - 1) / kSpan * kSpan;
}

// Of row r of a task's kv head h: index h rows + r.
template <typename T>
struct State {
  T* max;
  T* sum;
  T* o;  // [row][o_stride], not yet divided; channels lie as in Channels
  std::int64_t o_stride;

  State(std::int64_t rows, std::int64_t dim_v, Pieces& pieces)
      : max(pieces.take<T>(rows)), sum(pieces.take<T>(rows)), o_stride(padded<T>(dim_v)) {
    o = pieces.take<T>(rows * o_stride);
  }
};

std::int64_t rows_of(const DecodeTask& task) { return task.call.row_end - task.call.row_begin; }

template <typename T>
State<T> state_of(const DecodeTask& task, const std::byte* memory) {
  Pieces pieces(const_cast<std::byte*>(memory));
  return State<T>(task.kv_heads * rows_of(task), task.call.head_dim_v, pieces);
}

// Row `at` of a state that has seen nothing but a score without value (-inf: none).
template <typename T>
void clear(const State<T>& state, std::int64_t at, T sink) {
  state.max[at] = sink;
  state.sum[at] = sink == -kInfinity<T> ? T{0} : T{1};
  for (std::int64_t d = 0; d < state.o_stride; d += kLanes<T>) {
    Simd<T>::store(state.o + at * state.o_stride + d, Vec<T>{});
  }
}

template <typename T>
void start(const DecodeTask& task, std::byte* memory) {
  const State<T> state = state_of<T>(task, memory);
  const std::int64_t rows = rows_of(task);
  for (std::int64_t at = 0; at < task.kv_heads * rows; ++at) {
    // The sink is a first score without value, at its own maximum.
    T sink = -kInfinity<T>;
    if (task.call.sink.data != nullptr) {
      const std::int64_t head =
          at / rows * task.group + (task.call.row_begin + at % rows) / task.call.seqlen_q;
      sink = load_number<T>(task.call.sink.data + head * task.call.sink.head_stride,
                            task.call.sink.dtype);
    }
    clear(state, at, sink);
  }
}

template <typename T>
void fold(const DecodeTask& task, std::byte* memory, const std::byte* part_memory) {
  using S = Simd<T>;
  const State<T> state = state_of<T>(task, memory);
  const State<T> part = state_of<T>(task, part_memory);
  for (std::int64_t at = 0; at < task.kv_heads * rows_of(task); ++at) {
    // A part of which the row saw nothing.
    if (part.max[at] == -kInfinity<T> && part.sum[at] == T{0}) continue;
    const T maximum = part.max[at] > state.max[at] ? part.max[at] : state.max[at];
    const T shift = maximum == -kInfinity<T> ? T{0} : maximum;
    const T kept = exp_of<T>(state.max[at] - shift);
    const T added = exp_of<T>(part.max[at] - shift);
    state.max[at] = maximum;
    state.sum[at] = state.sum[at] * kept + part.sum[at] * added;
    for (std::int64_t d = 0; d < state.o_stride; d += kLanes<T>) {
      T* o = state.o + at * state.o_stride + d;
      S::store(o, S::fma(S::load(o), S::broadcast(kept),
                         S::load(part.o + at * part.o_stride + d) * S::broadcast(added)));
    }
  }
}

template <DType kStored, typename T>
void store(const DecodeTask& task, const std::byte* memory) {
  using S = Simd<T>;
  using C = Channels<kStored, T>;
  using Lse = Arithmetic<kStored>::T;
  const ForwardTask& call = task.call;
  const State<T> state = state_of<T>(task, memory);
  const std::int64_t rows = rows_of(task);
  for (std::int64_t at = 0; at < task.kv_heads * rows; ++at) {
    const std::int64_t row = call.row_begin + at % rows;
    const std::int64_t head = at / rows * task.group + row / call.seqlen_q;
    const std::int64_t i = row % call.seqlen_q;
    const T sum = state.sum[at];
    if (call.lse.data != nullptr) {
      const auto wide_sum = static_cast<double>(sum);
      const Lse lse =
          wide_sum == 0.0
              ? -kInfinity<Lse>
              : static_cast<Lse>(static_cast<double>(state.max[at]) + __builtin_log(wide_sum));
      std::memcpy(call.lse.data + head * call.lse.head_stride + i * call.lse.row_stride, &lse,
                  sizeof(lse));
    }
    // A row without keys and without sink: 0 / 1.
    const Vec<T> by = S::broadcast(sum == T{0} ? T{1} : sum);
    std::byte* o = call.o.data + head * call.o.head_stride + i * call.o.row_stride;
    for (std::int64_t d = 0; d < call.head_dim_v; d += C::kSpan) {
      Vec<T> pieces[C::kPieces];
      unroll<C::kPieces>([&](auto i) {
        // + 0 turns -0 into 0.
        pieces[i] = S::load(state.o + at * state.o_stride + d + i * kLanes<T>) / by + Vec<T>{};
      });
      const int width = static_cast<int>(smaller(C::kSpan, call.head_dim_v - d));
      C::store(o + d * C::kSize, pieces, width);
    }
  }
}

}  // namespace
}  // namespace onchip::cpu::ONCHIP_CPU_ISA
