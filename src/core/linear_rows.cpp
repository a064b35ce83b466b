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

double dot(const double* a, const double* b, std::int64_t count) {
  double sum = 0.0;
  for (std::int64_t d = 0; d < count; ++d) sum += a[d] * b[d];
  return sum;
}

// x / sqrt(|x|^2 + eps) in place; returns the factor.
double normalise(double* x, std::int64_t count) {
  const double factor = 1.0 / std::sqrt(dot(x, x, count) + kL2NormEps);
  for (std::int64_t d = 0; d < count; ++d) x[d] *= factor;
  return factor;
}

// The gradient of x from that of the normalised x, in place.
void pull_normalise(const double* normalised, double factor, std::int64_t count, double* gradient) {
  const double along = dot(normalised, gradient, count);
  for (std::int64_t d = 0; d < count; ++d) {
    gradient[d] = factor * (gradient[d] - along * normalised[d]);
  }
}

}  // namespace

std::int64_t LinearRows::doubles(const LinearProblem& problem, std::int64_t tokens) {
  const std::int64_t dk = problem.head_dim_k;
  const std::int64_t dv = problem.head_dim_v;
  return 4 * dk + 2 * erase_width(problem) + 3 * dv + 2 + std::max(dk, dv) + problem.decay_width +
         problem.gate_width + problem.rate_width + (problem.stabilised ? tokens + 1 : 0);
}

LinearRows::LinearRows(const LinearProblem& problem, double* scratch, std::int64_t tokens)
    : problem_(problem) {
  const auto take = [&scratch](std::int64_t count) {
    double* piece = scratch;
    scratch += count;
    return piece;
  };
  const std::int64_t dk = problem.head_dim_k;
  const std::int64_t dv = problem.head_dim_v;
  row_.q = take(dk);
  row_.k = take(dk);
  row_.e = take(erase_width(problem));
  row_.b = take(dk);
  row_.u = take(dk);
  row_.x = take(dv + 1);
  row_.alpha = take(problem.decay_width);
  row_.write = take(1);
  v_ = take(dv);
  z_ = take(dv);
  a_ = take(erase_width(problem));
  b_ = take(std::max(dk, dv));
  gate_ = take(problem.gate_width);
  rate_ = take(problem.rate_width);
  stabilisers_ = take(problem.stabilised ? tokens + 1 : 0);
  if (problem.traits.engine == LinearEngine::scan) {  // which may have neither
    std::fill_n(row_.q, dk, 1.0);
    std::fill_n(row_.k, dk, 1.0);
  }
}

void LinearRows::begin(const TokenRange& tokens, std::int64_t head, double stabiliser) {
  tokens_ = tokens;
  head_ = head;
  const LinearTensors& in = problem_.inputs;
  if (in.rate.wanted) load_row(in.rate, 0, 0, head, problem_.rate_width, rate_);
  if (in.u.wanted) load_row(in.u, 0, 0, head, problem_.head_dim_k, row_.u);
  if (problem_.traits.read == ReadForm::quotient) bonus_ = row_.u[0];
  if (!problem_.stabilised) return;
  stabilisers_[0] = stabiliser;
  for (std::int64_t t = 0; t < tokens.length; ++t) {
    const std::int64_t row = tokens.begin + t;
    const double gate = load_number(in.gate, tokens.batch, row, head);
    const double g = problem_.traits.gate == GateForm::mlstm ? log_sigmoid(gate) : gate;
    const double i = load_number(in.beta, tokens.batch, row, head);
    stabilisers_[t + 1] = std::max(g + stabilisers_[t], i);
  }
}

const EngineRow& LinearRows::load(std::int64_t index) {
  const LinearTensors& in = problem_.inputs;
  const std::int64_t each = problem_.rows_per_token;
  const std::int64_t dk = problem_.head_dim_k;
  t_ = index / each;
  decays_ = index % each == 0;
  row_.reads = index % each == each - 1;
  const std::int64_t token = tokens_.begin + t_;
  const std::int64_t row = tokens_.begin * each + index;
  const std::int64_t key_head = problem_.key_head(head_);
  if (row_.reads && in.q.wanted) load_row(in.q, tokens_.batch, token, key_head, dk, row_.q);
  if (in.k.wanted) load_row(in.k, tokens_.batch, row, key_head, dk, row_.k);
  load_row(in.v, tokens_.batch, row, head_, problem_.head_dim_v, v_);
  if (in.z.wanted) load_row(in.z, tokens_.batch, row, head_, problem_.head_dim_v, z_);
  if (in.beta.wanted) beta_ = load_number(in.beta, tokens_.batch, row, head_);
  if (in.gate.wanted) load_row(in.gate, tokens_.batch, token, head_, problem_.gate_width, gate_);
  if (problem_.qk_l2norm) {
    if (row_.reads) q_norm_ = normalise(row_.q, dk);
    k_norm_ = normalise(row_.k, dk);
  }
  load_decay();
  load_write();
  load_erase();
  load_read();
  return row_;
}

// ---- decay --------------------------------------------------------------------------------------

double LinearRows::dt_bias(std::int64_t d) const {
  const RowsView& bias = problem_.inputs.dt_bias;
  if (!bias.wanted) return 0.0;
  return load_as_double(bias.at(0, 0, head_) + d * dtype_size(bias.dtype), bias.dtype);
}

// dt' of mamba1 and mamba2.
double LinearRows::time_step(double raw) const {
  const double biased = raw + dt_bias(0);
  return std::clamp(problem_.dt_softplus ? softplus(biased) : biased, problem_.dt_min,
                    problem_.dt_max);
}

// The clamp's slope at its ends is 1.
double LinearRows::time_step_slope(double raw) const {
  const double biased = raw + dt_bias(0);
  const double free = problem_.dt_softplus ? softplus(biased) : biased;
  if (free < problem_.dt_min || free > problem_.dt_max) return 0.0;
  return problem_.dt_softplus ? softplus_slope(biased) : 1.0;
}

double LinearRows::log_decay(std::int64_t d) const {
  switch (problem_.traits.gate) {
    case GateForm::none:
      break;
    case GateForm::log_decay:
      return gate_[d];
    case GateForm::retention:
      return std::log1p(-std::exp2(-5.0 - static_cast<double>(head_)));
    case GateForm::raw:
      return -std::exp(rate_[0]) * softplus(gate_[d] + dt_bias(d));
    case GateForm::bounded:
      return problem_.lower_bound * sigmoid(std::exp(rate_[0]) * (gate_[d] + dt_bias(d)));
    case GateForm::mamba2:
      return time_step(gate_[0]) * rate_[d];
    case GateForm::mlstm:
      return log_sigmoid(gate_[d]);
  }
  return 0.0;
}

void LinearRows::load_decay() {
  for (std::int64_t d = 0; d < problem_.decay_width; ++d) {
    const double g = decays_ ? log_decay(d) : 0.0;
    if (problem_.stabilised) {
      // Here a weight is judged against the row's stabiliser, so a small one alone is no reset.
      const double carried = g + stabilisers_[t_];
      row_.alpha[d] = weight(carried - stabilisers_[t_ + 1], carried == kMinusInfinity);
    } else {
      row_.alpha[d] = weight(g, g < kSegmentLogDecay);
    }
  }
  if (problem_.traits.keys == KeyForm::complement) {
    for (std::int64_t d = 0; d < problem_.head_dim_k; ++d) row_.k[d] = -std::expm1(gate_[d]);
  }
}

// ---- write and erase ----------------------------------------------------------------------------

void LinearRows::load_write() {
  const std::int64_t dv = problem_.head_dim_v;
  std::copy_n(v_, dv, row_.x);
  if (problem_.normalised) row_.x[dv] = 1.0;
  row_.write[0] = 1.0;
  switch (problem_.traits.write) {
    case WriteForm::plain:
      break;
    case WriteForm::time_step:
      row_.write[0] = time_step(gate_[0]);
      break;
    case WriteForm::exp_gate:
      row_.write[0] = weight(beta_ - stabilisers_[t_ + 1], beta_ == kMinusInfinity);
      break;
    case WriteForm::sigmoid_gate:
      row_.write[0] = sigmoid(beta_);
      break;
  }
}

void LinearRows::load_erase() {
  const LinearTensors& in = problem_.inputs;
  const std::int64_t dk = problem_.head_dim_k;
  const std::int64_t dv = problem_.head_dim_v;
  const std::int64_t row = tokens_.begin + t_;
  const std::int64_t key_head = problem_.key_head(head_);
  erase_ = problem_.beta_factor == 0.0 ? beta_ : problem_.beta_factor * sigmoid(beta_);
  switch (problem_.traits.erase) {
    case EraseForm::none:
      return;
    case EraseForm::keys:
      for (std::int64_t d = 0; d < dk; ++d) row_.e[d] = erase_ * row_.k[d];
      break;
    case EraseForm::other_keys:
      load_row(in.a, tokens_.batch, row, key_head, dk, a_);
      for (std::int64_t d = 0; d < dk; ++d) row_.e[d] = erase_ * a_[d];
      break;
    case EraseForm::channels:
      load_row(in.a, tokens_.batch, row, head_, dk, a_);
      load_row(in.b, tokens_.batch, row, head_, dv, b_);
      for (std::int64_t d = 0; d < dk; ++d) row_.e[d] = a_[d] * row_.k[d];
      for (std::int64_t j = 0; j < dv; ++j) row_.x[j] = b_[j] * v_[j];
      return;
    case EraseForm::slots:
      load_row(in.a, tokens_.batch, row, head_, problem_.num_slots, row_.e);
      return;
    case EraseForm::given:
      load_row(in.a, tokens_.batch, row, key_head, dk, row_.e);
      load_row(in.b, tokens_.batch, row, key_head, dk, row_.b);
      return;
  }
  for (std::int64_t j = 0; j < dv; ++j) row_.x[j] *= erase_;
}

// ---- the read -----------------------------------------------------------------------------------

// rwkv4 weighs the state before its token and the token itself by the larger of both.
void LinearRows::load_read() {
  if (problem_.traits.read != ReadForm::quotient) return;
  const double carried = stabilisers_[t_];
  const double own = bonus_ + beta_;
  const double largest = std::max(carried, own);
  row_.q[0] = weight(carried - largest, carried == kMinusInfinity);
  row_.u[0] = weight(own - largest, own == kMinusInfinity);
}

double LinearRows::normaliser_floor() const {
  return problem_.stabilised ? std::exp(-stabilisers_[t_ + 1]) : 1.0;
}

double LinearRows::skip(std::int64_t j) const {
  const RowsView& d = problem_.inputs.skip;
  const std::int64_t at = problem_.skip_width == 1 ? 0 : j;
  return load_as_double(d.at(0, 0, head_) + at * dtype_size(d.dtype), d.dtype);
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
    case ReadForm::quotient:
      y[0] = read[1] == 0.0 ? 0.0 : problem_.scale * read[0] / read[1];
      return;
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

void LinearRows::clear(RawGradients& raw) const {
  const std::int64_t dk = problem_.head_dim_k;
  const std::int64_t dv = problem_.head_dim_v;
  for (double* part : {raw.q, raw.k, raw.u}) std::fill_n(part, dk, 0.0);
  std::fill_n(raw.a, erase_width(problem_), 0.0);
  for (double* part : {raw.v, raw.z}) std::fill_n(part, dv, 0.0);
  for (double* part : {raw.gate, raw.dt_bias}) std::fill_n(part, problem_.gate_width, 0.0);
  std::fill_n(raw.rate, problem_.rate_width, 0.0);
  std::fill_n(raw.b, std::max(dk, dv), 0.0);
  std::fill_n(raw.skip, problem_.skip_width, 0.0);
  raw.beta = 0.0;
}

void LinearRows::pull_read(const double* read, const double* dy, double* dread,
                           RawGradients& raw) const {
  const std::int64_t dv = problem_.head_dim_v;
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
      const double sign = mlstm && sum < 0.0 ? -1.0 : 1.0;  // of d|sum|
      dread[dv] = constant ? 0.0 : sign * d_denominator;
      return;
    }
    case ReadForm::quotient: {
      const double slope = read[1] == 0.0 ? 0.0 : problem_.scale * dy[0] / read[1];
      dread[0] = slope;
      dread[1] = slope == 0.0 ? 0.0 : -slope * (read[0] / read[1]);
      return;
    }
    case ReadForm::mamba2:
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

// ---- what passed through the engine -------------------------------------------------------------

void LinearRows::pull_row(const EngineRow& gradient, RawGradients& raw) const {
  const std::int64_t dk = problem_.head_dim_k;
  std::copy_n(gradient.k, dk, raw.k);
  if (row_.reads) std::copy_n(gradient.q, dk, raw.q);
  if (problem_.inputs.u.wanted) std::copy_n(gradient.u, dk, raw.u);
  if (problem_.traits.write == WriteForm::exp_gate) raw.beta = gradient.write[0] * row_.write[0];
  if (problem_.traits.read == ReadForm::quotient) {
    raw.u[0] = gradient.u[0] * row_.u[0];
    raw.beta += raw.u[0];
  }
  if (problem_.traits.write == WriteForm::sigmoid_gate) {
    raw.beta = gradient.write[0] * row_.write[0] * sigmoid(-beta_);
  }
  pull_erase(gradient, raw);
  if (decays_) pull_gate(gradient, raw);
  if (problem_.qk_l2norm) {
    if (row_.reads) pull_normalise(row_.q, q_norm_, dk, raw.q);
    pull_normalise(row_.k, k_norm_, dk, raw.k);
  }
}

void LinearRows::pull_erase(const EngineRow& gradient, RawGradients& raw) const {
  const std::int64_t dk = problem_.head_dim_k;
  const std::int64_t dv = problem_.head_dim_v;
  double d_erase = 0.0;
  switch (problem_.traits.erase) {
    case EraseForm::none:
      for (std::int64_t j = 0; j < dv; ++j) raw.v[j] += gradient.x[j];
      return;
    case EraseForm::slots:
      for (std::int64_t j = 0; j < dv; ++j) raw.v[j] += gradient.x[j];
      std::copy_n(gradient.e, problem_.num_slots, raw.a);
      return;
    case EraseForm::given:
      for (std::int64_t j = 0; j < dv; ++j) raw.v[j] += gradient.x[j];
      std::copy_n(gradient.e, dk, raw.a);
      std::copy_n(gradient.b, dk, raw.b);
      return;
    case EraseForm::channels:
      for (std::int64_t d = 0; d < dk; ++d) {
        raw.a[d] = gradient.e[d] * row_.k[d];
        raw.k[d] += gradient.e[d] * a_[d];
      }
      for (std::int64_t j = 0; j < dv; ++j) {
        raw.b[j] = gradient.x[j] * v_[j];
        raw.v[j] += gradient.x[j] * b_[j];
      }
      return;
    case EraseForm::keys:
      d_erase = dot(gradient.e, row_.k, dk);
      for (std::int64_t d = 0; d < dk; ++d) raw.k[d] += erase_ * gradient.e[d];
      break;
    case EraseForm::other_keys:
      d_erase = dot(gradient.e, a_, dk);
      for (std::int64_t d = 0; d < dk; ++d) raw.a[d] = erase_ * gradient.e[d];
      break;
  }
  d_erase += dot(gradient.x, v_, dv);
  for (std::int64_t j = 0; j < dv; ++j) raw.v[j] += erase_ * gradient.x[j];
  raw.beta = problem_.beta_factor == 0.0 ? d_erase : d_erase * erase_ * sigmoid(-beta_);
}

void LinearRows::pull_gate(const EngineRow& gradient, RawGradients& raw) const {
  for (std::int64_t d = 0; d < problem_.decay_width; ++d) {
    // A reset has no slope, whatever the state held before it.
    const double d_log = row_.alpha[d] == 0.0 ? 0.0 : gradient.alpha[d] * row_.alpha[d];
    switch (problem_.traits.gate) {
      case GateForm::none:
      case GateForm::retention:
        break;
      case GateForm::log_decay:
        raw.gate[d] = d_log;
        break;
      case GateForm::raw: {
        const double biased = gate_[d] + dt_bias(d);
        raw.rate[0] += d_log * log_decay(d);
        raw.gate[d] = raw.dt_bias[d] = -d_log * std::exp(rate_[0]) * softplus_slope(biased);
        break;
      }
      case GateForm::bounded: {
        // The sigmoid's own slope: it stays finite where the sigmoid is 0 or 1.
        const double biased = gate_[d] + dt_bias(d);
        const double s = sigmoid(std::exp(rate_[0]) * biased);
        const double slope = d_log * problem_.lower_bound * s * (1.0 - s) * std::exp(rate_[0]);
        raw.rate[0] += slope * biased;
        raw.gate[d] = raw.dt_bias[d] = slope;
        break;
      }
      case GateForm::mamba2:
        raw.rate[d] = d_log * time_step(gate_[0]);
        if (d_log != 0.0) raw.gate[0] += d_log * rate_[d];  // a rate of -inf has no slope
        break;
      case GateForm::mlstm:
        raw.gate[d] = d_log * sigmoid(-gate_[d]);
        break;
    }
    if (problem_.traits.keys == KeyForm::complement) {
      raw.gate[d] -= std::exp(gate_[d]) * raw.k[d];
      raw.k[d] = 0.0;
    }
  }
  if (problem_.traits.gate == GateForm::mamba2) {
    raw.gate[0] = (raw.gate[0] + gradient.write[0]) * time_step_slope(gate_[0]);
    raw.dt_bias[0] = raw.gate[0];
  }
}

}  // namespace onchip
