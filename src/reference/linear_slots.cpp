// gated_slots: two channel decays a token, the first with its decay on the value axis:
//   K_t = K_{t-1} Diag(alpha_t) + k_t s_t^T in R^{dk x M},  p_t = softmax(scale K_t^T q_t),
//   V_t = Diag(alpha_t) V_{t-1} + s_t x_t^T in R^{M x dv},  read V_t^T p_t
// (docs/semantics.md section 3). Reverse, with dK, dV the gradients of K_t and V_t:
//   dp = V_t do;  dV += p do^T;  dz = p (dp - <p, dp>);  dK += scale q dz^T;  dq = scale K_t dz;
//   dk = dK s;  ds = dK^T k + dV x;  dx = dV^T s;
//   d alpha = column sums of K_{t-1} dK + row sums of V_{t-1} dV;  both decay.
#include <algorithm>
#include <cmath>

#include "reference/linear_engine.hpp"

namespace onchip::reference {

namespace {

// p of K_t: softmax over the slots, whose largest logit is taken out first.
void weigh(const LinearStep& step, const EngineRow& row, const double* keys, double* p) {
  std::fill_n(p, step.slots, 0.0);
  for (std::int64_t i = 0; i < step.dk; ++i) {
    for (std::int64_t m = 0; m < step.slots; ++m) {
      p[m] += step.scale * row.q[i] * keys[i * step.slots + m];
    }
  }
  if (step.slots == 0) return;
  const double largest = *std::max_element(p, p + step.slots);
  double sum = 0.0;
  for (std::int64_t m = 0; m < step.slots; ++m) {
    p[m] = std::exp(p[m] - largest);
    sum += p[m];
  }
  for (std::int64_t m = 0; m < step.slots; ++m) p[m] /= sum;
}

void forward(const LinearStep& step, const EngineRow& row, const double* before, double* now,
             double* read) {
  const std::int64_t keys = step.dk * step.slots;
  for (std::int64_t i = 0; i < step.dk; ++i) {
    for (std::int64_t m = 0; m < step.slots; ++m) {
      const std::int64_t at = i * step.slots + m;
      now[at] = decayed(row.alpha[m], before[at]) + row.k[i] * row.e[m];
    }
  }
  double* p = step.scratch;
  weigh(step, row, now, p);
  std::fill_n(read, step.width, 0.0);
  for (std::int64_t m = 0; m < step.slots; ++m) {
    for (std::int64_t j = 0; j < step.width; ++j) {
      const std::int64_t at = keys + m * step.width + j;
      now[at] = decayed(row.alpha[m], before[at]) + row.e[m] * row.x[j];
      read[j] += p[m] * now[at];
    }
  }
}

void reverse(const LinearStep& step, const EngineRow& row, const double* before, const double* now,
             const double* d_read, double* d_state, const EngineRow& gradient) {
  const std::int64_t keys = step.dk * step.slots;
  double* p = step.scratch;
  double* d_logit = step.scratch + step.slots;
  weigh(step, row, now, p);
  std::fill_n(gradient.x, step.width, 0.0);
  double along = 0.0;
  for (std::int64_t m = 0; m < step.slots; ++m) {
    double d_p = 0.0;
    double d_s = 0.0;
    double d_alpha = 0.0;
    for (std::int64_t j = 0; j < step.width; ++j) {
      const std::int64_t at = keys + m * step.width + j;
      d_p += now[at] * d_read[j];
      const double d = d_state[at] + p[m] * d_read[j];
      d_s += d * row.x[j];
      gradient.x[j] += d * row.e[m];
      if (row.alpha[m] != 0.0) d_alpha += before[at] * d;
      d_state[at] = decayed(row.alpha[m], d);
    }
    d_logit[m] = d_p;
    along += p[m] * d_p;
    gradient.e[m] = d_s;
    gradient.alpha[m] = d_alpha;
  }
  for (std::int64_t m = 0; m < step.slots; ++m) d_logit[m] = p[m] * (d_logit[m] - along);
  for (std::int64_t i = 0; i < step.dk; ++i) {
    double d_q = 0.0;
    double d_k = 0.0;
    for (std::int64_t m = 0; m < step.slots; ++m) {
      const std::int64_t at = i * step.slots + m;
      d_q += now[at] * d_logit[m];
      const double d = d_state[at] + step.scale * row.q[i] * d_logit[m];
      d_k += d * row.e[m];
      gradient.e[m] += d * row.k[i];
      if (row.alpha[m] != 0.0) gradient.alpha[m] += before[at] * d;
      d_state[at] = decayed(row.alpha[m], d);
    }
    gradient.q[i] = step.scale * d_q;
    gradient.k[i] = d_k;
  }
}

}  // namespace

LinearEngineFunctions gated_slots_engine() { return {forward, reverse}; }

}  // namespace onchip::reference
