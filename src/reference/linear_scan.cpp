// scan: one channel, whose state h has a number for each of dk, elementwise (docs/semantics.md
// section 3): h_t = alpha_t h_{t-1} + w_t k_t x_t, read scale <q_t, h_t>; where the read is
// exclusive scale (q_t h_{t-1} + u_t k_t x_t). x has one column, rwkv4's denominator is a second
// one. Reverse, with dh the gradient of h_t:
//   dh += scale q do;  dq = scale h_t do;  dk = w dh x;  dx = w dh k;  dw = k dh x;
//   d alpha = h_{t-1} dh;  dh_{t-1} = alpha dh;
// exclusive: du = scale k x do;  dk, dx += scale u do (x, k);  dh_{t-1} += scale q do; there q and
// u are weights relative to a stabiliser, on which nothing depends: q has no gradient.
#include <algorithm>

#include "reference/linear_engine.hpp"

namespace onchip::reference {

namespace {

void forward(const LinearStep& step, const EngineRow& row, const double* before, double* now,
             double* read) {
  std::fill_n(read, step.width, 0.0);
  for (std::int64_t i = 0; i < step.dk; ++i) {
    const double alpha = step.alpha(row, i);
    for (std::int64_t j = 0; j < step.width; ++j) {
      const std::int64_t at = i * step.width + j;
      const double own = row.k[i] * row.x[j];
      now[at] = decayed(alpha, before[at]) + row.write[0] * own;
      read[j] += step.scale * (step.exclusive ? decayed(row.q[i], before[at]) + row.u[i] * own
                                              : row.q[i] * now[at]);
    }
  }
}

void reverse(const LinearStep& step, const EngineRow& row, const double* before, const double* now,
             const double* d_read, double* d_state, const EngineRow& gradient) {
  std::fill_n(gradient.x, step.width, 0.0);
  gradient.write[0] = 0.0;
  if (!step.channels) gradient.alpha[0] = 0.0;
  for (std::int64_t i = 0; i < step.dk; ++i) {
    const double alpha = step.alpha(row, i);
    double d_q = 0.0;
    double d_k = 0.0;
    double d_u = 0.0;
    double d_alpha = 0.0;
    for (std::int64_t j = 0; j < step.width; ++j) {
      const std::int64_t at = i * step.width + j;
      const double d_o = step.scale * d_read[j];
      const double d = d_state[at] + (step.exclusive ? 0.0 : row.q[i] * d_o);
      const double d_own = row.write[0] * d + (step.exclusive ? row.u[i] * d_o : 0.0);
      d_k += d_own * row.x[j];
      gradient.x[j] += d_own * row.k[i];
      gradient.write[0] += row.k[i] * row.x[j] * d;
      if (alpha != 0.0) d_alpha += before[at] * d;
      d_state[at] = decayed(alpha, d);
      if (step.exclusive) {
        d_u += row.k[i] * row.x[j] * d_o;
        d_state[at] += row.q[i] * d_o;
      } else {
        d_q += now[at] * d_o;
      }
    }
    gradient.q[i] = d_q;
    gradient.k[i] = d_k;
    gradient.u[i] = d_u;
    if (step.channels) {
      gradient.alpha[i] = d_alpha;
    } else {
      gradient.alpha[0] += d_alpha;
    }
  }
}

}  // namespace

LinearEngineFunctions scan_engine() { return {forward, reverse}; }

}  // namespace onchip::reference
