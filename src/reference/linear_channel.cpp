// channel_decay: S_t = Diag(alpha_t) S_{t-1} + k_t x_t^T; read scale S_t^T q_t, or, exclusive with
// the bonus u, scale (S_{t-1} + Diag(u) k_t x_t^T)^T q_t (docs/semantics.md section 3). Reverse,
// with dS the gradient of S_t:
//   inclusive: dS += scale q do^T, dq = scale S_t do;
//   exclusive: dq = scale (S_{t-1} do + u k (x.do)), du = scale q k (x.do), and k, x alike; what
//   S_{t-1} gets joins behind the decay;
//   dk += dS x;  dx += dS^T k;  d alpha = S_{t-1} . dS over the rows of S;  dS_{t-1} = alpha dS.
#include <algorithm>

#include "reference/linear_engine.hpp"

namespace onchip::reference {

namespace {

void forward(const LinearStep& step, const EngineRow& row, const double* before, double* now,
             double* read) {
  std::fill_n(read, step.width, 0.0);
  for (std::int64_t i = 0; i < step.dk; ++i) {
    const std::int64_t at = i * step.width;
    const double alpha = step.alpha(row, i);
    for (std::int64_t j = 0; j < step.width; ++j) {
      const double write = row.k[i] * row.x[j];
      now[at + j] = decayed(alpha, before[at + j]) + write;
      const double seen = step.exclusive ? before[at + j] + row.u[i] * write : now[at + j];
      read[j] += step.scale * row.q[i] * seen;
    }
  }
}

void reverse(const LinearStep& step, const EngineRow& row, const double* before, const double* now,
             const double* d_read, double* d_state, const EngineRow& gradient) {
  std::fill_n(gradient.x, step.width, 0.0);
  if (!step.channels) gradient.alpha[0] = 0.0;
  for (std::int64_t i = 0; i < step.dk; ++i) {
    const std::int64_t at = i * step.width;
    const double alpha = step.alpha(row, i);
    const double bonus = step.exclusive ? row.u[i] : 0.0;
    double d_q = 0.0;
    double d_k = 0.0;
    double d_alpha = 0.0;
    double own = 0.0;  // x . d_read
    for (std::int64_t j = 0; j < step.width; ++j) {
      const double d_seen = step.scale * row.q[i] * d_read[j];
      const double d = d_state[at + j] + (step.exclusive ? 0.0 : d_seen);
      const double d_write = d + bonus * d_seen;
      d_q += (step.exclusive ? before[at + j] : now[at + j]) * d_read[j];
      own += row.x[j] * d_read[j];
      d_k += d_write * row.x[j];
      gradient.x[j] += row.k[i] * d_write;
      if (alpha != 0.0) d_alpha += before[at + j] * d;
      d_state[at + j] = decayed(alpha, d) + (step.exclusive ? d_seen : 0.0);
    }
    gradient.q[i] = step.scale * (d_q + bonus * row.k[i] * own);
    gradient.k[i] = d_k;
    gradient.u[i] = step.scale * row.q[i] * row.k[i] * own;
    if (step.channels) {
      gradient.alpha[i] = d_alpha;
    } else {
      gradient.alpha[0] += d_alpha;
    }
  }
}

}  // namespace

LinearEngineFunctions channel_decay_engine() { return {forward, reverse}; }

}  // namespace onchip::reference
