#include "cpu/attention_backward_host.hpp"

#include <algorithm>
#include <iterator>

namespace onchip::cpu {

namespace {

bool has_rows(const AttentionProblem& problem, RowAxis axis) {
  const bool q = axis == RowAxis::q;
  return (problem.packed || problem.num_seqs > 0) && (q ? problem.slot_q : problem.slot_kv) > 0 &&
         (q ? problem.num_heads_q : problem.num_heads_kv) > 0;
}

}  // namespace

bool wants_dq(const AttentionBackwardProblem& problem) {
  return problem.dq.wanted && problem.head_dim_qk > 0 && has_rows(problem, RowAxis::q);
}
bool wants_dk(const AttentionBackwardProblem& problem) {
  return problem.dk.wanted && problem.head_dim_qk > 0 && has_rows(problem, RowAxis::kv);
}
bool wants_dv(const AttentionBackwardProblem& problem) {
  return problem.dv.wanted && problem.head_dim_v > 0 && has_rows(problem, RowAxis::kv);
}
bool wants_dbias(const AttentionBackwardProblem& problem) {
  return problem.dbias.wanted && std::all_of(problem.dbias_shape, problem.dbias_shape + 4,
                                             [](std::int64_t extent) { return extent > 0; });
}
bool wants_dsink(const AttentionBackwardProblem& problem) {
  return problem.dsink.wanted && problem.num_heads_q > 0;
}
bool has_output(const AttentionBackwardProblem& problem) {
  return wants_dq(problem) || wants_dk(problem) || wants_dv(problem) || wants_dbias(problem) ||
         wants_dsink(problem);
}

std::int64_t live_sequences(const AttentionProblem& problem) {
  return has_rows(problem, RowAxis::q) || has_rows(problem, RowAxis::kv) ? problem.num_seqs : 0;
}

BackwardShape backward_shape(const AttentionBackwardProblem& problem) {
  const AttentionOptions& options = problem.options;
  BackwardShape shape;
  shape.dtype = problem.dtype;
  shape.head_dim_qk = problem.head_dim_qk;
  shape.head_dim_v = problem.head_dim_v;
  const std::int64_t row_bytes =
      (problem.head_dim_qk + problem.head_dim_v) * arithmetic_size(problem.dtype);
  struct Tiles {
    std::int64_t row_bytes, tile_rows, chunk_keys;
  };
  constexpr Tiles kTiles[] = {
      {512, 96, 384}, {1024, 96, 288}, {2048, 96, 96}, {3072, 64, 96}, {4096, 64, 48}};
  static_assert(std::end(kTiles)[-1].row_bytes == 2 * kMaxHeadDim * std::int64_t{sizeof(double)});
  const Tiles* tiles = kTiles;
  while (tiles->row_bytes < row_bytes) ++tiles;
  shape.tile_rows = tiles->tile_rows;
  shape.chunk_keys = tiles->chunk_keys;
  shape.adjusts_scores = options.bias.wanted || options.mask.wanted ||
                         options.alibi_slopes.wanted || options.q_segment_ids.wanted;
  shape.dropout = options.dropout_p > 0.0;
  return shape;
}

BackwardTask backward_task(const AttentionBackwardProblem& problem, const BackwardShape& shape,
                           std::byte* shift, std::int64_t n, const SequenceRange& s,
                           std::int64_t kv_head) {
  const std::int64_t group = group_size(problem);
  const std::int64_t head = kv_head * group;
  const std::int64_t size = arithmetic_size(problem.dtype);
  BackwardTask task;
  static_cast<ForwardTask&>(task) = attention_task(problem, n, s, kv_head);
  task.shape = shape;
  task.row_end = s.q_len * group;
  task.key_end = s.kv_len;
  task.d_o = unit_rows(problem.d_o, s.batch, s.q_begin, head);
  task.d_lse = unit_rows(problem.d_lse, s.batch, s.q_begin, head);
  task.shift = {
      shift + ((s.batch * problem.num_heads_q + head) * problem.slot_q + s.q_begin) * size,
      problem.slot_q * size, size};
  return task;
}

}  // namespace onchip::cpu
