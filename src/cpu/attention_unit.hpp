// What the host side of CPU attention hands to the code compiled once per instruction set: plain
// data only, because a function shared between the two could be linked from the wrong copy.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/dtype.hpp"

namespace onchip::cpu {

// Element (head in the group, row) of one (sequence, kv head); strides in bytes.
struct UnitRows {
  std::byte* data = nullptr;
  std::int64_t head_stride = 0;
  std::int64_t row_stride = 0;
};

// Element (head in the group, i, j); data is NULL where there is no such tensor.
struct UnitScores {
  const std::byte* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t head_stride = 0;
  std::int64_t row_stride = 0;
  std::int64_t column_stride = 0;
  bool dense_columns = false;  // neighbours lie side by side
};

// One number a head in the group; data is NULL where there is no such tensor.
struct UnitHeadScalars {
  const std::byte* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t head_stride = 0;
};

struct UnitSegments {
  const std::byte* data = nullptr;
  std::int64_t row_stride = 0;
};

// The query heads that share one kv head of one sequence form one list of rows: row r is position
// r % seqlen_q of head r / seqlen_q. A task computes rows [row_begin, row_end).
struct ForwardTask {
  DType dtype = DType::f32;
  bool wide = false;  // arithmetic in fp64: a bias, slope or sink is beyond fp32's range, or may be
  std::int64_t head_dim_qk = 0;
  std::int64_t head_dim_v = 0;
  std::int64_t seqlen_q = 0;
  std::int64_t seqlen_kv = 0;
  std::int64_t row_begin = 0;
  std::int64_t row_end = 0;
  UnitRows q, k, v, o;
  UnitRows lse;  // data NULL: not wanted

  double scale = 1.0;
  double softcap = 0.0;              // 0: none
  std::int64_t diagonal_offset = 0;  // row i stands at key i + diagonal_offset
  std::int64_t window_left = -1;     // -1: no bound
  std::int64_t window_right = -1;
  UnitScores bias;
  UnitScores mask;
  UnitHeadScalars alibi_slopes;
  UnitHeadScalars sink;
  UnitSegments q_segment_ids;
  UnitSegments kv_segment_ids;

  bool dropout = false;
  std::uint32_t dropout_threshold = 0;  // dropped iff the 16-bit field is below it
  std::uint32_t dropout_key[2] = {0, 0};
  std::uint32_t dropout_offset = 0;
  std::uint32_t dropout_stream = 0;  // of the group's first head; the others follow
};

// Rows of a task of the forward pass at most. No result depends on how rows are cut into tasks.
constexpr std::int64_t kMaxTaskRows = 256;

// Keys that have an online softmax of their own in the forward pass, before it is merged with that
// of the keys before. Part of what a row's bits depend on.
constexpr std::int64_t kChunkKeys = 3072;

// What the size of a worker's scratch memory depends on.
struct ForwardShape {
  std::int64_t task_rows = kMaxTaskRows;
  DType dtype = DType::f32;
  std::int64_t head_dim_qk = 0;
  std::int64_t head_dim_v = 0;
  std::int64_t seqlen_kv = 0;   // at most
  bool adjusts_scores = false;  // bias, mask, ALiBi or segment ids
  bool dropout = false;
  bool wide = false;
};

// What the size of a worker's scratch memory depends on in backward, and how it is tiled. Both
// tile sizes show in the bits, and follow from the head dims alone.
struct BackwardShape {
  DType dtype = DType::f32;
  std::int64_t head_dim_qk = 0;
  std::int64_t head_dim_v = 0;
  std::int64_t tile_rows = 96;   // query rows of a block: a multiple of 32, at most kMaxBlockRows
  std::int64_t chunk_keys = 96;  // keys held at a time: 16, 48 or a few times kMaxTileKeys
  bool adjusts_scores = false;   // bias, mask, ALiBi or segment ids
  bool dropout = false;
};
constexpr std::int64_t kMaxBlockRows = 96;
constexpr std::int64_t kMaxTileKeys = 96;  // of one tile of scores: chunk_keys if that is less
constexpr std::int64_t kMaxChunkKeys = 384;

// Gradients from rows [row_begin, row_end) of the list that ForwardTask describes and keys
// [key_begin, key_end). Which outputs are given says what is computed:
// - dk and dv: for these keys, complete if all rows are given;
// - dq: for these rows, complete if all keys are given. More rows than one block need dq_sums;
// - bias_sums[key % chunk_keys][row % tile_rows], counted from key_begin and row_begin: to these
//   the gradient of each score is added.
struct BackwardTask : ForwardTask {
  BackwardShape shape;
  std::int64_t key_begin = 0;
  std::int64_t key_end = 0;
  UnitRows d_o;
  UnitRows d_lse;       // data NULL: 0
  UnitRows shift;       // d_lse - sum(o dO) of each row, in the type of the arithmetic
  UnitRows dq, dk, dv;  // data NULL: not wanted
  UnitRows dq_sums;     // in the type of the arithmetic; may be dq itself
  std::byte* bias_sums = nullptr;
};

struct MergeRow {
  std::byte* o = nullptr;
  const std::byte* o1 = nullptr;
  const std::byte* o2 = nullptr;
  bool has1 = false;  // an absent part has no influence, whatever its row holds
  bool has2 = false;
  double weight1 = 0.0;
  double weight2 = 0.0;
};

constexpr std::size_t kScratchAlignment = 64;

#define ONCHIP_CPU_DECLARE_UNIT(isa)                                                              \
  namespace isa {                                                                                 \
  std::size_t attention_forward_scratch_bytes(const ForwardShape& shape);                         \
  void attention_forward(const ForwardTask& task, std::byte* scratch);                            \
  std::size_t attention_forward_part_bytes(const ForwardShape& shape);                            \
  void attention_forward_part(const ForwardTask& task, std::int64_t chunk, std::byte* part,       \
                              std::byte* scratch);                                                \
  void attention_forward_join(const ForwardTask& task, std::byte* parts, std::size_t part_bytes); \
  std::size_t attention_backward_scratch_bytes(const BackwardShape& shape);                       \
  void attention_backward(const BackwardTask& task, std::byte* scratch);                          \
  void attention_backward_shift(const BackwardTask& task);                                        \
  void attention_merge_row(DType dtype, std::int64_t head_dim, const MergeRow& row);              \
  }

ONCHIP_CPU_DECLARE_UNIT(portable)
ONCHIP_CPU_DECLARE_UNIT(avx2)
ONCHIP_CPU_DECLARE_UNIT(avx512)
ONCHIP_CPU_DECLARE_UNIT(avx512_bf16)
#undef ONCHIP_CPU_DECLARE_UNIT

}  // namespace onchip::cpu
