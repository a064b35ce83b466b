// A call of exact attention as plain values: compact tensors in double, read back from the structs
// of the C ABI alone, so that nothing of the library's own reading of them is trusted.
#pragma once

#include <onchip/onchip.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/dtype.hpp"
#include "support/host_tensor.hpp"

namespace onchip::test {

// Row-major values of a tensor; absent when it has no shape.
struct Values {
  DType dtype = DType::f64;
  std::optional<Shape> shape;
  std::vector<double> at;

  bool present() const { return shape.has_value(); }
  std::int64_t extent(std::size_t axis) const { return (*shape)[axis]; }
};

struct AttentionCase {
  DType dtype = DType::f64;
  bool packed = false;
  std::int64_t num_seqs = 0;
  std::int64_t slot_q = 0;
  std::int64_t slot_kv = 0;
  std::int64_t num_heads_q = 0;
  std::int64_t num_heads_kv = 0;
  std::int64_t head_dim_qk = 0;
  std::int64_t head_dim_v = 0;

  double scale = 0.0;
  double softcap = 0.0;
  double dropout_p = 0.0;
  std::int64_t window_left = -1;
  std::int64_t window_right = -1;
  bool causal = false;
  bool top_left = false;
  std::uint64_t seed = 0;
  std::uint64_t offset = 0;
  std::vector<std::int64_t> cu_seqlens_q, cu_seqlens_kv, seqlens_q, seqlens_kv;

  Values q, k, v, bias, mask, alibi_slopes, q_segment_ids, kv_segment_ids, sink;
  Values o, lse, d_o, d_lse;  // o and lse: inputs of backward
  bool wants_dbias = false;
  bool wants_dsink = false;

  std::int64_t length_q(std::int64_t n) const;
  std::int64_t length_kv(std::int64_t n) const;
  // Index into Values::at of row i of sequence n: of a [.., row, head, dim] tensor, and of lse.
  std::int64_t q_row(std::int64_t n, std::int64_t i, std::int64_t head, std::int64_t dim) const;
  std::int64_t kv_row(std::int64_t n, std::int64_t j, std::int64_t head, std::int64_t dim) const;
  std::int64_t lse_at(std::int64_t n, std::int64_t i, std::int64_t head) const;
};

// What is illegal about the call as docs/semantics.md and onchip.h state it, in shapes, dtypes and
// option values: "" for a legal one. An independent second reading of the contract.
std::string illegal(const onchip_attention_forward_args& args);
std::string illegal(const onchip_attention_backward_args& args);
std::string illegal(const onchip_attention_merge_args& args);

// Of legal calls only.
AttentionCase read_case(const onchip_attention_forward_args& args);
AttentionCase read_case(const onchip_attention_backward_args& args);

}  // namespace onchip::test
