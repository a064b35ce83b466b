#include "core/linear_rows.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace onchip {

namespace {

constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();

double sigmoid(double x) {
  if (x >= 0.0) return 1.0 / (1.0 + std::exp(-x));
  const double e = std::exp(x);
  return e / (1.0 + e);
}

double log_sigmoid(double x) {
  return x < 0.0 ? x - std::log1p(std::exp(x)) : -std::log1p(std::exp(-x));
}

// Linear above 20, where the exact one differs by less than fp32 shows.
constexpr double kSoftplusLinear = 20.0;
double softplus(double x) { return x > kSoftplusLinear ? x : std::log1p(std::exp(x)); }
double softplus_slope(double x) { return x > kSoftplusLinear ? 1.0 : sigmoid(x); }

// e^x, and 0 for x = -inf whatever made it (-inf - -inf included).
double weight(double log_weight, bool zero) { return zero ? 0.0 : std::exp(log_weight); }

double load_number(const RowsView& rows, std::int64_t batch, std::int64_t row, std::int64_t head) {
  double value = 0.0;
  load_row(rows, batch, row, head, 1, &value);
  return value;
}

}  // namespace

std::int64_t LinearRows::doubles(const LinearProblem& problem, std::int64_t tokens) {
  return 2 * problem.head_dim_k + 3 * problem.head_dim_v + 2 +
         (problem.stabilised ? tokens + 1 : 0);
}

LinearRows::LinearRows(const LinearProblem& problem, double* scratch, std::int64_t tokens)
    : problem_(problem) {
  const auto take = [&scratch](std::int64_t count) {
    double* piece = scratch;
    scratch += count;
    return piece;
  };
  row_.q = take(problem.head_dim_k);
  row_.k = take(problem.head_dim_k);
  row_.x = take(problem.head_dim_v + 1);
  row_.alpha = take(1);
  v_ = take(problem.head_dim_v);
  z_ = take(problem.head_dim_v);
  stabilisers_ = take(problem.stabilised ? tokens + 1 : 0);
}

void LinearRows::begin(const TokenRange& tokens, std::int64_t head, double stabiliser) {
  tokens_ = tokens;
  head_ = head;
  const LinearTensors& in = problem_.inputs;
  if (in.rate.wanted) rate_ = load_number(in.rate, 0, 0, head);
  if (in.dt_bias.wanted) dt_bias_ = load_number(in.dt_bias, 0, 0, head);
  if (!problem_.stabilised) return;
  stabilisers_[0] = stabiliser;
  for (std::int64_t t = 0; t < tokens.length; ++t) {
    const std::int64_t row = tokens.begin + t;
    const double f = load_number(in.gate, tokens.batch, row, head);
    const double i = load_number(in.beta, tokens.batch, row, head);
    stabilisers_[t + 1] = std::max(log_sigmoid(f) + stabilisers_[t], i);
  }
}

// dt' of mamba2.
double LinearRows::time_step(double raw) const {
  const double biased = raw + dt_bias_;
  return std::clamp(problem_.dt_softplus ? softplus(biased) : biased, problem_.dt_min,
                    problem_.dt_max);
}

// The clamp's slope at its ends is 1.
double LinearRows::time_step_slope(double raw) const {
  const double biased = raw + dt_bias_;
  const double free = problem_.dt_softplus ? softplus(biased) : biased;
  if (free < problem_.dt_min || free > problem_.dt_max) return 0.0;
  return problem_.dt_softplus ? softplus_slope(biased) : 1.0;
}

const EngineRow& LinearRows::load(std::int64_t t) {
  t_ = t;
  const LinearTensors& in = problem_.inputs;
  const std::int64_t row = tokens_.begin + t;
  const std::int64_t key_head = problem_.key_head(head_);
  load_row(in.q, tokens_.batch, row, key_head, problem_.head_dim_k, row_.q);
  load_row(in.k, tokens_.batch, row, key_head, problem_.head_dim_k, row_.k);
  load_row(in.v, tokens_.batch, row, head_, problem_.head_dim_v, v_);
  if (in.z.wanted) load_row(in.z, tokens_.batch, row, head_, problem_.head_dim_v, z_);
  if (in.gate.wanted) gate_ = load_number(in.gate, tokens_.batch, row, head_);
  if (in.beta.wanted) beta_ = load_number(in.beta, tokens_.batch, row, head_);
  load_gate();
  load_write();
  return row_;
}

void LinearRows::load_gate() {
  double log_decay = 0.0;
  switch (problem_.traits.gate) {
    case GateForm::none:
      break;
    case GateForm::log_decay:
      log_decay = gate_;
      break;
    case GateForm::retention:
      log_decay = std::log1p(-std::exp2(-5.0 - static_cast<double>(head_)));
      break;
    case GateForm::mamba2:
      log_decay = time_step(gate_) * rate_;
      break;
    case GateForm::mlstm:
      log_decay = log_sigmoid(gate_);
      break;
  }
  if (problem_.stabilised) {
    // Here a weight is judged against the row's stabiliser, so a small one alone is no reset.
    log_decay += stabilisers_[t_];
    row_.alpha[0] = weight(log_decay - stabilisers_[t_ + 1], log_decay == kMinusInfinity);
  } else {
    row_.alpha[0] = weight(log_decay, log_decay < kSegmentLogDecay);
  }
}

void LinearRows::load_write() {
  const std::int64_t dv = problem_.head_dim_v;
  std::copy_n(v_, dv, row_.x);
  if (problem_.normalised) row_.x[dv] = 1.0;
  row_.write = 1.0;
  switch (problem_.traits.write) {
    case WriteForm::plain:
      break;
    case WriteForm::time_step:
      row_.write = time_step(gate_);
      break;
    case WriteForm::exp_gate:
      row_.write = weight(beta_ - stabilisers_[t_ + 1], beta_ == kMinusInfinity);
      break;
    case WriteForm::sigmoid_gate:
      row_.write = sigmoid(beta_);
      break;
  }
}

double LinearRows::normaliser_floor() const {
  return problem_.stabilised ? std::exp(-stabilisers_[t_ + 1]) : 1.0;
}

void LinearRows::finish(const double* read, double* y) const {
  const std::int64_t dv = problem_.head_dim_v;
  std::copy_n(read, dv, y);
  switch (problem_.traits.read) {
    case ReadForm::plain:
      return;
    case ReadForm::sum_normalised:
      for (std::int64_t j = 0; j < dv; ++j) y[j] /= read[dv] + kSumNormaliserEps;
      return;
    case ReadForm::mlstm: {
      const double denominator = std::max(std::fabs(read[dv]), normaliser_floor()) + problem_.eps;
      for (std::int64_t j = 0; j < dv; ++j) y[j] /= denominator;
      return;
    }
    case ReadForm::mamba2:
      if (problem_.inputs.skip.wanted) {
        for (std::int64_t j = 0; j < dv; ++j) y[j] += skip(j) * v_[j];
      }
      if (problem_.inputs.z.wanted) {
        for (std::int64_t j = 0; j < dv; ++j) y[j] *= z_[j] * sigmoid(z_[j]);
      }
      return;
  }
}

double LinearRows::skip(std::int64_t j) const {
  const RowsView& d = problem_.inputs.skip;
  const std::int64_t at = problem_.skip_width == 1 ? 0 : j;
  return load_as_double(d.at(0, 0, head_) + at * dtype_size(d.dtype), d.dtype);
}

void LinearRows::pull_read(const double* read, const double* dy, double* dread,
                           RawGradients& raw) const {
  const std::int64_t dv = problem_.head_dim_v;
  std::fill_n(raw.v, dv, 0.0);
  std::copy_n(dy, dv, dread);
  switch (problem_.traits.read) {
    case ReadForm::plain:
      return;
    case ReadForm::sum_normalised:
    case ReadForm::mlstm: {
      const bool mlstm = problem_.traits.read == ReadForm::mlstm;
      const double floor = mlstm ? normaliser_floor() : 0.0;
      const double sum = read[dv];
      const double denominator =
          mlstm ? std::max(std::fabs(sum), floor) + problem_.eps : sum + kSumNormaliserEps;
      double d_denominator = 0.0;
      for (std::int64_t j = 0; j < dv; ++j) {
        dread[j] = dy[j] / denominator;
        d_denominator -= dread[j] * (read[j] / denominator);
      }
      const bool constant = mlstm && (problem_.detach_normalizer || !(std::fabs(sum) > floor));
      if (constant) {
        dread[dv] = 0.0;
      } else {
        dread[dv] = mlstm && sum < 0.0 ? -d_denominator : d_denominator;
      }
      return;
    }
    case ReadForm::mamba2:
      for (std::int64_t d = 0; d < problem_.skip_width; ++d) raw.skip[d] = 0.0;
      for (std::int64_t j = 0; j < dv; ++j) {
        const bool skips = problem_.inputs.skip.wanted;
        if (problem_.inputs.z.wanted) {
          const double y = read[j] + (skips ? skip(j) * v_[j] : 0.0);
          const double s = sigmoid(z_[j]);
          raw.z[j] = dy[j] * y * s * (1.0 + z_[j] * (1.0 - s));
          dread[j] = dy[j] * z_[j] * s;
        }
        if (skips) {
          raw.skip[problem_.skip_width == 1 ? 0 : j] += dread[j] * v_[j];
          raw.v[j] = dread[j] * skip(j);
        }
      }
      return;
  }
}

void LinearRows::pull_row(const EngineRow& gradient, RawGradients& raw) const {
  const std::int64_t dk = problem_.head_dim_k;
  const std::int64_t dv = problem_.head_dim_v;
  std::copy_n(gradient.q, dk, raw.q);
  std::copy_n(gradient.k, dk, raw.k);
  for (std::int64_t j = 0; j < dv; ++j) raw.v[j] += gradient.x[j];

  // A reset has no slope, whatever the state held before it.
  const double d_log = row_.alpha[0] == 0.0 ? 0.0 : gradient.alpha[0] * row_.alpha[0];
  raw.gate = raw.beta = raw.rate = raw.dt_bias = 0.0;
  switch (problem_.traits.gate) {
    case GateForm::none:
    case GateForm::retention:
      break;
    case GateForm::log_decay:
      raw.gate = d_log;
      break;
    case GateForm::mamba2:
      raw.rate = d_log * time_step(gate_);
      raw.gate = raw.dt_bias = (d_log * rate_ + gradient.write) * time_step_slope(gate_);
      break;
    case GateForm::mlstm:
      raw.gate = d_log * sigmoid(-gate_);
      break;
  }
  if (problem_.traits.write == WriteForm::exp_gate) raw.beta = gradient.write * row_.write;
  if (problem_.traits.write == WriteForm::sigmoid_gate) {
    raw.beta = gradient.write * row_.write * sigmoid(-beta_);
  }
}

}  // namespace onchip
