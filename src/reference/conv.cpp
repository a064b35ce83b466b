// y_t = f(bias + sum_j weight[j] x_(t - W + 1 + j)), a channel at a time; with p the sum and
// dp = f'(p) dy: dx_s = sum_j weight[j] dp_(s + W - 1 - j), dweight[j] = sum_t dp_t x_(t - W + 1 +
// j), dbias = sum_t dp_t. Inputs before the first are the initial state's, and those of the final
// state hand their gradient back.
#include "reference/conv.hpp"

#include <algorithm>
#include <cmath>

#include "reference/workspace.hpp"

namespace onchip::reference {

namespace {

double sigmoid(double x) {
  if (x >= 0.0) return 1.0 / (1.0 + std::exp(-x));
  const double e = std::exp(x);
  return e / (1.0 + e);
}

double load(const TensorView& tensor, std::int64_t i) {
  return load_as_double(tensor.at(i), tensor.dtype);
}
double load(const TensorView& tensor, std::int64_t i, std::int64_t j) {
  return load_as_double(tensor.at(i, j), tensor.dtype);
}
double load(const TensorView& tensor, std::int64_t i, std::int64_t j, std::int64_t k) {
  return load_as_double(tensor.at(i, j, k), tensor.dtype);
}
void store(const TensorView& tensor, double value, std::int64_t i, std::int64_t j, std::int64_t k) {
  store_from_double(tensor.at(i, j, k), tensor.dtype, value);
}

double load(const RowsView& rows, std::int64_t batch, std::int64_t row, std::int64_t channel) {
  return load_as_double(rows.at(batch, row, 0) + channel * dtype_size(rows.dtype), rows.dtype);
}
void store(const RowsView& rows, double value, std::int64_t batch, std::int64_t row,
           std::int64_t channel) {
  store_from_double(rows.at(batch, row, 0) + channel * dtype_size(rows.dtype), rows.dtype, value);
}

// One channel of one sequence: its inputs at times -W .. length - 1.
class Channel {
 public:
  Channel(const ConvProblem& problem, const TokenRange& tokens, const TensorView& state,
          std::int64_t slot, std::int64_t channel)
      : problem_(problem), tokens_(tokens), state_(state), slot_(slot), channel_(channel) {}

  double input(std::int64_t time) const {
    if (time >= 0) return load(problem_.x, tokens_.batch, tokens_.begin + time, channel_);
    return state_.present() ? load(state_, slot_, channel_, problem_.width + time) : 0.0;
  }

  double sum(std::int64_t time) const {
    double total = problem_.bias.present() ? load(problem_.bias, channel_) : 0.0;
    for (std::int64_t j = 0; j < problem_.width; ++j) {
      total += load(problem_.weight, channel_, j) * input(time - problem_.width + 1 + j);
    }
    return total;
  }

  double output(std::int64_t time) const {
    const double p = sum(time);
    return problem_.silu ? p * sigmoid(p) : p;
  }

  double slope(std::int64_t time) const {
    if (!problem_.silu) return 1.0;
    const double p = sum(time);
    const double s = sigmoid(p);
    return s * (1.0 + p * (1.0 - s));
  }

 private:
  const ConvProblem& problem_;
  const TokenRange& tokens_;
  const TensorView& state_;
  std::int64_t slot_;
  std::int64_t channel_;
};

void clear_slack(const ConvProblem& problem, const RowsView& rows) {
  if (!rows.wanted) return;
  for_each_slack(problem, [&](std::int64_t batch, std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      store_zeros(rows, batch, row, 0, problem.channels);
    }
  });
}

PlanResult plan_channels(const ConvProblem& problem, const Layout& worker) {
  if (const char* reason = unsupported(problem)) return Reject{reason};
  return plan_with(problem.channels, worker, Layout{});
}

}  // namespace

PlanResult plan_conv_forward(const ConvForwardProblem& problem) {
  return plan_channels(problem, Layout{});
}

void run_conv_forward(const BackendPlan& plan, const ConvForwardProblem& problem,
                      const RunContext&) {
  parallel_for(problem.channels, planned_workers(plan), [&](std::int64_t channel, std::int32_t) {
    for (std::int64_t n = 0; n < problem.num_seqs; ++n) {
      const TokenRange tokens = problem.tokens(n);
      const Channel one(problem, tokens, problem.initial_state, n, channel);
      for (std::int64_t t = 0; t < tokens.length; ++t) {
        store(problem.y, one.output(t), tokens.batch, tokens.begin + t, channel);
      }
      for (std::int64_t s = 0; problem.final_state.present() && s < problem.width; ++s) {
        store(problem.final_state, one.input(tokens.length - problem.width + s), n, channel, s);
      }
    }
  });
  clear_slack(problem, problem.y);
}

PlanResult plan_conv_backward(const ConvBackwardProblem& problem) {
  Layout worker;
  worker.add(problem.slot);   // dp
  worker.add(problem.width);  // dweight
  worker.finish_line();
  return plan_channels(problem, worker);
}

void run_conv_backward(const BackendPlan& plan, const ConvBackwardProblem& problem,
                       const RunContext& context) {
  const auto worker_doubles = static_cast<std::int64_t>(plan.words[kWorkerDoubles]);
  const std::int64_t width = problem.width;
  parallel_for(
      problem.channels, planned_workers(plan), [&](std::int64_t channel, std::int32_t worker) {
        double* dp = as_doubles(context.workspace) + worker * worker_doubles;
        double* dweight = dp + problem.slot;
        double dbias = 0.0;
        std::fill_n(dweight, width, 0.0);
        for (std::int64_t n = 0; n < problem.num_seqs; ++n) {
          const TokenRange tokens = problem.tokens(n);
          const Channel one(problem, tokens, problem.initial_state, n, channel);
          for (std::int64_t t = 0; t < tokens.length; ++t) {
            dp[t] = one.slope(t) * load(problem.d_y, tokens.batch, tokens.begin + t, channel);
            dbias += dp[t];
            for (std::int64_t j = 0; j < width; ++j) {
              dweight[j] += dp[t] * one.input(t - width + 1 + j);
            }
          }
          // Of the input at `time`, which the final state may hold.
          const auto d_input = [&](std::int64_t time) {
            double total = 0.0;
            for (std::int64_t j = 0; j < width; ++j) {
              const std::int64_t t = time + width - 1 - j;
              if (t >= 0 && t < tokens.length) total += load(problem.weight, channel, j) * dp[t];
            }
            const std::int64_t s = time - tokens.length + width;
            if (s >= 0 && problem.d_final_state.present()) {
              total += load(problem.d_final_state, n, channel, s);
            }
            return total;
          };
          for (std::int64_t t = 0; problem.dx.wanted && t < tokens.length; ++t) {
            store(problem.dx, d_input(t), tokens.batch, tokens.begin + t, channel);
          }
          for (std::int64_t s = 0; problem.dinitial_state.present() && s < width; ++s) {
            store(problem.dinitial_state, d_input(s - width), n, channel, s);
          }
        }
        for (std::int64_t j = 0; problem.dweight.present() && j < width; ++j) {
          store_from_double(problem.dweight.at(channel, j), problem.dweight.dtype, dweight[j]);
        }
        if (problem.dbias.present()) {
          store_from_double(problem.dbias.at(channel), problem.dbias.dtype, dbias);
        }
      });
  clear_slack(problem, problem.dx);
}

PlanResult plan_conv_step(const ConvStepProblem& problem) {
  return plan_channels(problem, Layout{});
}

void run_conv_step(const BackendPlan& plan, const ConvStepProblem& problem, const RunContext&) {
  parallel_for(problem.channels, planned_workers(plan), [&](std::int64_t channel, std::int32_t) {
    for (std::int64_t n = 0; n < problem.num_seqs; ++n) {
      const std::int64_t slot = problem.state_slot(n);
      if (slot < 0) {
        store(problem.y, 0.0, n, 0, channel);
        continue;
      }
      const TokenRange tokens = problem.tokens(n);
      const Channel one(problem, tokens, problem.state, slot, channel);
      store(problem.y, one.output(0), n, 0, channel);
      for (std::int64_t s = 0; s < problem.width; ++s) {
        store(problem.state, one.input(1 - problem.width + s), slot, channel, s);
      }
    }
  });
}

}  // namespace onchip::reference
