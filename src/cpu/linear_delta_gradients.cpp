#include "cpu/linear_delta_gradients.hpp"
#include "core/ceil_div.hpp"

#include <algorithm>
#include <cmath>

namespace onchip::cpu {

namespace {

constexpr std::int64_t kMinKept = 128;

}  // namespace

DeltaChunkGradients::DeltaChunkGradients(const LinearBackwardProblem& problem,
                                         const TokenRange& tokens, std::int64_t head,
                                         const DeltaSequence& rows, const DeltaChunk& forward,
                                         std::int64_t first, const DeltaSums& sums,
                                         double* constants)
    : problem_(problem),
      tokens_(tokens),
      head_(head),
      rows_(rows),
      first_(first),
      constants_(constants) {
  const LinearTensors& out = problem.gradients;
  const std::int64_t row = tokens.begin * problem.rows_per_token + first;
  const std::int64_t group = delta_group(problem);
  const std::int64_t key_head = problem.key_head(head);
  const bool own_head = problem.traits.erase == EraseForm::channels;
  const DeltaConstants at(problem);
  std::fill_n(constants, at.width, 0.0);
  chunk_.forward = forward;
  chunk_.d_o = rows.reads(problem.d_o, first, head);
  chunk_.dq = rows.reads(out.q, first, key_head);
  chunk_.dk = unit_row(out.k, tokens.batch, row, key_head);
  chunk_.dv = unit_row(out.v, tokens.batch, row, head);
  chunk_.da = unit_row(out.a, tokens.batch, row, own_head ? head : key_head);
  chunk_.db = unit_row(out.b, tokens.batch, row, head);
  if (forward.shape.channels) chunk_.d_gate = unit_row(out.gate, tokens.batch, row, head);
  chunk_.q_sums = sums.q;
  chunk_.k_sums = sums.k;
  chunk_.a_sums = sums.a;
  chunk_.first_head = head % group == 0;
  chunk_.last_head = head % group == group - 1;
  if (problem.traits.gate != GateForm::none) chunk_.d_decay = d_decay_;
  if (has_raw_gates(problem)) {
    chunk_.d_rate = constants + at.rate;
    chunk_.d_dt_bias = constants + at.dt_bias;
  }
  chunk_.d_beta = d_beta_;
}

void DeltaChunkGradients::store_gates() {
  const LinearTensors& out = problem_.gradients;
  const DeltaConstants at(problem_);
  const std::int64_t each = problem_.rows_per_token;
  const std::int64_t count = chunk_.forward.gates->rows;
  for (std::int64_t i = 0; i < count && out.beta.wanted; ++i) {
    store_from_double(out.beta.at(tokens_.batch, tokens_.begin * each + first_ + i, head_),
                      out.beta.dtype, rows_.pull_beta(first_ + i, d_beta_[i]));
  }
  if (chunk_.forward.shape.channels) return;  // the unit's
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t row = first_ + i;
    if (!rows_.decays(row)) continue;
    const DeltaSequence::RawGate raw = rows_.pull_gate(row, d_decay_[i]);
    if (problem_.gate_per_head) {
      constants_[at.gate] += raw.gate;
    } else if (out.gate.wanted) {
      store_from_double(out.gate.at(tokens_.batch, tokens_.begin + row / each, head_),
                        out.gate.dtype, raw.gate);
    }
    if (!has_raw_gates(problem_)) continue;
    constants_[at.rate] += raw.rate;
    constants_[at.dt_bias] += raw.gate;
  }
}

std::int64_t delta_group(const LinearProblem& problem) {
  return problem.num_heads_k == 0 ? 1 : problem.num_heads_v / problem.num_heads_k;
}

std::int64_t kept_delta_states(const LinearBackwardProblem& problem) {
  const std::int64_t rows = problem.slot * problem.rows_per_token;
  const auto root = static_cast<std::int64_t>(std::sqrt(static_cast<double>(rows)));
  const std::int64_t kept =
      problem.chunk_len > 0 ? ceil_div(rows, problem.chunk_len) : std::max(kMinKept, root);
  return std::clamp<std::int64_t>(kept, 1, std::max<std::int64_t>(rows, 1));
}

std::size_t delta_sums_bytes(const LinearBackwardProblem& problem, const DeltaUnit& unit) {
  if (delta_group(problem) <= 1) return 0;
  return linear_rounded_up(static_cast<std::size_t>(problem.slot * problem.rows_per_token) *
                           unit.sum_row_bytes(delta_shape(problem)));
}

}  // namespace onchip::cpu
