// The state after a chunk of delta_rule from the one before: by the chunk's algebra, or row by row
// for short chunks and for what is not finite. Columns do not meet, so any of them can be a task.
#pragma once

#include "cpu/linear_delta_chunk.hpp"

namespace onchip::cpu::ONCHIP_CPU_ISA {
namespace {

template <typename T>
class DeltaAdvance {
 public:
  // `o`: [rows][dv], what rows read that are walked; NULL: nothing.
  DeltaAdvance(const DeltaChunk& chunk, DeltaTiles<T>& tiles, T* o)
      : chunk_(chunk),
        gates_(*chunk.gates),
        state_tile_(chunk.shape.linear),
        t_(tiles),
        algebra_(chunk, tiles),
        o_(o) {}

  bool walks() const { return chunk_.row_by_row || gates_.rows <= kDeltaRowByRow; }

  // U, where the chunk is not walked, and the state after it; `after` may be `before`.
  void run(const DeltaColumns& columns, const T* before, T* after) {
    if (walks()) {
      copy(columns, before, after);
      walk(columns, after);
    } else {
      algebra_.solve(columns, before);
      update_state(columns, before, after);
    }
  }

  void update_state(const DeltaColumns& columns, const T* before, T* after) {
    decayed_update<T>(state_tile_.rows, columns.end - columns.begin,
                      {t_.scaled_k, t_.key, t_.u + columns.begin, t_.value, 0, gates_.rows},
                      t_.whole, chunk_.empty ? nullptr : before + columns.begin,
                      after + columns.begin, t_.value);
  }

  void copy(const DeltaColumns& columns, const T* before, T* after) const {
    if (before == after && !chunk_.empty) return;
    const auto bytes = static_cast<std::size_t>(columns.end - columns.begin) * sizeof(T);
    for (std::int64_t d = 0; d < state_tile_.rows; ++d) {
      const std::int64_t at = d * t_.value + columns.begin;
      if (chunk_.empty) {
        __builtin_memset(after + at, 0, bytes);
      } else {
        __builtin_memcpy(after + at, before + at, bytes);
      }
    }
  }

  // A block of columns at a time, so that it stays in the cache from one row to the next.
  void walk(const DeltaColumns& columns, T* state) {
    constexpr std::int64_t kBlock = 4 * kLanes<T>;
    std::int64_t n = columns.begin;
    for (; n + kBlock <= columns.end; n += kBlock) walk_columns<4>(n, state);
    for (; n < columns.end; n += kLanes<T>) walk_columns<1>(n, state);
  }

 private:
  template <int kVectors>
  void walk_columns(std::int64_t n, T* state) {
    using S = Simd<T>;
    const bool exclusive = chunk_.shape.exclusive;
    const T* e_rows = t_.qe + padded_rows(gates_.rows) * t_.key;
    for (std::int64_t i = 0; i < gates_.rows; ++i) {
      const T one = scalar_decay(i);
      const T* channels = chunk_.shape.channels ? t_.alpha + i * t_.key : nullptr;
      const auto decay = [&](std::int64_t d) {
        if (i == 0 && chunk_.empty) return T{0};
        return channels == nullptr ? one : channels[d];
      };
      const T* e = e_rows + i * t_.key;
      const T* k = t_.k + i * t_.key;
      const T* q = t_.qe + i * t_.key;
      Vec<T> y[kVectors];
      unroll<kVectors>([&](auto v) { y[v] = S::load(t_.u + i * t_.value + n + v * kLanes<T>); });
      for (std::int64_t d = 0; d < t_.dk; ++d) {
        const T alpha = exclusive ? T{1} : decay(d);
        if (alpha == T{0}) continue;
        const Vec<T> by = S::broadcast(-(e[d] * alpha));
        const T* row = state + d * t_.value + n;
        unroll<kVectors>([&](auto v) { y[v] = S::fma(by, S::load(row + v * kLanes<T>), y[v]); });
      }
      Vec<T> o[kVectors] = {};
      for (std::int64_t d = 0; d < t_.dk; ++d) {
        const T alpha = decay(d);
        const Vec<T> by = S::broadcast(alpha);
        const Vec<T> key = S::broadcast(k[d]);
        const Vec<T> query = S::broadcast(q[d]);
        T* row = state + d * t_.value + n;
        unroll<kVectors>([&](auto v) {
          const Vec<T> kept = alpha == T{0} ? Vec<T>{} : by * S::load(row + v * kLanes<T>);
          const Vec<T> now = S::fma(key, y[v], kept);
          S::store(row + v * kLanes<T>, now);
          o[v] = S::fma(query, now, o[v]);
        });
      }
      const Vec<T> scale = S::broadcast(static_cast<T>(chunk_.shape.scale));
      if (o_ == nullptr) continue;
      unroll<kVectors>(
          [&](auto v) { S::store(o_ + i * t_.value + n + v * kLanes<T>, scale * o[v]); });
    }
  }

  T scalar_decay(std::int64_t i) const {
    if (i == 0) return gates_.reset ? T{0} : power_of<T>(gates_.first);
    return power_of<T>(gates_.cumulative[i] - gates_.cumulative[i - 1]);
  }

  const DeltaChunk& chunk_;
  const DeltaGates& gates_;
  StateTile<T> state_tile_;
  DeltaTiles<T>& t_;
  DeltaAlgebra<T> algebra_;
  T* o_;
};

}  // namespace
}  // namespace onchip::cpu::ONCHIP_CPU_ISA
