// The query rows of a task of attention: where they lie, which keys they may see, how they get onto
// the lanes of vectors and back.
#pragma once

#include "cpu/attention_unit.hpp"
#include "cpu/simd.hpp"

namespace onchip::cpu::ONCHIP_CPU_ISA {
namespace {

// Position and limits of each row of a task. Rows past the last one repeat it, so that they see
// what it sees and nothing more.
struct RowTable {
  std::int64_t head[kMaxTaskRows];  // in the group
  std::int64_t position[kMaxTaskRows];
  std::int64_t key_begin[kMaxTaskRows];  // what causal and window leave
  std::int64_t key_end[kMaxTaskRows];
};

std::int64_t smaller(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
std::int64_t larger(std::int64_t a, std::int64_t b) { return a < b ? b : a; }

void fill_rows(const ForwardTask& task, std::int64_t count, RowTable& rows) {
  for (std::int64_t r = 0; r < count; ++r) {
    const std::int64_t row = smaller(task.row_begin + r, task.row_end - 1);
    const std::int64_t head = row / task.seqlen_q;
    const std::int64_t i = row - head * task.seqlen_q;
    const std::int64_t diagonal = i + task.diagonal_offset;
    std::int64_t begin = 0;
    std::int64_t end = task.seqlen_kv;
    if (task.window_left >= 0) begin = larger(begin, diagonal - task.window_left);
    if (task.window_right >= 0) end = smaller(end, diagonal + task.window_right + 1);
    rows.head[r] = head;
    rows.position[r] = i;
    rows.key_begin[r] = begin;
    rows.key_end[r] = larger(begin, end);
  }
}

struct KeyRange {
  std::int64_t begin;
  std::int64_t end;
};

// The keys that any of these rows sees, and those that all of them see.
struct PanelRange {
  KeyRange any;
  KeyRange all;
};

PanelRange panel_range(const RowTable& rows, std::int64_t first, int count) {
  constexpr std::int64_t kFar = INT64_MAX;
  PanelRange range{{kFar, 0}, {0, kFar}};
  for (std::int64_t r = first; r < first + count; ++r) {
    range.all.begin = larger(range.all.begin, rows.key_begin[r]);
    range.all.end = smaller(range.all.end, rows.key_end[r]);
    if (rows.key_begin[r] == rows.key_end[r]) continue;
    range.any.begin = smaller(range.any.begin, rows.key_begin[r]);
    range.any.end = larger(range.any.end, rows.key_end[r]);
  }
  if (range.any.end == 0) range.any.begin = 0;
  return range;
}

template <DType kStored, typename T>
void load_rows(const std::byte* from, std::int64_t row_stride, std::int64_t dim, std::int64_t count,
               T* to, std::int64_t to_stride) {
  constexpr int kCount = kLanes<T>;
  constexpr std::int64_t kSize = sizeof(typename Arithmetic<kStored>::Element);
  for (std::int64_t row = 0; row < count; ++row) {
    const std::byte* source = from + row * row_stride;
    T* target = to + row * to_stride;
    for (std::int64_t d = 0; d < dim; d += kCount) {
      // The tile's rows are padded to whole vectors.
      const int width = static_cast<int>(smaller(kCount, dim - d));
      Simd<T>::store(target + d, load_numbers<kStored, T>(source + d * kSize, width));
    }
  }
}

template <typename T>
bool all_finite(const T* row, std::int64_t dim) {
  using S = Simd<T>;
  Vec<T> zeros{};
  std::int64_t d = 0;
  for (; d + kLanes<T> <= dim; d += kLanes<T>) zeros = zeros + S::load(row + d) * Vec<T>{};
  T rest = T{0};
  for (; d < dim; ++d) rest += row[d] * T{0};
  return rest == T{0} && !S::any(S::complement(S::equal(zeros, Vec<T>{})));
}

// q_t[d][lane] = scale * q[row of lane][d]
template <DType kStored, typename T>
void load_queries(const ForwardTask& task, const RowTable& rows, std::int64_t first, int vectors,
                  T* q_t) {
  using S = Simd<T>;
  constexpr int kCount = kLanes<T>;
  constexpr std::int64_t kSize = sizeof(typename Arithmetic<kStored>::Element);
  const Vec<T> scale = S::broadcast(static_cast<T>(task.scale));
  const int panel_rows = vectors * kCount;
  for (int lane = 0; lane < panel_rows; lane += kCount) {
    const std::byte* source[kCount];
    for (int i = 0; i < kCount; ++i) {
      const std::int64_t r = first + lane + i;
      source[i] =
          task.q.data + rows.head[r] * task.q.head_stride + rows.position[r] * task.q.row_stride;
    }
    for (std::int64_t d = 0; d < task.head_dim_qk; d += kCount) {
      const int width = static_cast<int>(smaller(kCount, task.head_dim_qk - d));
      Vec<T> square[kCount];
      for (int i = 0; i < kCount; ++i)
        square[i] = load_numbers<kStored, T>(source[i] + d * kSize, width);
      transpose<T>(square);
      for (int i = 0; i < width; ++i) {
        S::store(q_t + (d + i) * panel_rows + lane, square[i] * scale);
      }
    }
  }
}

// o[row of lane][d] = o_t[d][lane] / divisor[lane], or 0 where the divisor is 0: nothing had a
// weight there, whatever met the weights 0.
template <DType kStored, typename T>
void store_outputs(const ForwardTask& task, const RowTable& rows, std::int64_t first,
                   std::int64_t valid, int vectors, const T* o_t, const T* divisor) {
  using S = Simd<T>;
  constexpr int kCount = kLanes<T>;
  constexpr std::int64_t kSize = sizeof(typename Arithmetic<kStored>::Element);
  const int panel_rows = vectors * kCount;
  for (int lane = 0; lane < panel_rows; lane += kCount) {
    const int filled = static_cast<int>(smaller(kCount, valid - lane));
    std::byte* target[kCount];
    for (int i = 0; i < filled; ++i) {
      const std::int64_t r = first + lane + i;
      target[i] =
          task.o.data + rows.head[r] * task.o.head_stride + rows.position[r] * task.o.row_stride;
    }
    const Vec<T> by = S::load(divisor + lane);
    const auto empty = S::equal(by, Vec<T>{});
    for (std::int64_t d = 0; d < task.head_dim_v; d += kCount) {
      const int width = static_cast<int>(smaller(kCount, task.head_dim_v - d));
      Vec<T> square[kCount];
      for (int i = 0; i < kCount; ++i) {
        // Past the last channel only lanes that are not stored. + 0 turns -0, which only depends on
        // what masked keys hold, into 0.
        const std::int64_t channel = d + (i < width ? i : width - 1);
        const Vec<T> o = S::load(o_t + channel * panel_rows + lane) / by + Vec<T>{};
        square[i] = S::select(empty, Vec<T>{}, o);
      }
      transpose<T>(square);
      for (int i = 0; i < filled; ++i) {
        store_numbers<kStored, T>(target[i] + d * kSize, square[i], width);
      }
    }
  }
}

}  // namespace
}  // namespace onchip::cpu::ONCHIP_CPU_ISA
