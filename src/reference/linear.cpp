#include "reference/linear.hpp"

#include <algorithm>
#include <array>
#include <cmath>

#include "core/linear_rows.hpp"
#include "reference/linear_engine.hpp"
#include "reference/linear_states.hpp"
#include "reference/workspace.hpp"

namespace onchip::reference {

namespace {

LinearEngineFunctions functions_of(const LinearProblem& problem) {
  switch (problem.traits.engine) {
    case LinearEngine::channel_decay:
      return channel_decay_engine();
    case LinearEngine::delta_rule:
      return delta_rule_engine();
    case LinearEngine::dplr:
      return dplr_engine();
    case LinearEngine::gated_slots:
      return gated_slots_engine();
    case LinearEngine::scan:
      return scan_engine();
    case LinearEngine::scalar_decay:
      break;
  }
  return scalar_decay_engine();
}

LinearStep step_of(const LinearProblem& problem, double* scratch) {
  return {.dk = problem.head_dim_k,
          .width = value_width(problem),
          // A quotient of two reads is scaled itself.
          .scale = problem.traits.read == ReadForm::quotient ? 1.0 : problem.scale,
          .channels = problem.traits.decay == DecayAxis::key,
          .exclusive = problem.traits.exclusive,
          .slots = problem.num_slots,
          .scratch = scratch};
}

// ---- forward and step ---------------------------------------------------------------------------

Layout forward_layout(const LinearProblem& problem) {
  const std::int64_t width = value_width(problem);
  Layout layout;
  layout.add(LinearRows::doubles(problem, problem.slot));
  add_states(problem, layout, 2);
  layout.add(width);
  layout.add(problem.head_dim_v);
  layout.add(scratch_doubles(problem));
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
    const double stabiliser = load_stabiliser(problem_, from, from_slot, head);
    rows_.begin(tokens, head, stabiliser);
    const LinearEngineFunctions engine = functions_of(problem_);
    for (std::int64_t index = 0; index < tokens.length * problem_.rows_per_token; ++index) {
      const EngineRow& row = rows_.load(index);
      engine.forward(step_, row, before_, now_, read_);
      std::swap(before_, now_);
      if (!row.reads) continue;
      rows_.finish(read_, y_);
      store_row(o_, tokens.batch, tokens.begin + index / problem_.rows_per_token, head,
                problem_.head_dim_v, y_);
    }
    store_state(problem_, to, from_slot, head, before_,
                problem_.stabilised ? rows_.final_stabiliser() : 0.0);
  }

 private:
  ForwardWorker(const LinearProblem& problem, const RowsView& o, Scratch scratch)
      : problem_(problem),
        o_(o),
        rows_(problem, scratch.take(LinearRows::doubles(problem, problem.slot)), problem.slot),
        before_(scratch.take(state_doubles(problem))),
        now_(scratch.take(state_doubles(problem))),
        read_(scratch.take(value_width(problem))),
        y_(scratch.take(problem.head_dim_v)),
        step_(step_of(problem, scratch.take(scratch_doubles(problem)))) {}

  const LinearProblem& problem_;
  const RowsView& o_;
  LinearRows rows_;
  double* before_;
  double* now_;
  double* read_;
  double* y_;
  LinearStep step_;
};

// `each`: rows a token.
void clear_slack(const LinearProblem& problem, const RowsView& rows, std::int64_t heads,
                 std::int64_t dim, std::int64_t each = 1) {
  if (!rows.wanted) return;
  for_each_slack(problem, [&](std::int64_t batch, std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin * each; row < end * each; ++row) {
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
      : rate(gate + (problem.gate_per_head ? 1 : 0)),
        dt_bias(rate + (problem.gradients.rate.wanted ? problem.rate_width : 0)),
        skip(dt_bias + (problem.gradients.dt_bias.wanted ? problem.gate_width : 0)),
        u(skip + (problem.gradients.skip.wanted ? problem.skip_width : 0)),
        width(u + (problem.gradients.u.wanted ? problem.head_dim_k : 0)) {}

  std::int64_t gate = 0;
  std::int64_t rate, dt_bias, skip, u, width;
};

// What reads one key head is summed over its group of value heads before it is stored.
struct GroupSum {
  const RowsView* to = nullptr;
  double* sums = nullptr;  // [rows, dk]
};

class BackwardWorker {
 public:
  static Layout layout(const LinearBackwardProblem& problem) {
    const std::int64_t width = value_width(problem);
    const std::int64_t dk = problem.head_dim_k;
    const std::int64_t dv = problem.head_dim_v;
    const std::int64_t rows = kept_every(problem) * problem.rows_per_token;
    Layout layout;
    layout.add(LinearRows::doubles(problem, problem.slot));
    add_states(problem, layout, kept_states(problem));
    add_states(problem, layout, rows + 1);
    add_states(problem, layout, 1);
    layout.add(rows, width);
    layout.add(2, width);  // d_read, the engine's dx
    layout.add(scratch_doubles(problem));
    layout.add(7, dk);  // the engine's other gradients, raw ones
    layout.add(2, erase_width(problem));
    layout.add(3, dv);  // and d_y
    layout.add(std::max(dk, dv));
    layout.add(problem.decay_width + 2 * problem.gate_width);
    layout.add(problem.rate_width + problem.skip_width + 1);
    layout.add(problem.slot, dk, 1 + problem.rows_per_token);  // sums over the group: q, k
    layout.add(problem.slot, dk, 2 * problem.rows_per_token);  // a, b
    layout.finish_line();
    return layout;
  }

  BackwardWorker(const LinearBackwardProblem& problem, double* workspace, double* sums)
      : BackwardWorker(problem, Scratch(workspace), sums) {}

  // All value heads that read one key head, so that its gradients are complete here.
  void run(std::int64_t n, std::int64_t key_head) {
    const TokenRange tokens = problem_.tokens(n);
    const std::int64_t dk = problem_.head_dim_k;
    for (const GroupSum& group : groups_) {
      std::fill_n(group.sums, tokens.length * rows_of(group) * dk, 0.0);
    }
    const std::int64_t group = problem_.num_heads_v / problem_.num_heads_k;
    for (std::int64_t head = key_head * group; head < (key_head + 1) * group; ++head) {
      run_head(n, tokens, head);
    }
    for (const GroupSum& sum : groups_) {
      const std::int64_t each = rows_of(sum);
      for (std::int64_t row = 0; row < tokens.length * each; ++row) {
        store(*sum.to, tokens.batch, tokens.begin * each + row, key_head, dk, sum.sums + row * dk);
      }
    }
  }

 private:
  BackwardWorker(const LinearBackwardProblem& problem, Scratch scratch, double* sums)
      : problem_(problem),
        every_(kept_every(problem) * problem.rows_per_token),
        state_size_(state_doubles(problem)),
        rows_(problem, scratch.take(LinearRows::doubles(problem, problem.slot)), problem.slot),
        kept_(scratch.take(kept_states(problem), state_size_)),
        states_(scratch.take(every_ + 1, state_size_)),
        d_state_(scratch.take(state_size_)),
        reads_(scratch.take(every_, value_width(problem))),
        d_read_(scratch.take(value_width(problem))),
        step_(step_of(problem, scratch.take(scratch_doubles(problem)))),
        d_y_(scratch.take(problem.head_dim_v)),
        sums_(sums) {
    const std::int64_t dk = problem.head_dim_k;
    for (double** part :
         {&gradient_.q, &gradient_.k, &gradient_.b, &gradient_.u, &raw_.q, &raw_.k, &raw_.u}) {
      *part = scratch.take(dk);
    }
    gradient_.e = scratch.take(erase_width(problem));
    raw_.a = scratch.take(erase_width(problem));
    gradient_.x = scratch.take(value_width(problem));
    gradient_.write = scratch.take(1);
    gradient_.alpha = scratch.take(problem.decay_width);
    raw_.gate = scratch.take(problem.gate_width);
    raw_.dt_bias = scratch.take(problem.gate_width);
    raw_.rate = scratch.take(problem.rate_width);
    raw_.v = scratch.take(problem.head_dim_v);
    raw_.z = scratch.take(problem.head_dim_v);
    raw_.b = scratch.take(std::max(dk, problem.head_dim_v));
    raw_.skip = scratch.take(problem.skip_width);
    const LinearTensors& out = problem.gradients;
    groups_[0] = {&out.q, scratch.take(problem.slot, dk)};
    groups_[1] = {&out.k, scratch.take(problem.slot * problem.rows_per_token, dk)};
    const bool shared =
        problem.traits.erase == EraseForm::other_keys || problem.traits.erase == EraseForm::given;
    groups_[2] = {shared ? &out.a : &kUnwanted, scratch.take(problem.slot, dk)};
    groups_[3] = {shared ? &out.b : &kUnwanted, scratch.take(problem.slot, dk)};
  }

  std::int64_t rows_of(const GroupSum& group) const {
    return group.to == &problem_.gradients.k ? problem_.rows_per_token : 1;
  }

  double* state(std::int64_t index) { return states_ + index * state_size_; }
  double* kept(std::int64_t index) { return kept_ + index * state_size_; }

  void run_head(std::int64_t n, const TokenRange& tokens, std::int64_t head) {
    const LinearEngineFunctions engine = functions_of(problem_);
    const std::int64_t width = value_width(problem_);
    const std::int64_t count = tokens.length * problem_.rows_per_token;
    rows_.begin(tokens, head, load_stabiliser(problem_, problem_.initial_state, n, head));

    double* before = state(0);
    double* now = state(1);
    load_state(problem_, problem_.initial_state, n, head, before);
    for (std::int64_t index = 0; index < count; ++index) {
      if (index % every_ == 0) std::copy_n(before, state_size_, kept(index / every_));
      engine.forward(step_, rows_.load(index), before, now, reads_);
      std::swap(before, now);
    }

    load_state(problem_, problem_.d_final_state, n, head, d_state_);
    const std::int64_t chunks = (count + every_ - 1) / every_;
    for (std::int64_t chunk = chunks - 1; chunk >= 0; --chunk) {
      const std::int64_t begin = chunk * every_;
      const std::int64_t rows = std::min(every_, count - begin);
      std::copy_n(kept(chunk), state_size_, state(0));
      for (std::int64_t i = 0; i < rows; ++i) {
        engine.forward(step_, rows_.load(begin + i), state(i), state(i + 1), reads_ + i * width);
      }
      for (std::int64_t i = rows - 1; i >= 0; --i) {
        const EngineRow& row = rows_.load(begin + i);
        rows_.clear(raw_);
        if (row.reads) {
          const std::int64_t token = tokens.begin + (begin + i) / problem_.rows_per_token;
          load_row(problem_.d_o, tokens.batch, token, head, problem_.head_dim_v, d_y_);
          rows_.pull_read(reads_ + i * width, d_y_, d_read_, raw_);
        }
        engine.reverse(step_, row, state(i), state(i + 1), d_read_, d_state_, gradient_);
        rows_.pull_row(gradient_, raw_);
        emit(n, tokens, begin + i, head);
      }
    }
    store_initial_gradient(n, head);
  }

  // `index`: of the row in its sequence.
  void emit(std::int64_t n, const TokenRange& tokens, std::int64_t index, std::int64_t head) {
    const LinearTensors& out = problem_.gradients;
    const std::int64_t each = problem_.rows_per_token;
    const std::int64_t dk = problem_.head_dim_k;
    const std::int64_t dv = problem_.head_dim_v;
    const std::int64_t token = tokens.begin + index / each;
    const std::int64_t row = tokens.begin * each + index;
    const double* parts[] = {raw_.q, raw_.k, raw_.a, raw_.b};
    for (std::size_t g = 0; g < groups_.size(); ++g) {
      if (!groups_[g].to->wanted) continue;
      double* sum = groups_[g].sums + (rows_of(groups_[g]) == each ? index : index / each) * dk;
      for (std::int64_t d = 0; d < dk; ++d) sum[d] += parts[g][d];
    }
    // Of value heads: stored as they come.
    if (problem_.traits.erase == EraseForm::channels) {
      store(out.a, tokens.batch, row, head, dk, raw_.a);
      store(out.b, tokens.batch, row, head, dv, raw_.b);
    } else if (problem_.traits.erase == EraseForm::slots) {
      store(out.a, tokens.batch, row, head, problem_.num_slots, raw_.a);
    }
    store(out.v, tokens.batch, row, head, dv, raw_.v);
    store(out.z, tokens.batch, row, head, dv, raw_.z);
    store(out.beta, tokens.batch, row, head, 1, &raw_.beta);
    const ConstantSums at(problem_);
    double* sums = sums_ + (n * problem_.num_heads_v + head) * at.width;
    if (problem_.gate_per_head) {
      sums[at.gate] += raw_.gate[0];
    } else if (index % each == 0) {
      store(out.gate, tokens.batch, token, head, problem_.gate_width, raw_.gate);
    }
    add(out.rate, raw_.rate, problem_.rate_width, sums + at.rate);
    add(out.dt_bias, raw_.dt_bias, problem_.gate_width, sums + at.dt_bias);
    add(out.skip, raw_.skip, problem_.skip_width, sums + at.skip);
    add(out.u, raw_.u, dk, sums + at.u);
  }

  static void add(const RowsView& to, const double* from, std::int64_t count, double* sums) {
    for (std::int64_t d = 0; to.wanted && d < count; ++d) sums[d] += from[d];
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

  static constexpr RowsView kUnwanted{};

  const LinearBackwardProblem& problem_;
  std::int64_t every_;  // rows between kept states
  std::int64_t state_size_;
  LinearRows rows_;
  double* kept_;
  double* states_;
  double* d_state_;
  double* reads_;
  double* d_read_;
  LinearStep step_;
  double* d_y_;
  std::array<GroupSum, 4> groups_;
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
  store_constant(problem, out.rate, sums, at.rate, problem.rate_width, at.width);
  store_constant(problem, out.dt_bias, sums, at.dt_bias, problem.gate_width, at.width);
  store_constant(problem, out.skip, sums, at.skip, problem.skip_width, at.width);
  store_constant(problem, out.u, sums, at.u, problem.head_dim_k, at.width);
  const std::int64_t hk = problem.num_heads_k;
  const std::int64_t hv = problem.num_heads_v;
  const std::int64_t dk = problem.head_dim_k;
  const std::int64_t dv = problem.head_dim_v;
  const std::int64_t each = problem.rows_per_token;
  const bool channels = problem.traits.erase == EraseForm::channels;
  const bool slots = problem.traits.erase == EraseForm::slots;
  clear_slack(problem, out.q, hk, dk);
  clear_slack(problem, out.k, hk, dk, each);
  clear_slack(problem, out.v, hv, dv, each);
  clear_slack(problem, out.beta, hv, 1, each);
  clear_slack(problem, out.a, channels || slots ? hv : hk, slots ? problem.num_slots : dk);
  clear_slack(problem, out.b, channels ? hv : hk, channels ? dv : dk);
  clear_slack(problem, out.z, hv, dv);
  if (!problem.gate_per_head) clear_slack(problem, out.gate, hv, problem.gate_width);
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
