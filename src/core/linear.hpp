// Normalised arguments of linear attention: what src/ops makes of a call once its contract holds,
// and all that a backend ever sees. Strides here are in bytes; broadcast axes have stride 0.
#pragma once

#include <onchip/onchip.h>

#include <array>
#include <cstddef>
#include <cstdint>

#include "core/dtype.hpp"
#include "core/rows.hpp"
#include "core/tensor.hpp"

namespace onchip {

// The recurrences (docs/semantics.md section 3).
enum class LinearEngine { scalar_decay, channel_decay, delta_rule, dplr, gated_slots, scan };

// Which axis of the state alpha_t has.
enum class DecayAxis { none, scalar, key, slot };

// How log_decay comes from the gate tensor.
enum class GateForm {
  none,       // no decay
  log_decay,  // given, a row or a head
  retention,  // log(1 - 2^(-5-h))
  raw,        // -e^A_log softplus(g + dt_bias)
  bounded,    // lower_bound sigmoid(e^A_log (g + dt_bias))
  mamba2,     // dt' A, dt' = clamp(softplus(dt + dt_bias)); mamba1: A a channel of the state
  mlstm,      // logsigmoid(f)
};

// What happens to the value that was read.
enum class ReadForm {
  plain,
  sum_normalised,  // linear_attention: / (scale q.z + 1e-10)
  mlstm,           // / (max(|scale q.n|, e^-m or 1) + eps)
  mamba2,          // + D x, then silu(z); mamba1's too
  quotient,        // rwkv4: numerator / denominator
};

// How k v^T is weighed before it is added.
enum class WriteForm {
  plain,
  time_step,     // mamba1, mamba2: dt'
  exp_gate,      // mlstm: e^(i - m); rwkv4: e^(k - m)
  sigmoid_gate,  // mlstm: sigmoid(i)
};

// The erase vector e of the delta rule, and what is written in place of what e reads.
enum class EraseForm {
  none,
  keys,        // e = beta k, x = beta v
  other_keys,  // comba: e = beta p, x = beta v
  channels,    // gdn2: e = b * k, x = w * v, elementwise
  given,       // dplr: S += b (a^T S_{t-1}) + k v^T
  slots,       // gsa: e = s, what each slot takes of the token
};

enum class KeyForm {
  given,
  complement,  // hgrn2: 1 - e^log_decay
};

// What an operator is: its row of the table (ops/linear_table.cpp), with its options resolved.
struct LinearTraits {
  LinearEngine engine = LinearEngine::scalar_decay;
  DecayAxis decay = DecayAxis::none;
  GateForm gate = GateForm::none;
  WriteForm write = WriteForm::plain;
  ReadForm read = ReadForm::plain;
  EraseForm erase = EraseForm::none;
  KeyForm keys = KeyForm::given;
  bool exclusive = false;  // reads of channel_decay and scan, delta_rule's erase see S_{t-1}
};

// The tensors by role: rows [batch, row, head, dim], or constants with some of these strides 0.
// Those of a scan have a channel in place of each head, and dim 1.
struct LinearTensors {
  RowsView q, k, v, gate, beta, a, b, u, rate, dt_bias, skip, z;
};

// One part of the states: the matrix [N, Hv, dk, dv], a vector [N, Hv, dk] (column_stride 0), or a
// number [N, Hv]. The layout's order of the two last axes is in the strides.
struct StateView {
  std::byte* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t slot_stride = 0;
  std::int64_t head_stride = 0;
  std::int64_t row_stride = 0;     // along dk
  std::int64_t column_stride = 0;  // along dv
  bool wanted = false;

  std::byte* at(std::int64_t slot, std::int64_t head, std::int64_t row = 0,
                std::int64_t column = 0) const {
    return data + slot * slot_stride + head * head_stride + row * row_stride +
           column * column_stride;
  }
};

// The parts in the ABI's order: matrix, normaliser, stabiliser.
using StateViews = std::array<StateView, ONCHIP_LINEAR_STATE_PARTS>;

// Tokens of one sequence: rows (batch, begin .. begin + length).
struct TokenRange {
  std::int64_t batch = 0;
  std::int64_t begin = 0;
  std::int64_t length = 0;
};

// Sequence n of packed or dense tensors. Valid only where the lengths are in host memory.
TokenRange token_range(bool packed, std::int64_t slot, const TensorView& cu_seqlens,
                       const TensorView& seqlens, std::int64_t n);

constexpr std::int64_t kMaxKeyDim = 256;
constexpr std::int64_t kMaxValueDim = 512;

// Below the logarithm of fp32's smallest number a decay is a reset: nothing crosses it.
constexpr double kSegmentLogDecay = -104.0;

constexpr double kSumNormaliserEps = 1e-10;  // of linear_attention's denominator
constexpr double kL2NormEps = 1e-6;          // x / sqrt(|x|^2 + eps)

struct LinearProblem {
  const char* op = "";  // for messages
  LinearTraits traits;
  DType dtype = DType::f32;
  Device device;
  bool packed = false;
  std::int64_t num_seqs = 0;
  std::int64_t slot = 0;  // tokens on the row axis: T, or total when packed
  std::int64_t num_heads_k = 0;
  std::int64_t num_heads_v = 0;
  std::int64_t head_dim_k = 0;
  std::int64_t head_dim_v = 0;
  std::int64_t num_slots = 0;  // of gated_slots
  double scale = 1.0;
  double eps = 0.0;
  double dt_min = 0.0;
  double dt_max = 0.0;
  bool dt_softplus = true;
  bool detach_normalizer = false;
  bool normalised = false;  // the state has a normaliser
  bool stabilised = false;  // and a stabiliser
  bool qk_l2norm = false;
  double lower_bound = 0.0;         // of GateForm::bounded
  double beta_factor = 0.0;         // beta = this times sigmoid(raw); 0: beta is given as it is
  std::int64_t rows_per_token = 1;  // of k, v, beta; q, gate and o have one
  std::int64_t decay_width = 1;     // numbers of alpha_t
  std::int64_t gate_width = 1;      // of a row of the gate tensor, and of dt_bias
  std::int64_t rate_width = 1;      // of rate: dk for mamba1's A
  bool gate_per_head = false;       // the gate tensor is [Hv], not rows
  std::int64_t skip_width = 0;      // of D: 1 or dv; 0 = absent
  std::int64_t chunk_len = 0;       // 0: the backend's choice
  TensorView cu_seqlens;            // present iff packed
  TensorView seqlens;               // may be absent: whole slots
  LinearTensors inputs;

  std::int64_t key_head(std::int64_t head) const { return head / (num_heads_v / num_heads_k); }

  // Valid only where cu_seqlens and seqlens are in host memory.
  TokenRange tokens(std::int64_t n) const {
    return token_range(packed, slot, cu_seqlens, seqlens, n);
  }
};

inline bool is_scan(const LinearProblem& problem) {
  return problem.traits.engine == LinearEngine::scan;
}

struct LinearForwardProblem : LinearProblem {
  RowsView o;
  StateViews initial_state, final_state;
};

struct LinearBackwardProblem : LinearProblem {
  RowsView d_o;
  StateViews initial_state, d_final_state, dinitial_state;
  LinearTensors gradients;
};

// slot = 1: one token for each row of the batch.
struct LinearStepProblem : LinearProblem {
  RowsView o;
  StateViews state;
  TensorView state_indices;  // int32 [batch]; absent: slot n for row n

  // Valid only where state_indices are in host memory; negative: skip.
  std::int64_t state_slot(std::int64_t n) const {
    return state_indices.present() ? load_integer(state_indices.at(n), state_indices.dtype) : n;
  }
};

// Calls f(batch, begin, end) for each maximal run of tokens that belongs to no sequence.
template <typename Problem, typename F>
  requires requires(const Problem& problem) { problem.tokens(0); }
void for_each_slack(const Problem& problem, F&& f) {
  std::int64_t covered = 0;
  for (std::int64_t n = 0; n < problem.num_seqs; ++n) {
    const TokenRange s = problem.tokens(n);
    const std::int64_t end = s.begin + s.length;
    if (problem.packed) {
      if (covered < s.begin) f(std::int64_t{0}, covered, s.begin);
      covered = end;
    } else if (end < problem.slot) {
      f(n, end, problem.slot);
    }
  }
  if (problem.packed && covered < problem.slot) f(std::int64_t{0}, covered, problem.slot);
}

}  // namespace onchip
