// A legal call of exact attention with its tensors: built from a spec, or at random.
#pragma once

#include <onchip/onchip.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "support/host_tensor.hpp"
#include "support/random.hpp"

namespace onchip::test {

// Everything that a call's shapes and options follow from. The defaults are a small dense call.
struct AttentionSpec {
  DType dtype = DType::f32;
  std::int64_t batch = 2;
  std::int64_t seqlen_q = 5;
  std::int64_t seqlen_kv = 7;
  std::int64_t num_heads_kv = 1;
  std::int64_t group = 2;  // query heads per kv head
  std::int64_t head_dim_qk = 4;
  std::int64_t head_dim_v = 4;

  // Packed: one slot a sequence; slack rows in front, between (where used is shorter) and behind.
  bool packed = false;
  bool shared_cu_seqlens = false;  // cu_seqlens_kv absent
  std::vector<std::int64_t> slots_q, slots_kv;
  std::int64_t slack = 0;
  // Dense or packed: used lengths; empty = whole slots. used_kv alone may be left empty.
  std::vector<std::int64_t> used_q, used_kv;
  DType lengths_dtype = DType::i32;

  double scale = 0.0;  // NaN, the default of the ABI, unless set
  bool default_scale = true;
  double softcap = 0.0;
  double dropout_p = 0.0;
  std::int64_t window_left = -1;
  std::int64_t window_right = -1;
  bool causal = false;
  bool top_left = false;
  bool bias = false;
  bool mask = false;
  // Which of the axes [sequence, head, row, column] are 1.
  bool bias_broadcast[4] = {false, false, false, false};
  bool mask_broadcast[4] = {false, false, false, false};
  DType bias_dtype = DType::f32;
  double bias_minus_infinities = 0.0;  // share of -inf entries
  double visible_share = 0.7;          // of the mask
  bool alibi = false;
  bool alibi_per_sequence = false;
  bool segments = false;
  bool sink = false;
  DType sink_dtype = DType::f32;
  bool lse = true;
  bool d_lse = false;
  double magnitude = 1.0;  // of q and k

  bool strided = false;  // random layouts in place of contiguous tensors
  bool poisoned = true;  // rows outside every sequence hold NaN where the layout allows it
};

AttentionSpec random_spec(Random& random);

class AttentionCall {
 public:
  AttentionCall(const AttentionSpec& given, Random& random);
  AttentionCall(const AttentionCall&) = delete;
  AttentionCall& operator=(const AttentionCall&) = delete;

  // Point into this object.
  onchip_attention_forward_args forward_args() const;
  onchip_attention_backward_args backward_args() const;

  // Every tensor of the call with its name, inputs first; absent ones left out.
  std::vector<std::pair<std::string, HostTensor*>> inputs();
  std::vector<std::pair<std::string, HostTensor*>> forward_outputs();
  std::vector<std::pair<std::string, HostTensor*>> backward_outputs();

  AttentionSpec spec;
  onchip_attention_options options = ONCHIP_ATTENTION_OPTIONS_INIT;
  HostTensor q, k, v, o, lse, d_o, d_lse, dq, dk, dv, dbias, dsink;
  HostTensor bias, mask, alibi_slopes, q_segment_ids, kv_segment_ids, sink, dropout_rng;
  HostTensor cu_seqlens_q, cu_seqlens_kv, seqlens_q, seqlens_kv;

 private:
  HostTensor make(DType dtype, const Shape& shape, bool output);
  void make_lengths();
  void make_options();
  void poison_outside_sequences();

  Random& random_;
};

}  // namespace onchip::test
