// Normalised arguments of exact attention: what src/ops makes of a call once its contract holds,
// and all that a backend ever sees. Strides here are in bytes; broadcast axes have stride 0.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>

#include "core/dtype.hpp"
#include "core/philox.hpp"
#include "core/rows.hpp"
#include "core/tensor.hpp"

namespace onchip {

// Over cached keys, and so of what merge combines, rows may be longer: MLA's latent ones are.
constexpr std::int64_t kMaxHeadDim = 256;
constexpr std::int64_t kMaxCachedHeadDimQk = 576;
constexpr std::int64_t kMaxCachedHeadDimV = 512;

// lse, d_lse: [batch, head, row], or packed [head, row] with batch_stride 0.
struct RowScalarsView {
  std::byte* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t batch_stride = 0;
  std::int64_t head_stride = 0;
  std::int64_t row_stride = 0;
  bool wanted = false;

  std::byte* at(std::int64_t batch, std::int64_t row, std::int64_t head) const {
    return data + batch * batch_stride + head * head_stride + row * row_stride;
  }
};

// bias, mask, dbias: [sequence, head, i, j] by position in the sequence.
struct ScoresView {
  std::byte* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t sequence_stride = 0;
  std::int64_t head_stride = 0;
  std::int64_t row_stride = 0;
  std::int64_t column_stride = 0;
  // Positions at or past these are invisible; only device-side lengths can reach them. A broadcast
  // axis has no such end.
  std::int64_t rows = std::numeric_limits<std::int64_t>::max();
  std::int64_t columns = std::numeric_limits<std::int64_t>::max();
  bool wanted = false;

  std::byte* at(std::int64_t sequence, std::int64_t head, std::int64_t i, std::int64_t j) const {
    return data + sequence * sequence_stride + head * head_stride + i * row_stride +
           j * column_stride;
  }
};

// One number a (sequence, head): ALiBi slopes, sink, dsink.
struct HeadScalarsView {
  std::byte* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t sequence_stride = 0;
  std::int64_t head_stride = 0;
  bool wanted = false;

  std::byte* at(std::int64_t sequence, std::int64_t head) const {
    return data + sequence * sequence_stride + head * head_stride;
  }
};

// int32 segment ids, addressed as the rows they describe.
struct SegmentIdsView {
  std::byte* data = nullptr;
  std::int64_t batch_stride = 0;
  std::int64_t row_stride = 0;
  // Rows at or past this belong to no segment; only device-side lengths can reach them.
  std::int64_t rows = std::numeric_limits<std::int64_t>::max();
  bool wanted = false;

  std::int32_t at(std::int64_t batch, std::int64_t row) const {
    std::int32_t id;
    std::memcpy(&id, data + batch * batch_stride + row * row_stride, sizeof(id));
    return id;
  }
};

// Where one sequence lies. Tensor rows of position i: (batch, q_begin + i).
struct SequenceRange {
  std::int64_t batch = 0;  // index on the batch axis; 0 for packed tensors
  std::int64_t q_begin = 0;
  std::int64_t q_len = 0;
  std::int64_t kv_batch = 0;  // index on the batch axis of what belongs to its keys
  std::int64_t kv_begin = 0;
  std::int64_t kv_len = 0;
};

// Keys [begin, end) that causal and window leave to one query row; begin >= end: none.
struct KeyRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

struct AttentionOptions {
  double scale = 1.0;
  double softcap = 0.0;
  std::int64_t window_left = -1;   // -1: no bound
  std::int64_t window_right = -1;  // causal is window_right = 0
  bool top_left = false;
  bool tf32 = false;
  bool deterministic = false;
  bool batch_invariant = false;
  bool check = false;
  double dropout_p = 0.0;
  Dropout dropout;         // key and offset are filled only where dropout_rng is in host memory
  TensorView dropout_rng;  // int64 [2]
  ScoresView bias;
  ScoresView mask;
  HeadScalarsView alibi_slopes;
  HeadScalarsView sink;
  SegmentIdsView q_segment_ids;
  SegmentIdsView kv_segment_ids;
};

// Geometry and options, shared by forward and backward.
struct AttentionProblem {
  const char* op = "";  // for messages
  DType dtype = DType::f32;
  Device device;
  bool packed = false;
  std::int64_t num_seqs = 0;
  std::int64_t slot_q = 0;   // rows on q's row axis: seqlen_q, or total_q when packed
  std::int64_t slot_kv = 0;  // likewise for k and v
  std::int64_t num_heads_q = 0;
  std::int64_t num_heads_kv = 0;
  std::int64_t head_dim_qk = 0;
  std::int64_t head_dim_v = 0;
  std::int64_t max_seqlen_q = -1;  // hints; -1 = absent
  std::int64_t max_seqlen_kv = -1;
  TensorView cu_seqlens_q;  // present iff packed
  TensorView cu_seqlens_kv;
  TensorView seqlens_q;  // may be absent: whole slots
  TensorView seqlens_kv;
  AttentionOptions options;
  RowsView q, k, v, o;
  RowScalarsView lse;

  std::int64_t kv_head(std::int64_t head) const { return head / (num_heads_q / num_heads_kv); }

  // Counter word of the dropout mask.
  std::uint32_t dropout_stream(std::int64_t sequence, std::int64_t head) const {
    return static_cast<std::uint32_t>(sequence * num_heads_q + head);
  }

  // Valid only where cu_seqlens and seqlens are in host memory.
  SequenceRange sequence(std::int64_t n) const;

  std::int64_t diagonal_offset(const SequenceRange& s) const {
    return options.top_left ? 0 : s.kv_len - s.q_len;
  }

  KeyRange visible_keys(const SequenceRange& s, std::int64_t i) const {
    const std::int64_t diagonal = i + diagonal_offset(s);
    KeyRange keys{0, s.kv_len};
    if (options.window_left >= 0) keys.begin = std::max(keys.begin, diagonal - options.window_left);
    if (options.window_right >= 0) {
      keys.end = std::min(keys.end, diagonal + options.window_right + 1);
    }
    return keys;
  }
};

using AttentionForwardProblem = AttentionProblem;

struct AttentionBackwardProblem : AttentionProblem {
  RowsView d_o, dq, dk, dv;
  RowScalarsView d_lse;
  ScoresView dbias;  // extents of the bias itself; broadcast axes have stride 0 and are summed
  std::int64_t dbias_shape[4] = {0, 0, 0, 0};
  HeadScalarsView dsink;
};

struct AttentionMergeProblem {
  const char* op = "";
  DType dtype = DType::f32;
  Device device;
  std::int64_t batch = 0;  // 1 for packed tensors
  std::int64_t rows = 0;
  std::int64_t num_heads = 0;
  std::int64_t head_dim = 0;
  RowsView o1, o2, o;
  RowScalarsView lse1, lse2, lse;
};

// Which row axis of a problem.
enum class RowAxis { q, kv };

// Calls f(batch, begin, end) for each maximal run of rows that belongs to no sequence.
template <typename F>
void for_each_slack(const AttentionProblem& problem, RowAxis axis, F&& f) {
  const bool q = axis == RowAxis::q;
  const std::int64_t slot = q ? problem.slot_q : problem.slot_kv;
  std::int64_t covered = 0;
  for (std::int64_t n = 0; n < problem.num_seqs; ++n) {
    const SequenceRange s = problem.sequence(n);
    const std::int64_t begin = q ? s.q_begin : s.kv_begin;
    const std::int64_t end = begin + (q ? s.q_len : s.kv_len);
    if (problem.packed) {
      if (covered < begin) f(std::int64_t{0}, covered, begin);
      covered = end;
    } else if (end < slot) {
      f(n, end, slot);
    }
  }
  if (problem.packed && covered < slot) f(std::int64_t{0}, covered, slot);
}

}  // namespace onchip
