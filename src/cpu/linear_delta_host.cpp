#include "cpu/linear_delta_host.hpp"
#include "cpu/isa_table.hpp"

#include <cmath>

namespace onchip::cpu {

namespace {

constexpr double kLog2E = 1.4426950408889634074;

double sigmoid(double x) {
  if (x >= 0.0) return 1.0 / (1.0 + std::exp(-x));
  const double e = std::exp(x);
  return e / (1.0 + e);
}

constexpr double kSoftplusLinear = 20.0;
double softplus(double x) { return x > kSoftplusLinear ? x : std::log1p(std::exp(x)); }
double softplus_slope(double x) { return x > kSoftplusLinear ? 1.0 : sigmoid(x); }

double load_number(const RowsView& rows, std::int64_t batch, std::int64_t row, std::int64_t head,
                   std::int64_t d = 0) {
  return load_as_double(rows.at(batch, row, head) + d * dtype_size(rows.dtype), rows.dtype);
}

}  // namespace

#define ONCHIP_CPU_UNIT(isa)                                                                  \
  DeltaUnit {                                                                                 \
    isa::delta_state_bytes, isa::delta_load_state, isa::delta_store_state,                    \
        isa::delta_forward_scratch_bytes, isa::delta_forward, isa::delta_prepare,             \
        isa::delta_advance, isa::delta_read, isa::delta_backward_record_bytes,                \
        isa::delta_backward_scratch_bytes, isa::delta_sum_row_bytes, isa::delta_backward,     \
        isa::delta_backward_prepare, isa::delta_backward_advance, isa::delta_backward_values, \
        isa::delta_backward_rows, "linear_forward/delta_rule/" #isa,                          \
        "linear_backward/delta_rule/" #isa, "linear_step/delta_rule/" #isa                    \
  }

DeltaUnit delta_unit(Isa isa) { ONCHIP_CPU_RETURN_TABLE(isa, ONCHIP_CPU_UNIT); }

#undef ONCHIP_CPU_UNIT

DeltaShape delta_shape(const LinearProblem& problem) {
  DeltaShape shape;
  shape.linear = linear_shape(problem);
  shape.erase = problem.traits.erase;
  shape.channels = problem.traits.decay == DecayAxis::key;
  shape.exclusive = problem.traits.exclusive;
  shape.l2norm = problem.qk_l2norm;
  shape.scale = problem.scale;
  shape.rows_per_token = problem.rows_per_token;
  return shape;
}

std::int64_t longest_delta_chunk(const LinearProblem& problem) {
  return problem.traits.decay == DecayAxis::key ? kDeltaChannelRows : kDeltaRows;
}

DeltaSequence::DeltaSequence(const LinearProblem& problem, const TokenRange& tokens,
                             std::int64_t head)
    : problem_(problem), tokens_(tokens), head_(head) {
  if (!has_raw_gates(problem)) return;
  raw_gates_.bounded = problem.traits.gate == GateForm::bounded;
  raw_gates_.factor = std::exp(load_number(problem.inputs.rate, 0, 0, head));
  raw_gates_.lower_bound = problem.lower_bound;
  raw_gates_.dt_bias = unit_row(problem.inputs.dt_bias, 0, 0, head);
  raw_gates_.dt_bias_dtype = problem.inputs.dt_bias.dtype;
}

double DeltaSequence::raw_gate(std::int64_t row, std::int64_t d) const {
  const std::int64_t token = tokens_.begin + row / problem_.rows_per_token;
  return load_number(problem_.inputs.gate, tokens_.batch, token, head_, d);
}

double DeltaSequence::dt_bias(std::int64_t d) const {
  const RowsView& bias = problem_.inputs.dt_bias;
  return bias.wanted ? load_number(bias, 0, 0, head_, d) : 0.0;
}

double DeltaSequence::log_decay(std::int64_t row, std::int64_t d) const {
  if (!decays(row)) return 0.0;
  const double gate = raw_gate(row, d);
  switch (problem_.traits.gate) {
    case GateForm::raw:
      return -raw_gates_.factor * softplus(gate + dt_bias(d));
    case GateForm::bounded:
      return problem_.lower_bound * sigmoid(raw_gates_.factor * (gate + dt_bias(d)));
    default:
      return gate;
  }
}

bool DeltaSequence::resets(std::int64_t row) const {
  if (!decays(row)) return false;
  for (std::int64_t d = 0; d < problem_.decay_width; ++d) {
    if (!(log_decay(row, d) < kSegmentLogDecay)) return false;
  }
  return problem_.decay_width > 0;
}

double DeltaSequence::raw_beta(std::int64_t row) const {
  return load_number(problem_.inputs.beta, tokens_.batch,
                     tokens_.begin * problem_.rows_per_token + row, head_);
}

double DeltaSequence::beta(std::int64_t row) const {
  if (!problem_.inputs.beta.wanted) return 1.0;
  const double raw = raw_beta(row);
  return problem_.beta_factor == 0.0 ? raw : problem_.beta_factor * sigmoid(raw);
}

std::int64_t DeltaSequence::chunk_rows(std::int64_t first) const {
  const std::int64_t most = std::min(longest_delta_chunk(problem_), rows() - first);
  std::int64_t count = 1;
  while (count < most && !resets(first + count)) ++count;
  return count;
}

void DeltaSequence::load(std::int64_t first, DeltaGates& gates) const {
  const bool channels = problem_.traits.decay == DecayAxis::key;
  gates.rows = chunk_rows(first);
  gates.reset = resets(first);
  gates.first = 0.0;
  double cumulative = 0.0;
  for (std::int64_t i = 0; i < gates.rows; ++i) {
    if (!channels) {
      const double decay = log_decay(first + i, 0) * kLog2E;
      if (i == 0) {
        gates.first = decay;
      } else {
        cumulative += decay;
      }
    }
    gates.cumulative[i] = cumulative;
    gates.beta[i] = beta(first + i);
  }
}

UnitRow DeltaSequence::reads(const RowsView& rows, std::int64_t first, std::int64_t head) const {
  // The token whose last row is the first such row at or after `first`.
  return unit_row(rows, tokens_.batch, tokens_.begin + first / problem_.rows_per_token, head);
}

DeltaChunk DeltaSequence::chunk(const DeltaShape& shape, std::int64_t first,
                                const DeltaGates& gates) const {
  const LinearTensors& in = problem_.inputs;
  const std::int64_t each = problem_.rows_per_token;
  const std::int64_t row = tokens_.begin * each + first;
  const std::int64_t key_head = problem_.key_head(head_);
  const bool own_head = problem_.traits.erase == EraseForm::channels;
  DeltaChunk chunk;
  chunk.shape = shape;
  chunk.gates = &gates;
  chunk.first_read = each - 1 - first % each;
  chunk.q = reads(in.q, first, key_head);
  chunk.k = unit_row(in.k, tokens_.batch, row, key_head);
  chunk.v = unit_row(in.v, tokens_.batch, row, head_);
  if (in.a.wanted) {
    chunk.a = unit_row(in.a, tokens_.batch, row, own_head ? head_ : key_head);
    chunk.a_dtype = in.a.dtype;
  }
  if (in.b.wanted) {
    chunk.b = unit_row(in.b, tokens_.batch, row, head_);
    chunk.b_dtype = in.b.dtype;
  }
  if (shape.channels) {
    chunk.gate = unit_row(in.gate, tokens_.batch, row, head_);
    chunk.gate_dtype = in.gate.dtype;
    chunk.raw = has_raw_gates(problem_) ? &raw_gates_ : nullptr;
  }
  return chunk;
}

DeltaSequence::RawGate DeltaSequence::pull_gate(std::int64_t row, double d_log) const {
  RawGate raw;
  if (d_log == 0.0) return raw;
  const double factor = raw_gates_.factor;
  const double biased = raw_gate(row, 0) + dt_bias(0);
  switch (problem_.traits.gate) {
    case GateForm::raw:
      raw.rate = d_log * -factor * softplus(biased);
      raw.gate = -d_log * factor * softplus_slope(biased);
      break;
    case GateForm::bounded: {
      // The sigmoid's own slope: it stays finite where the sigmoid is 0 or 1.
      const double s = sigmoid(factor * biased);
      raw.gate = d_log * problem_.lower_bound * s * (1.0 - s) * factor;
      raw.rate = raw.gate * biased;
      break;
    }
    default:
      raw.gate = d_log;
      break;
  }
  return raw;
}

double DeltaSequence::pull_beta(std::int64_t row, double d_beta) const {
  if (problem_.beta_factor == 0.0) return d_beta;
  const double raw = raw_beta(row);
  return d_beta * problem_.beta_factor * sigmoid(raw) * sigmoid(-raw);
}

}  // namespace onchip::cpu
