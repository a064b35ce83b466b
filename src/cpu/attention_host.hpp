// What the host side of CPU attention shares: the table of units, what every plan checks, and a
// problem's tensors as one (sequence, kv head) of a unit's task sees them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

#include "core/attention.hpp"
#include "core/backend.hpp"
#include "core/settings.hpp"
#include "core/thread_pool.hpp"
#include "cpu/attention_unit.hpp"
#include "cpu/cpu_features.hpp"

namespace onchip::cpu {

struct Unit {
  std::size_t (*forward_scratch_bytes)(const ForwardShape& shape);
  void (*forward)(const ForwardTask& task, std::byte* scratch);
  std::size_t (*forward_part_bytes)(const ForwardShape& shape);
  void (*forward_part)(const ForwardTask& task, std::int64_t chunk, std::byte* part,
                       std::byte* scratch);
  void (*forward_join)(const ForwardTask& task, std::byte* parts, std::size_t part_bytes);
  std::size_t (*backward_scratch_bytes)(const BackwardShape& shape);
  void (*backward)(const BackwardTask& task, std::byte* scratch);
  void (*backward_shift)(const BackwardTask& task);
  void (*merge_row)(DType dtype, std::int64_t head_dim, const MergeRow& row);
  const char* forward_name;
  const char* forward_wide_name;
  const char* backward_name;
  const char* merge_name;
};

// Only of an instruction set that is available.
Unit unit_of(Isa isa);

inline std::int32_t workers_for(std::int64_t tasks) {
  return static_cast<std::int32_t>(std::clamp<std::int64_t>(tasks, 1, std::max(num_threads(), 1)));
}

template <typename Problem>
std::string_view unsupported(const Problem& problem) {
  if (problem.device.type != ONCHIP_DEVICE_CPU) return "works on CPU tensors only";
  if (!is_float(problem.dtype)) return "takes float64, float32, float16 and bfloat16 only";
  return {};
}

// Why attention, forward or backward, cannot be computed here; nothing if it can.
std::optional<Reject> attention_refusal(const AttentionProblem& problem, const Settings& settings);

inline std::size_t rounded_up(std::size_t bytes) {
  return (bytes + kScratchAlignment - 1) / kScratchAlignment * kScratchAlignment;
}

inline std::int64_t group_size(const AttentionProblem& problem) {
  return problem.num_heads_kv == 0 ? 0 : problem.num_heads_q / problem.num_heads_kv;
}

inline UnitRows unit_rows(const RowsView& rows, std::int64_t batch, std::int64_t row,
                          std::int64_t head) {
  if (rows.data == nullptr) return {};  // absent, or of an empty tensor
  return {rows.at(batch, row, head), rows.head_stride, rows.row_stride};
}

inline UnitRows unit_rows(const RowScalarsView& rows, std::int64_t batch, std::int64_t row,
                          std::int64_t head) {
  if (rows.data == nullptr) return {};
  return {rows.at(batch, row, head), rows.head_stride, rows.row_stride};
}

// All but the range of rows, for the query heads of one kv head of sequence n.
ForwardTask attention_task(const AttentionProblem& problem, std::int64_t n, const SequenceRange& s,
                           std::int64_t kv_head);

}  // namespace onchip::cpu
