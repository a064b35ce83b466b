// dplr: S_t = Diag(alpha_t) S_{t-1} + b_t (a_t^T S_{t-1}) + k_t x_t^T, read scale S_t^T q_t
// (docs/semantics.md section 3); a is the row's e. Reverse, with dS the gradient of S_t and
// r = S_{t-1}^T a:
//   dS += scale q do^T;  dq = scale S_t do;  dk = dS x;  dx = dS^T k;  db = dS r;  dr = dS^T b;
//   da = S_{t-1} dr;  d alpha = S_{t-1} . dS over the rows of S;  dS_{t-1} = alpha dS + a dr^T.
#include <algorithm>

#include "reference/linear_engine.hpp"

namespace onchip::reference {

namespace {

// r = S_{t-1}^T a.
void read_again(const LinearStep& step, const EngineRow& row, const double* before, double* r) {
  std::fill_n(r, step.width, 0.0);
  for (std::int64_t i = 0; i < step.dk; ++i) {
    for (std::int64_t j = 0; j < step.width; ++j) r[j] += row.e[i] * before[i * step.width + j];
  }
}

void forward(const LinearStep& step, const EngineRow& row, const double* before, double* now,
             double* read) {
  double* r = step.scratch;
  read_again(step, row, before, r);
  std::fill_n(read, step.width, 0.0);
  for (std::int64_t i = 0; i < step.dk; ++i) {
    const std::int64_t at = i * step.width;
    const double alpha = step.alpha(row, i);
    for (std::int64_t j = 0; j < step.width; ++j) {
      now[at + j] = decayed(alpha, before[at + j]) + row.b[i] * r[j] + row.k[i] * row.x[j];
      read[j] += step.scale * row.q[i] * now[at + j];
    }
  }
}

void reverse(const LinearStep& step, const EngineRow& row, const double* before, const double* now,
             const double* d_read, double* d_state, const EngineRow& gradient) {
  double* r = step.scratch;
  double* d_r = step.scratch + step.width;
  read_again(step, row, before, r);
  std::fill_n(d_r, step.width, 0.0);
  std::fill_n(gradient.x, step.width, 0.0);
  for (std::int64_t i = 0; i < step.dk; ++i) {
    const std::int64_t at = i * step.width;
    double d_q = 0.0;
    double d_k = 0.0;
    double d_b = 0.0;
    for (std::int64_t j = 0; j < step.width; ++j) {
      d_q += now[at + j] * d_read[j];
      d_state[at + j] += step.scale * row.q[i] * d_read[j];
      const double d = d_state[at + j];
      d_k += d * row.x[j];
      d_b += d * r[j];
      d_r[j] += row.b[i] * d;
      gradient.x[j] += row.k[i] * d;
    }
    gradient.q[i] = step.scale * d_q;
    gradient.k[i] = d_k;
    gradient.b[i] = d_b;
  }
  if (!step.channels) gradient.alpha[0] = 0.0;
  for (std::int64_t i = 0; i < step.dk; ++i) {
    const std::int64_t at = i * step.width;
    const double alpha = step.alpha(row, i);
    double d_a = 0.0;
    double d_alpha = 0.0;
    for (std::int64_t j = 0; j < step.width; ++j) {
      d_a += before[at + j] * d_r[j];
      if (alpha != 0.0) d_alpha += before[at + j] * d_state[at + j];
      d_state[at + j] = decayed(alpha, d_state[at + j]) + row.e[i] * d_r[j];
    }
    gradient.e[i] = d_a;
    if (step.channels) {
      gradient.alpha[i] = d_alpha;
    } else {
      gradient.alpha[0] += d_alpha;
    }
  }
}

}  // namespace

LinearEngineFunctions dplr_engine() { return {forward, reverse}; }

}  // namespace onchip::reference
