#include "cpu/linear_host.hpp"

#include <cmath>
#include <cstring>
#include <limits>

namespace onchip::cpu {

namespace {

constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();
constexpr double kLog2E = 1.4426950408889634074;
constexpr double kMostTasks = 0x1p40;  // so that sizes of workspaces can be computed

double sigmoid(double x) {
  if (x >= 0.0) return 1.0 / (1.0 + std::exp(-x));
  const double e = std::exp(x);
  return e / (1.0 + e);
}

double log_sigmoid(double x) {
  return x < 0.0 ? x - std::log1p(std::exp(x)) : -std::log1p(std::exp(-x));
}

constexpr double kSoftplusLinear = 20.0;
double softplus(double x) { return x > kSoftplusLinear ? x : std::log1p(std::exp(x)); }
double softplus_slope(double x) { return x > kSoftplusLinear ? 1.0 : sigmoid(x); }

double load_number(const RowsView& rows, std::int64_t batch, std::int64_t row, std::int64_t head) {
  return load_as_double(rows.at(batch, row, head), rows.dtype);
}

// The exponential of a log weight; 0 where that is -inf, whatever made it.
double weight(double log_weight, bool zero) { return zero ? 0.0 : std::exp(log_weight); }

}  // namespace

LinearRefusal refuse_linear(const LinearProblem& problem, const Settings& settings) {
  if (problem.device.type != ONCHIP_DEVICE_CPU) return {"works on CPU tensors only"};
  if (!is_float(problem.dtype)) return {"takes float64, float32, float16 and bfloat16 only"};
  if (const std::string& reason = settings.num_threads_problem; !reason.empty()) {
    return {reason, true};
  }
  const auto real = [](std::int64_t x) { return static_cast<double>(x); };
  const double heads = real(std::max(problem.num_heads_k, problem.num_heads_v));
  if (real(problem.num_seqs) * heads > kMostTasks) {
    return {"more (sequence, head) pairs than can be counted"};
  }
  if (real(problem.slot) * real(problem.rows_per_token) > kMostTasks) {
    return {"more rows than can be counted"};
  }
  const double scale = std::fabs(problem.scale);
  if (problem.dtype != DType::f64 && problem.head_dim_k > 0 && scale != 0.0 &&
      !(scale >= double{std::numeric_limits<float>::min()} &&
        scale <= double{std::numeric_limits<float>::max()})) {
    return {"scale is outside the range of float32"};
  }
  return {};
}

LinearShape linear_shape(const LinearProblem& problem) {
  return {problem.dtype, problem.head_dim_k, problem.head_dim_v, problem.normalised};
}

UnitRow unit_row(const RowsView& rows, std::int64_t batch, std::int64_t row, std::int64_t head) {
  if (!rows.wanted || rows.data == nullptr) return {};
  return {rows.at(batch, row, head), rows.row_stride};
}

UnitState unit_state(const StateView& part, std::int64_t slot, std::int64_t head) {
  if (!part.wanted || part.data == nullptr) return {};
  return {part.at(slot, head), part.dtype, part.row_stride, part.column_stride};
}

double load_stabiliser(const StateViews& parts, std::int64_t slot, std::int64_t head) {
  const StateView& stabiliser = parts[2];
  return stabiliser.wanted ? load_as_double(stabiliser.at(slot, head), stabiliser.dtype) : 0.0;
}

void store_stabiliser(const StateViews& parts, std::int64_t slot, std::int64_t head, double value) {
  const StateView& stabiliser = parts[2];
  if (stabiliser.wanted) {
    store_from_double(stabiliser.at(slot, head), stabiliser.dtype, value);
  }
}

LinearGates::LinearGates(const LinearProblem& problem, const TokenRange& tokens, std::int64_t head)
    : problem_(problem), tokens_(tokens), head_(head) {
  const LinearTensors& in = problem.inputs;
  if (in.rate.wanted) rate_ = load_number(in.rate, 0, 0, head);
  if (in.dt_bias.wanted) dt_bias_ = load_number(in.dt_bias, 0, 0, head);
}

double LinearGates::time_step(double raw) const {
  const double biased = raw + dt_bias_;
  return std::clamp(problem_.dt_softplus ? softplus(biased) : biased, problem_.dt_min,
                    problem_.dt_max);
}

// The clamp's slope at its ends is 1.
double LinearGates::time_step_slope(double raw) const {
  const double biased = raw + dt_bias_;
  const double free = problem_.dt_softplus ? softplus(biased) : biased;
  if (free < problem_.dt_min || free > problem_.dt_max) return 0.0;
  return problem_.dt_softplus ? softplus_slope(biased) : 1.0;
}

double LinearGates::load(std::int64_t first, double stabiliser, ChunkGates& gates) const {
  const LinearTensors& in = problem_.inputs;
  gates.rows = std::min(kChunkRows, tokens_.length - first);
  double cumulative = 0.0;
  std::int32_t segment = -1;
  for (std::int64_t i = 0; i < gates.rows; ++i) {
    const std::int64_t row = tokens_.begin + first + i;
    const double gate = in.gate.wanted ? load_number(in.gate, tokens_.batch, row, head_) : 0.0;
    const double beta = in.beta.wanted ? load_number(in.beta, tokens_.batch, row, head_) : 0.0;
    double decay = 0.0;
    double write = 1.0;
    switch (problem_.traits.gate) {
      case GateForm::none:
      case GateForm::raw:  // of the delta rules alone
      case GateForm::bounded:
        break;
      case GateForm::log_decay:
        decay = gate;
        break;
      case GateForm::retention:
        decay = std::log1p(-std::exp2(-5.0 - static_cast<double>(head_)));
        break;
      case GateForm::mamba2:
        write = time_step(gate);
        decay = write * rate_;
        break;
      case GateForm::mlstm:
        decay = log_sigmoid(gate);
        break;
    }
    if (problem_.stabilised) {
      // In units of e^m every weight is at most 1, decays included.
      const double carried = decay + stabiliser;
      const double now = std::max(carried, beta);
      decay = carried == kMinusInfinity ? kMinusInfinity : carried - now;
      write = weight(beta - now, beta == kMinusInfinity);
      stabiliser = now;
      gates.floor[i] = std::exp(-now);
    } else {
      gates.floor[i] = 1.0;
      if (problem_.traits.write == WriteForm::sigmoid_gate) write = sigmoid(beta);
    }
    const bool reset = decay < kSegmentLogDecay;
    if (reset) segment = static_cast<std::int32_t>(i);
    cumulative += reset ? 0.0 : decay * kLog2E;
    gates.decay[i] = decay;
    gates.cumulative[i] = cumulative;
    gates.segment[i] = segment;
    gates.write[i] = write;
  }
  return stabiliser;
}

LinearGates::Raw LinearGates::pull(std::int64_t t, double d_decay, double d_write,
                                   double write) const {
  const LinearTensors& in = problem_.inputs;
  const std::int64_t row = tokens_.begin + t;
  const double gate = in.gate.wanted ? load_number(in.gate, tokens_.batch, row, head_) : 0.0;
  const double beta = in.beta.wanted ? load_number(in.beta, tokens_.batch, row, head_) : 0.0;
  Raw raw;
  switch (problem_.traits.gate) {
    case GateForm::none:
    case GateForm::retention:
    case GateForm::raw:
    case GateForm::bounded:
      break;
    case GateForm::log_decay:
      raw.gate = d_decay;
      break;
    case GateForm::mamba2:
      raw.rate = d_decay * time_step(gate);
      raw.gate = raw.dt_bias = (d_decay * rate_ + d_write) * time_step_slope(gate);
      break;
    case GateForm::mlstm:
      raw.gate = d_decay * sigmoid(-gate);
      break;
  }
  if (problem_.traits.write == WriteForm::exp_gate) raw.beta = d_write * write;
  if (problem_.traits.write == WriteForm::sigmoid_gate) {
    raw.beta = d_write * write * sigmoid(-beta);
  }
  return raw;
}

void clear_slack(const LinearProblem& problem, const RowsView& rows, std::int64_t heads,
                 std::int64_t dim) {
  const auto bytes = static_cast<std::size_t>(dim * dtype_size(rows.dtype));
  if (!rows.wanted || bytes == 0) return;
  for_each_slack(problem, [&](std::int64_t batch, std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      for (std::int64_t head = 0; head < heads; ++head) {
        std::memset(rows.at(batch, row, head), 0, bytes);
      }
    }
  });
}

}  // namespace onchip::cpu
