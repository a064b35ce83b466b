// scalar_decay: S_t = alpha_t S_{t-1} + w_t k_t x_t^T, read scale S_t^T q_t (docs/semantics.md
// section 3). Reverse, with dS the gradient of S_t:
//   dS += scale q do^T;  dq = scale S_t do;  dk = w dS x;  dx = w dS^T k;  dw = k^T dS x;
//   d alpha = <S_{t-1}, dS>;  dS_{t-1} = alpha dS.
#include <algorithm>

#include "reference/linear_engine.hpp"

namespace onchip::reference {

namespace {

void forward(const LinearStep& step, const EngineRow& row, const double* before, double* now,
             double* read) {
  const double alpha = row.alpha[0];
  std::fill_n(read, step.width, 0.0);
  for (std::int64_t i = 0; i < step.dk; ++i) {
    const double* from = before + i * step.width;
    double* to = now + i * step.width;
    const double written = row.write[0] * row.k[i];
    const double weight = step.scale * row.q[i];
    for (std::int64_t j = 0; j < step.width; ++j) {
      to[j] = decayed(alpha, from[j]) + written * row.x[j];
      read[j] += weight * to[j];
    }
  }
}

void reverse(const LinearStep& step, const EngineRow& row, const double* before, const double* now,
             const double* d_read, double* d_state, const EngineRow& gradient) {
  const double alpha = row.alpha[0];
  double d_alpha = 0.0;
  double d_write = 0.0;
  std::fill_n(gradient.x, step.width, 0.0);
  for (std::int64_t i = 0; i < step.dk; ++i) {
    const std::int64_t at = i * step.width;
    double d_q = 0.0;
    double d_k = 0.0;
    for (std::int64_t j = 0; j < step.width; ++j) {
      const double d = d_state[at + j] + step.scale * row.q[i] * d_read[j];
      d_q += now[at + j] * d_read[j];
      d_k += d * row.x[j];
      gradient.x[j] += row.write[0] * row.k[i] * d;
      if (alpha != 0.0) d_alpha += before[at + j] * d;
      d_state[at + j] = decayed(alpha, d);
    }
    gradient.q[i] = step.scale * d_q;
    gradient.k[i] = row.write[0] * d_k;
    d_write += row.k[i] * d_k;
  }
  gradient.alpha[0] = d_alpha;
  gradient.write[0] = d_write;
}

}  // namespace

LinearEngineFunctions scalar_decay_engine() { return {forward, reverse}; }

}  // namespace onchip::reference
