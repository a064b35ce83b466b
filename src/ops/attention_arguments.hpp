// Arguments that the operators of attention share: geometry, lengths and the options of
// onchip_attention_options, checked and turned into the views of an AttentionProblem.
#pragma once

#include <onchip/onchip.h>

#include <cstdint>
#include <string_view>

#include "core/attention.hpp"
#include "ops/call.hpp"

namespace onchip::ops {

onchip_attention_options read_options(std::string_view op, const onchip_attention_options* options);

void require_q_dtype(std::string_view op, const TensorView& q);

// Query heads share key and value heads in equal groups.
void require_head_groups(std::string_view op, std::int64_t num_heads_q, std::int64_t num_heads_kv);

RowScalarsView row_scalars_view(const TensorView& tensor, bool packed);

// A tensor on q's rows, or on those of k and v.
void require_rows(const Call& call, std::string_view name, const TensorView& tensor,
                  const AttentionProblem& p, bool q_axis, std::int64_t dim);
void require_row_scalars(const Call& call, std::string_view name, const TensorView& tensor,
                         const AttentionProblem& p);

// cu_seqlens, seqlens and the hints: what can be read before the geometry is known.
void read_sequences(Call& call, const onchip_attention_options& options, AttentionProblem& p);

// Their values against num_seqs and the slots: runs after the geometry has been read.
void check_sequences(const Call& call, AttentionProblem& p);

bool lengths_on_host(const AttentionProblem& p);

// How far bias and mask reach: [num_seqs|1, num_heads_q|1, rows|1, columns|1].
struct ScoreExtents {
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  bool more_rows = false;  // or further: the extent is the longest sequence's length
  bool more_columns = false;
  bool cached_keys = false;  // kv_segment_ids: [num_seqs, columns or more], by position
};

// Of keys that lie beside q: packed tensors must cover the longest sequence.
ScoreExtents score_extents(const AttentionProblem& p);

ScoresView scores_view(const Call& call, std::string_view name, const TensorView& tensor,
                       const AttentionProblem& p, const ScoreExtents& extents);
HeadScalarsView sink_view(const Call& call, std::string_view name, const TensorView& tensor,
                          const AttentionProblem& p);

// Everything of the options that concerns scores; needs the geometry. Returns the bias tensor: its
// gradient has its shape.
TensorView read_score_options(Call& call, const onchip_attention_options& given,
                              const ScoreExtents& extents, AttentionProblem& p);

}  // namespace onchip::ops
