#include "reference/linear.hpp"

#include <algorithm>
#include <cmath>

#include "core/linear_rows.hpp"
#include "reference/linear_engine.hpp"
#include "reference/workspace.hpp"

namespace onchip::reference {

namespace {

const LinearEngineFunctions& functions_of(const LinearProblem& problem) {
  switch (problem.traits.engine) {
    case LinearEngine::scalar_decay:
      break;
  }
  return kScalarDecay;
}

LinearStep step_of(const LinearProblem& problem) {
  return {problem.head_dim_k, value_width(problem), problem.scale};
}

// ---- states -------------------------------------------------------------------------------------

// Row-major [dk, value_width]: the normaliser is the last column. Absent parts are zero.
void load_state(const LinearProblem& problem, const StateViews& parts, std::int64_t slot,
                std::int64_t head, double* state) {
  const auto& [matrix, normaliser, stabiliser] = parts;
  const std::int64_t width = value_width(problem);
  std::fill_n(state, problem.head_dim_k * width, 0.0);
  for (std::int64_t i = 0; i < problem.head_dim_k; ++i) {
    for (std::int64_t j = 0; matrix.wanted && j < problem.head_dim_v; ++j) {
      state[i * width + j] = load_as_double(matrix.at(slot, head, i, j), matrix.dtype);
    }
    if (problem.normalised && normaliser.wanted) {
      state[i * width + problem.head_dim_v] =
          load_as_double(normaliser.at(slot, head, i), normaliser.dtype);
    }
  }
}

double load_stabiliser(const StateViews& parts, std::int64_t slot, std::int64_t head) {
  const StateView& stabiliser = parts[2];
  return stabiliser.wanted ? load_as_double(stabiliser.at(slot, head), stabiliser.dtype) : 0.0;
}

void store_state(const LinearProblem& problem, const StateViews& parts, std::int64_t slot,
                 std::int64_t head, const double* state, double third) {
  const auto& [matrix, normaliser, stabiliser] = parts;
  const std::int64_t width = value_width(problem);
  for (std::int64_t i = 0; i < problem.head_dim_k; ++i) {
    for (std::int64_t j = 0; matrix.wanted && j < problem.head_dim_v; ++j) {
      store_from_double(matrix.at(slot, head, i, j), matrix.dtype, state[i * width + j]);
    }
    if (normaliser.wanted) {
      store_from_double(normaliser.at(slot, head, i), normaliser.dtype,
                        state[i * width + problem.head_dim_v]);
    }
  }
  if (stabiliser.wanted) store_from_double(stabiliser.at(slot, head), stabiliser.dtype, third);
}

// ---- forward and step ---------------------------------------------------------------------------

Layout forward_layout(const LinearProblem& problem) {
  const std::int64_t width = value_width(problem);
  Layout layout;
  layout.add(LinearRows::doubles(problem, problem.slot));
  layout.add(problem.head_dim_k, width, 2);
  layout.add(width);
  layout.add(problem.head_dim_v);
  layout.finish_line();
  return layout;
}

// Runs the tokens of one (sequence, value head) from one set of state parts to another.
class ForwardWorker {
 public:
  ForwardWorker(const LinearProblem& problem, const RowsView& o, double* workspace)
      : ForwardWorker(problem, o, Scratch(workspace)) {}

  void run(const TokenRange& tokens, std::int64_t head, const StateViews& from,
           std::int64_t from_slot, const StateViews& to) {
    load_state(problem_, from, from_slot, head, before_);
    const double stabiliser = load_stabiliser(from, from_slot, head);
    rows_.begin(tokens, head, stabiliser);
    const LinearEngineFunctions& engine = functions_of(problem_);
    for (std::int64_t t = 0; t < tokens.length; ++t) {
      engine.forward(step_of(problem_), rows_.load(t), before_, now_, read_);
      std::swap(before_, now_);
      rows_.finish(read_, y_);
      store_row(o_, tokens.batch, tokens.begin + t, head, problem_.head_dim_v, y_);
    }
    store_state(problem_, to, from_slot, head, before_,
                problem_.stabilised ? rows_.final_stabiliser() : 0.0);
  }

 private:
  ForwardWorker(const LinearProblem& problem, const RowsView& o, Scratch scratch)
      : problem_(problem),
        o_(o),
        rows_(problem, scratch.take(LinearRows::doubles(problem, problem.slot)), problem.slot),
        before_(scratch.take(problem.head_dim_k, value_width(problem))),
        now_(scratch.take(problem.head_dim_k, value_width(problem))),
        read_(scratch.take(value_width(problem))),
        y_(scratch.take(problem.head_dim_v)) {}

  const LinearProblem& problem_;
  const RowsView& o_;
  LinearRows rows_;
  double* before_;
  double* now_;
  double* read_;
  double* y_;
};

void clear_slack(const LinearProblem& problem, const RowsView& rows, std::int64_t heads,
                 std::int64_t dim) {
  if (!rows.wanted) return;
  for_each_slack(problem, [&](std::int64_t batch, std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      for (std::int64_t head = 0; head < heads; ++head) store_zeros(rows, batch, row, head, dim);
    }
  });
}

// ---- backward -----------------------------------------------------------------------------------

// Tokens between kept states. About the square root balances both kinds of memory.
std::int64_t kept_every(const LinearProblem& problem) {
  if (problem.chunk_len > 0)
    return std::min(problem.chunk_len, std::max<std::int64_t>(problem.slot, 1));
  const auto root = static_cast<std::int64_t>(std::sqrt(static_cast<double>(problem.slot)));
  return (root + 16) / 16 * 16;
}

std::int64_t kept_states(const LinearProblem& problem) {
  const std::int64_t every = kept_every(problem);
  return (problem.slot + every - 1) / every;
}

// Gradients of constants are summed over sequences: one row of these a (sequence, value head).
struct ConstantSums {
  explicit ConstantSums(const LinearBackwardProblem& problem)
      : gate(0),
        rate(gate + (problem.gate_per_head ? 1 : 0)),
        dt_bias(rate + (problem.gradients.rate.wanted ? 1 : 0)),
        skip(dt_bias + (problem.gradients.dt_bias.wanted ? 1 : 0)),
        width(skip + (problem.gradients.skip.wanted ? problem.skip_width : 0)) {}

  std::int64_t gate, rate, dt_bias, skip, width;
};

class BackwardWorker {
 public:
  static Layout layout(const LinearBackwardProblem& problem) {
    const std::int64_t width = value_width(problem);
    const std::int64_t dk = problem.head_dim_k;
    const std::int64_t dv = problem.head_dim_v;
    Layout layout;
    layout.add(LinearRows::doubles(problem, problem.slot));
    layout.add(dk, width, kept_states(problem));
    layout.add(dk, width, kept_every(problem) + 1);
    layout.add(dk, width);
    layout.add(kept_every(problem), width);
    layout.add(2 * width + 2 * dk + 1);                // d_read, the engine's gradient
    layout.add(2 * dk + 3 * dv + problem.skip_width);  // d_y and raw gradients
    layout.add(problem.slot, dk, 2);                   // dq, dk summed over the group
    layout.finish_line();
    return layout;
  }

  BackwardWorker(const LinearBackwardProblem& problem, double* workspace, double* sums)
      : BackwardWorker(problem, Scratch(workspace), sums) {}

  // All value heads that read one key head, so that its gradient is complete here.
  void run(std::int64_t n, std::int64_t key_head) {
    const TokenRange tokens = problem_.tokens(n);
    std::fill_n(dq_, tokens.length * problem_.head_dim_k, 0.0);
    std::fill_n(dk_, tokens.length * problem_.head_dim_k, 0.0);
    const std::int64_t group = problem_.num_heads_v / problem_.num_heads_k;
    for (std::int64_t head = key_head * group; head < (key_head + 1) * group; ++head) {
      run_head(n, tokens, head);
    }
    for (std::int64_t t = 0; t < tokens.length; ++t) {
      const std::int64_t row = tokens.begin + t;
      store(problem_.gradients.q, tokens.batch, row, key_head, problem_.head_dim_k,
            dq_ + t * problem_.head_dim_k);
      store(problem_.gradients.k, tokens.batch, row, key_head, problem_.head_dim_k,
            dk_ + t * problem_.head_dim_k);
    }
  }

 private:
  BackwardWorker(const LinearBackwardProblem& problem, Scratch scratch, double* sums)
      : problem_(problem),
        every_(kept_every(problem)),
        state_size_(problem.head_dim_k * value_width(problem)),
        rows_(problem, scratch.take(LinearRows::doubles(problem, problem.slot)), problem.slot),
        kept_(scratch.take(kept_states(problem), state_size_)),
        states_(scratch.take(every_ + 1, state_size_)),
        d_state_(scratch.take(state_size_)),
        reads_(scratch.take(every_, value_width(problem))),
        d_read_(scratch.take(value_width(problem))),
        d_y_(scratch.take(problem.head_dim_v)),
        dq_(scratch.take(problem.slot, problem.head_dim_k)),
        dk_(scratch.take(problem.slot, problem.head_dim_k)),
        sums_(sums) {
    gradient_.q = scratch.take(problem.head_dim_k);
    gradient_.k = scratch.take(problem.head_dim_k);
    gradient_.x = scratch.take(value_width(problem));
    gradient_.alpha = scratch.take(1);
    raw_.q = scratch.take(problem.head_dim_k);
    raw_.k = scratch.take(problem.head_dim_k);
    raw_.v = scratch.take(problem.head_dim_v);
    raw_.z = scratch.take(problem.head_dim_v);
    raw_.skip = scratch.take(problem.skip_width);
  }

  double* state(std::int64_t index) { return states_ + index * state_size_; }
  double* kept(std::int64_t index) { return kept_ + index * state_size_; }

  void run_head(std::int64_t n, const TokenRange& tokens, std::int64_t head) {
    const LinearEngineFunctions& engine = functions_of(problem_);
    const LinearStep step = step_of(problem_);
    rows_.begin(tokens, head, load_stabiliser(problem_.initial_state, n, head));

    double* before = state(0);
    double* now = state(1);
    load_state(problem_, problem_.initial_state, n, head, before);
    for (std::int64_t t = 0; t < tokens.length; ++t) {
      if (t % every_ == 0) std::copy_n(before, state_size_, kept(t / every_));
      engine.forward(step, rows_.load(t), before, now, reads_);
      std::swap(before, now);
    }

    load_state(problem_, problem_.d_final_state, n, head, d_state_);
    for (std::int64_t begin = (tokens.length - 1) / every_ * every_;
         begin >= 0 && tokens.length > 0; begin -= every_) {
      const std::int64_t count = std::min(every_, tokens.length - begin);
      std::copy_n(kept(begin / every_), state_size_, state(0));
      for (std::int64_t i = 0; i < count; ++i) {
        engine.forward(step, rows_.load(begin + i), state(i), state(i + 1),
                       reads_ + i * step.width);
      }
      for (std::int64_t i = count - 1; i >= 0; --i) {
        const EngineRow& row = rows_.load(begin + i);
        load_row(problem_.d_o, tokens.batch, tokens.begin + begin + i, head, problem_.head_dim_v,
                 d_y_);
        rows_.pull_read(reads_ + i * step.width, d_y_, d_read_, raw_);
        engine.reverse(step, row, state(i), state(i + 1), d_read_, d_state_, gradient_);
        rows_.pull_row(gradient_, raw_);
        emit(n, tokens, begin + i, head);
      }
    }
    store_initial_gradient(n, head);
  }

  void emit(std::int64_t n, const TokenRange& tokens, std::int64_t t, std::int64_t head) {
    const LinearTensors& out = problem_.gradients;
    const std::int64_t row = tokens.begin + t;
    const std::int64_t dk = problem_.head_dim_k;
    for (std::int64_t d = 0; d < dk; ++d) {
      dq_[t * dk + d] += raw_.q[d];
      dk_[t * dk + d] += raw_.k[d];
    }
    store(out.v, tokens.batch, row, head, problem_.head_dim_v, raw_.v);
    store(out.z, tokens.batch, row, head, problem_.head_dim_v, raw_.z);
    store(out.beta, tokens.batch, row, head, 1, &raw_.beta);
    const ConstantSums at(problem_);
    double* sums = sums_ + (n * problem_.num_heads_v + head) * at.width;
    if (problem_.gate_per_head) {
      sums[at.gate] += raw_.gate;
    } else {
      store(out.gate, tokens.batch, row, head, 1, &raw_.gate);
    }
    if (out.rate.wanted) sums[at.rate] += raw_.rate;
    if (out.dt_bias.wanted) sums[at.dt_bias] += raw_.dt_bias;
    if (out.skip.wanted) {
      for (std::int64_t d = 0; d < problem_.skip_width; ++d) sums[at.skip + d] += raw_.skip[d];
    }
  }

  static void store(const RowsView& rows, std::int64_t batch, std::int64_t row, std::int64_t head,
                    std::int64_t dim, const double* from) {
    if (rows.wanted) store_row(rows, batch, row, head, dim, from);
  }

  // The stabiliser's is that of the factor e^{m_0} in front of the initial state.
  void store_initial_gradient(std::int64_t n, std::int64_t head) {
    double d_stabiliser = 0.0;
    if (problem_.dinitial_state[2].wanted) {
      load_state(problem_, problem_.initial_state, n, head, state(0));
      for (std::int64_t i = 0; i < state_size_; ++i) d_stabiliser += state(0)[i] * d_state_[i];
    }
    store_state(problem_, problem_.dinitial_state, n, head, d_state_, d_stabiliser);
  }

  const LinearBackwardProblem& problem_;
  std::int64_t every_;
  std::int64_t state_size_;
  LinearRows rows_;
  double* kept_;
  double* states_;
  double* d_state_;
  double* reads_;
  double* d_read_;
  double* d_y_;
  double* dq_;
  double* dk_;
  EngineRow gradient_;
  RawGradients raw_;
  double* sums_;
};

void store_constant(const LinearBackwardProblem& problem, const RowsView& to, const double* sums,
                    std::int64_t first, std::int64_t dim, std::int64_t width) {
  if (!to.wanted) return;
  for (std::int64_t head = 0; head < problem.num_heads_v; ++head) {
    for (std::int64_t d = 0; d < dim; ++d) {
      double total = 0.0;
      for (std::int64_t n = 0; n < problem.num_seqs; ++n) {
        total += sums[(n * problem.num_heads_v + head) * width + first + d];
      }
      store_from_double(to.at(0, 0, head) + d * dtype_size(to.dtype), to.dtype, total);
    }
  }
}

PlanResult plan_tasks(const LinearProblem& problem, std::int64_t heads, const Layout& worker,
                      const Layout& shared) {
  if (const char* reason = unsupported(problem)) return Reject{reason};
  Layout tasks;
  tasks.add(problem.num_seqs, heads);
  if (!tasks.fits()) return Reject{"more (sequence, head) pairs than can be counted"};
  return plan_with(tasks.doubles(), worker, shared);
}

}  // namespace

PlanResult plan_linear_forward(const LinearForwardProblem& problem) {
  return plan_tasks(problem, problem.num_heads_v, forward_layout(problem), Layout{});
}

void run_linear_forward(const BackendPlan& plan, const LinearForwardProblem& problem,
                        const RunContext& context) {
  double* workspace = as_doubles(context.workspace);
  const auto worker_doubles = static_cast<std::int64_t>(plan.words[kWorkerDoubles]);
  parallel_for(problem.num_seqs * problem.num_heads_v, planned_workers(plan),
               [&](std::int64_t task, std::int32_t worker) {
                 const std::int64_t n = task / problem.num_heads_v;
                 ForwardWorker forward(problem, problem.o, workspace + worker * worker_doubles);
                 forward.run(problem.tokens(n), task % problem.num_heads_v, problem.initial_state,
                             n, problem.final_state);
               });
  clear_slack(problem, problem.o, problem.num_heads_v, problem.head_dim_v);
}

PlanResult plan_linear_backward(const LinearBackwardProblem& problem) {
  Layout shared;
  shared.add(problem.num_seqs, problem.num_heads_v, ConstantSums(problem).width);
  shared.finish_line();
  return plan_tasks(problem, problem.num_heads_k, BackwardWorker::layout(problem), shared);
}

void run_linear_backward(const BackendPlan& plan, const LinearBackwardProblem& problem,
                         const RunContext& context) {
  const auto worker_doubles = static_cast<std::int64_t>(plan.words[kWorkerDoubles]);
  double* sums = as_doubles(context.workspace);
  double* workers = sums + plan.words[kSharedDoubles];
  std::fill_n(sums, plan.words[kSharedDoubles], 0.0);
  parallel_for(problem.num_seqs * problem.num_heads_k, planned_workers(plan),
               [&](std::int64_t task, std::int32_t worker) {
                 BackwardWorker backward(problem, workers + worker * worker_doubles, sums);
                 backward.run(task / problem.num_heads_k, task % problem.num_heads_k);
               });

  const LinearTensors& out = problem.gradients;
  const ConstantSums at(problem);
  if (problem.gate_per_head) store_constant(problem, out.gate, sums, at.gate, 1, at.width);
  store_constant(problem, out.rate, sums, at.rate, 1, at.width);
  store_constant(problem, out.dt_bias, sums, at.dt_bias, 1, at.width);
  store_constant(problem, out.skip, sums, at.skip, problem.skip_width, at.width);
  clear_slack(problem, out.q, problem.num_heads_k, problem.head_dim_k);
  clear_slack(problem, out.k, problem.num_heads_k, problem.head_dim_k);
  clear_slack(problem, out.v, problem.num_heads_v, problem.head_dim_v);
  clear_slack(problem, out.z, problem.num_heads_v, problem.head_dim_v);
  clear_slack(problem, out.beta, problem.num_heads_v, 1);
  if (!problem.gate_per_head) clear_slack(problem, out.gate, problem.num_heads_v, 1);
}

PlanResult plan_linear_step(const LinearStepProblem& problem) {
  return plan_tasks(problem, problem.num_heads_v, forward_layout(problem), Layout{});
}

void run_linear_step(const BackendPlan& plan, const LinearStepProblem& problem,
                     const RunContext& context) {
  double* workspace = as_doubles(context.workspace);
  const auto worker_doubles = static_cast<std::int64_t>(plan.words[kWorkerDoubles]);
  parallel_for(problem.num_seqs * problem.num_heads_v, planned_workers(plan),
               [&](std::int64_t task, std::int32_t worker) {
                 const std::int64_t n = task / problem.num_heads_v;
                 const std::int64_t head = task % problem.num_heads_v;
                 const std::int64_t slot = problem.state_slot(n);
                 if (slot < 0) {
                   store_zeros(problem.o, n, 0, head, problem.head_dim_v);
                   return;
                 }
                 ForwardWorker forward(problem, problem.o, workspace + worker * worker_doubles);
                 forward.run(problem.tokens(n), head, problem.state, slot, problem.state);
               });
}

}  // namespace onchip::reference
