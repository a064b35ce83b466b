#include "cpu/attention_host.hpp"
#include "cpu/isa_table.hpp"

#include <cmath>
#include <limits>
#include <string>

namespace onchip::cpu {

namespace {

// Whether the arithmetic of the kernels, float32 unless the inputs are float64, holds the number.
bool holds(const AttentionProblem& problem, double value) {
  const double magnitude = std::fabs(value);
  return problem.dtype == DType::f64 || magnitude == 0.0 ||
         (magnitude >= double{std::numeric_limits<float>::min()} &&
          magnitude <= double{std::numeric_limits<float>::max()});
}

UnitScores unit_scores(const ScoresView& scores, std::int64_t sequence, std::int64_t head) {
  if (scores.data == nullptr) return {};
  return {scores.at(sequence, head, 0, 0),
          scores.dtype,
          scores.head_stride,
          scores.row_stride,
          scores.column_stride,
          scores.column_stride == dtype_size(scores.dtype)};
}

UnitHeadScalars unit_head_scalars(const HeadScalarsView& scalars, std::int64_t sequence,
                                  std::int64_t head) {
  if (scalars.data == nullptr) return {};
  return {scalars.at(sequence, head), scalars.dtype, scalars.head_stride};
}

UnitSegments unit_segments(const SegmentIdsView& ids, std::int64_t batch, std::int64_t row) {
  if (ids.data == nullptr) return {};
  return {ids.data + batch * ids.batch_stride + row * ids.row_stride, ids.row_stride};
}

// A window wider than every sequence bounds nothing; as a small number it cannot overflow.
std::int64_t clamped_window(std::int64_t window, const SequenceRange& s) {
  return std::min(window, s.q_len + s.kv_len);
}

}  // namespace

#define ONCHIP_CPU_UNIT(isa)                                                              \
  Unit {                                                                                  \
    isa::attention_forward_scratch_bytes, isa::attention_forward,                         \
        isa::attention_forward_part_bytes, isa::attention_forward_part,                   \
        isa::attention_forward_join, isa::attention_backward_scratch_bytes,               \
        isa::attention_backward, isa::attention_backward_shift, isa::attention_merge_row, \
        "attention_forward/" #isa, "attention_forward/" #isa " in float64",               \
        "attention_backward/" #isa, "attention_merge/" #isa                               \
  }

Unit unit_of(Isa isa) { ONCHIP_CPU_RETURN_TABLE(isa, ONCHIP_CPU_UNIT); }

#undef ONCHIP_CPU_UNIT

std::optional<Reject> attention_refusal(const AttentionProblem& problem, const Settings& settings) {
  if (const std::string_view reason = unsupported(problem); !reason.empty()) {
    return Reject{std::string(reason)};
  }
  if (const std::string& reason = settings.num_threads_problem; !reason.empty()) {
    return Reject{reason, true};
  }
  if (problem.options.tf32) return Reject{"precision tf32: this backend keeps float32 exact"};
  if (!holds(problem, problem.options.scale)) {
    return Reject{"scale is outside the range of float32"};
  }
  if (!holds(problem, problem.options.softcap)) {
    return Reject{"softcap is outside the range of float32"};
  }
  return std::nullopt;
}

ForwardTask attention_task(const AttentionProblem& problem, std::int64_t n, const SequenceRange& s,
                           std::int64_t kv_head) {
  const std::int64_t head = kv_head * group_size(problem);
  const AttentionOptions& options = problem.options;
  ForwardTask task;
  task.dtype = problem.dtype;
  task.head_dim_qk = problem.head_dim_qk;
  task.head_dim_v = problem.head_dim_v;
  task.seqlen_q = s.q_len;
  task.seqlen_kv = s.kv_len;
  task.q = unit_rows(problem.q, s.batch, s.q_begin, head);
  task.k = unit_rows(problem.k, s.batch, s.kv_begin, kv_head);
  task.v = unit_rows(problem.v, s.batch, s.kv_begin, kv_head);
  task.o = unit_rows(problem.o, s.batch, s.q_begin, head);
  task.lse = unit_rows(problem.lse, s.batch, s.q_begin, head);
  task.scale = options.scale;
  task.softcap = options.softcap;
  task.diagonal_offset = problem.diagonal_offset(s);
  task.window_left = clamped_window(options.window_left, s);
  task.window_right = clamped_window(options.window_right, s);
  task.bias = unit_scores(options.bias, n, head);
  task.mask = unit_scores(options.mask, n, head);
  task.alibi_slopes = unit_head_scalars(options.alibi_slopes, n, head);
  task.sink = unit_head_scalars(options.sink, n, head);
  task.q_segment_ids = unit_segments(options.q_segment_ids, s.batch, s.q_begin);
  task.kv_segment_ids = unit_segments(options.kv_segment_ids, s.batch, s.kv_begin);
  task.dropout = options.dropout.active;
  task.dropout_threshold = options.dropout.threshold;
  task.dropout_key[0] = options.dropout.key[0];
  task.dropout_key[1] = options.dropout.key[1];
  task.dropout_offset = options.dropout.offset;
  task.dropout_stream = problem.dropout_stream(n, head);
  return task;
}

}  // namespace onchip::cpu
