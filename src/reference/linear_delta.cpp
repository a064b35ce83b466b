// delta_rule: S_t = S' - k_t (e_t^T S'') + k_t x_t^T with S' = Diag(alpha_t) S_{t-1} and S'' = S',
// or S_{t-1} where the erase is exclusive; read scale S_t^T q_t (docs/semantics.md section 3).
// Reverse, with dS the gradient of S_t and y = x - S''^T e:
//   dS += scale q do^T;  dq = scale S_t do;  dk = dS y;  dx = dS^T k;  de = -S'' dx;
//   dS'' = -e dx^T;  dS' = dS (+ dS'' if inclusive);  d alpha = S_{t-1} . dS' over the rows of S;
//   dS_{t-1} = alpha dS' (+ dS'' if exclusive).
#include <algorithm>

#include "reference/linear_engine.hpp"

namespace onchip::reference {

namespace {

// y = x - S''^T e.
void written(const LinearStep& step, const EngineRow& row, const double* before, double* y) {
  std::copy_n(row.x, step.width, y);
  for (std::int64_t i = 0; i < step.dk; ++i) {
    const double alpha = step.exclusive ? 1.0 : step.alpha(row, i);
    for (std::int64_t j = 0; j < step.width; ++j) {
      y[j] -= row.e[i] * decayed(alpha, before[i * step.width + j]);
    }
  }
}

void forward(const LinearStep& step, const EngineRow& row, const double* before, double* now,
             double* read) {
  double* y = step.scratch;
  written(step, row, before, y);
  if (row.reads) std::fill_n(read, step.width, 0.0);
  for (std::int64_t i = 0; i < step.dk; ++i) {
    const std::int64_t at = i * step.width;
    const double alpha = step.alpha(row, i);
    for (std::int64_t j = 0; j < step.width; ++j) {
      now[at + j] = decayed(alpha, before[at + j]) + row.k[i] * y[j];
      if (row.reads) read[j] += step.scale * row.q[i] * now[at + j];
    }
  }
}

void reverse(const LinearStep& step, const EngineRow& row, const double* before, const double* now,
             const double* d_read, double* d_state, const EngineRow& gradient) {
  double* y = step.scratch;
  double* d_y = step.scratch + step.width;
  written(step, row, before, y);
  std::fill_n(d_y, step.width, 0.0);
  for (std::int64_t i = 0; i < step.dk; ++i) {
    const std::int64_t at = i * step.width;
    double d_q = 0.0;
    double d_k = 0.0;
    for (std::int64_t j = 0; j < step.width; ++j) {
      if (row.reads) {
        d_q += now[at + j] * d_read[j];
        d_state[at + j] += step.scale * row.q[i] * d_read[j];
      }
      d_k += d_state[at + j] * y[j];
      d_y[j] += row.k[i] * d_state[at + j];
    }
    gradient.q[i] = step.scale * d_q;
    gradient.k[i] = d_k;
  }
  std::copy_n(d_y, step.width, gradient.x);
  gradient.alpha[0] = 0.0;
  for (std::int64_t i = 0; i < step.dk; ++i) {
    const std::int64_t at = i * step.width;
    const double alpha = step.alpha(row, i);
    double d_e = 0.0;
    double d_alpha = 0.0;
    for (std::int64_t j = 0; j < step.width; ++j) {
      const double erased = step.exclusive ? before[at + j] : decayed(alpha, before[at + j]);
      d_e -= erased * d_y[j];
      const double d_erased = -row.e[i] * d_y[j];
      const double d_decayed = d_state[at + j] + (step.exclusive ? 0.0 : d_erased);
      if (alpha != 0.0) d_alpha += before[at + j] * d_decayed;
      d_state[at + j] = decayed(alpha, d_decayed) + (step.exclusive ? d_erased : 0.0);
    }
    gradient.e[i] = d_e;
    if (step.channels) {
      gradient.alpha[i] = d_alpha;
    } else {
      gradient.alpha[0] += d_alpha;
    }
  }
}

}  // namespace

LinearEngineFunctions delta_rule_engine() { return {forward, reverse}; }

}  // namespace onchip::reference
