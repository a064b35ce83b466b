#include "reference/attention.hpp"

#include <algorithm>
#include <cmath>
#include <span>

#include "core/thread_pool.hpp"
#include "reference/attention_rows.hpp"

namespace onchip::reference {

namespace {

void load_keys(const AttentionProblem& problem, const SequenceRange& s, std::int64_t kv_head,
               Keys& keys) {
  keys.load(
      s.kv_len, [&](std::int64_t j) { return problem.k.at(s.batch, s.kv_begin + j, kv_head); },
      [&](std::int64_t j) { return problem.v.at(s.batch, s.kv_begin + j, kv_head); });
}

Layout forward_layout(const AttentionProblem& problem) {
  Layout layout;
  Keys::reserve(problem, problem.slot_kv, layout);
  layout.add(problem.head_dim_qk);
  layout.add(problem.head_dim_v);
  layout.finish_line();
  return layout;
}

// A task is (which sequences, which kv heads). Where dbias is summed over one of these axes, one
// task has all of it: then no two tasks write the same element, and each element's sum has one
// order whatever the number of threads.
struct BackwardTasks {
  std::int64_t sequences = 0;
  std::int64_t kv_heads = 0;
  std::int64_t sequences_each = 0;
  std::int64_t kv_heads_each = 0;

  explicit BackwardTasks(const AttentionBackwardProblem& problem)
      : sequences(problem.num_seqs),
        kv_heads(problem.num_heads_kv),
        sequences_each(1),
        kv_heads_each(1) {
    if (problem.dbias.wanted && problem.dbias_shape[0] == 1) {
      sequences_each = std::max<std::int64_t>(sequences, 1);
    }
    if (problem.dbias.wanted && problem.dbias_shape[1] == 1) {
      kv_heads_each = std::max<std::int64_t>(kv_heads, 1);
    }
  }

  std::int64_t per_sequence_group() const { return kv_heads / kv_heads_each; }
  std::int64_t count() const { return sequences / sequences_each * per_sequence_group(); }
};

std::int64_t dbias_count(const AttentionBackwardProblem& problem) {
  if (!problem.dbias.wanted) return 0;
  const std::int64_t* shape = problem.dbias_shape;
  return shape[0] * shape[1] * shape[2] * shape[3];
}

// A broadcast axis has one index.
std::int64_t dbias_index(const AttentionBackwardProblem& problem, std::int64_t n, std::int64_t head,
                         std::int64_t i, std::int64_t j) {
  const std::int64_t position[4] = {n, head, i, j};
  std::int64_t index = 0;
  for (int axis = 0; axis < 4; ++axis) {
    const std::int64_t extent = problem.dbias_shape[axis];
    index = index * extent + (extent == 1 ? 0 : position[axis]);
  }
  return index;
}

Layout backward_worker_layout(const AttentionBackwardProblem& problem) {
  Layout layout;
  Keys::reserve(problem, problem.slot_kv, layout);
  layout.add(problem.slot_kv, problem.head_dim_qk);  // dk
  layout.add(problem.slot_kv, problem.head_dim_v);   // dv
  layout.add(2, problem.head_dim_qk);                // q and dq rows
  layout.add(2, problem.head_dim_v);                 // o and d_o rows
  layout.finish_line();
  return layout;
}

// Sums that several tasks or rows add to: dbias, and dsink of each (sequence, head).
Layout backward_shared_layout(const AttentionBackwardProblem& problem) {
  Layout layout;
  layout.add(dbias_count(problem));
  if (problem.dsink.wanted) layout.add(problem.num_seqs, problem.num_heads_q);
  layout.finish_line();
  return layout;
}

class BackwardWorker {
 public:
  BackwardWorker(const AttentionBackwardProblem& problem, double* scratch, double* dbias,
                 double* dsink)
      : BackwardWorker(problem, Scratch(scratch), dbias, dsink) {}

  void run(std::int64_t n, std::int64_t kv_head) {
    const SequenceRange s = problem_.sequence(n);
    load_keys(problem_, s, kv_head, keys_);
    std::fill_n(dk_, s.kv_len * problem_.head_dim_qk, 0.0);
    std::fill_n(dv_, s.kv_len * problem_.head_dim_v, 0.0);
    const std::int64_t group = problem_.num_heads_q / problem_.num_heads_kv;
    for (std::int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      for (std::int64_t i = 0; i < s.q_len; ++i) row(n, s, head, i);
    }
    for (std::int64_t j = 0; j < s.kv_len; ++j) {
      const std::int64_t at = s.kv_begin + j;
      if (problem_.dk.wanted) {
        store_row(problem_.dk, s.batch, at, kv_head, problem_.head_dim_qk,
                  dk_ + j * problem_.head_dim_qk);
      }
      if (problem_.dv.wanted) {
        store_row(problem_.dv, s.batch, at, kv_head, problem_.head_dim_v,
                  dv_ + j * problem_.head_dim_v);
      }
    }
  }

 private:
  BackwardWorker(const AttentionBackwardProblem& problem, Scratch scratch, double* dbias,
                 double* dsink)
      : problem_(problem),
        keys_(problem, problem.slot_kv, scratch),
        dk_(scratch.take(problem.slot_kv, problem.head_dim_qk)),
        dv_(scratch.take(problem.slot_kv, problem.head_dim_v)),
        q_row_(scratch.take(problem.head_dim_qk)),
        dq_row_(scratch.take(problem.head_dim_qk)),
        o_row_(scratch.take(problem.head_dim_v)),
        d_o_row_(scratch.take(problem.head_dim_v)),
        dbias_(dbias),
        dsink_(dsink) {}

  void row(std::int64_t n, const SequenceRange& s, std::int64_t head, std::int64_t i) {
    const std::int64_t at = s.q_begin + i;
    const std::int64_t dim_qk = problem_.head_dim_qk;
    const std::int64_t dim_v = problem_.head_dim_v;
    load_row(problem_.q, s.batch, at, head, dim_qk, q_row_);
    load_row(problem_.o, s.batch, at, head, dim_v, o_row_);
    load_row(problem_.d_o, s.batch, at, head, dim_v, d_o_row_);
    const double lse = load_as_double(problem_.lse.at(s.batch, at, head), problem_.lse.dtype);
    const double d_lse =
        problem_.d_lse.wanted
            ? load_as_double(problem_.d_lse.at(s.batch, at, head), problem_.d_lse.dtype)
            : 0.0;
    std::fill_n(dq_row_, dim_qk, 0.0);

    std::span<const Pair> pairs = keys_.visible_pairs(n, s, head, i, q_row_);
    double sink = sink_logit(problem_, n, head);
    // Where lse is -inf, nothing has a weight.
    if (lse == kMinusInfinity) {
      pairs = {};
      sink = kMinusInfinity;
    }
    // In the order of dP: a row with all its weight on one key has dS exactly 0. dO of a row that
    // sees no key has no influence, whatever it holds; o may still be non-zero where it is the
    // result over more keys than these.
    double delta = pairs.empty() ? 0.0 : dot(d_o_row_, o_row_, dim_v);
    for (std::int64_t d = 0; d < dim_v && pairs.empty(); ++d) {
      if (o_row_[d] != 0.0) delta += d_o_row_[d] * o_row_[d];
    }

    for (const Pair& pair : pairs) {
      const double p = std::exp(pair.logit - lse);
      const double kept = kept_scale(problem_, n, head, i, pair.j);
      const double dp = kept * dot(d_o_row_, keys_.v(pair.j), dim_v);
      double ds = p * (dp - delta + d_lse);
      if (problem_.dbias.wanted) dbias_[dbias_index(problem_, n, head, i, pair.j)] += ds;
      ds *= pair.softcap_slope * problem_.options.scale;
      add_scaled(ds, keys_.k(pair.j), dim_qk, dq_row_);
      add_scaled(ds, q_row_, dim_qk, dk_ + pair.j * dim_qk);
      add_scaled(p * kept, d_o_row_, dim_v, dv_ + pair.j * dim_v);
    }
    if (problem_.dsink.wanted && sink != kMinusInfinity) {
      dsink_[n * problem_.num_heads_q + head] += std::exp(sink - lse) * (d_lse - delta);
    }
    if (problem_.dq.wanted) store_row(problem_.dq, s.batch, at, head, dim_qk, dq_row_);
  }

  const AttentionBackwardProblem& problem_;
  Keys keys_;
  double* dk_;
  double* dv_;
  double* q_row_;
  double* dq_row_;
  double* o_row_;
  double* d_o_row_;
  double* dbias_;
  double* dsink_;
};

void store_dbias(const AttentionBackwardProblem& problem, const double* sums) {
  const std::int64_t* shape = problem.dbias_shape;
  for (std::int64_t n = 0; n < shape[0]; ++n) {
    for (std::int64_t head = 0; head < shape[1]; ++head) {
      for (std::int64_t i = 0; i < shape[2]; ++i) {
        for (std::int64_t j = 0; j < shape[3]; ++j) {
          store_from_double(problem.dbias.at(n, head, i, j), problem.dbias.dtype, *sums++);
        }
      }
    }
  }
}

void store_dsink(const AttentionBackwardProblem& problem, const double* sums) {
  for (std::int64_t head = 0; head < problem.num_heads_q; ++head) {
    double total = 0.0;
    for (std::int64_t n = 0; n < problem.num_seqs; ++n) {
      total += sums[n * problem.num_heads_q + head];
    }
    store_from_double(problem.dsink.at(0, head), problem.dsink.dtype, total);
  }
}

}  // namespace

PlanResult plan_attention_forward(const AttentionForwardProblem& problem) {
  if (const char* reason = unsupported_options(problem)) return Reject{reason};
  return plan_with(problem.num_seqs * problem.num_heads_q, forward_layout(problem), Layout{});
}

void run_attention_forward(const BackendPlan& plan, const AttentionForwardProblem& problem,
                           const RunContext& context) {
  double* workspace = as_doubles(context.workspace);
  const auto worker_doubles = static_cast<std::int64_t>(plan.words[kWorkerDoubles]);
  parallel_for(problem.num_seqs * problem.num_heads_q, planned_workers(plan),
               [&](std::int64_t task, std::int32_t worker) {
                 const std::int64_t n = task / problem.num_heads_q;
                 const std::int64_t head = task % problem.num_heads_q;
                 Scratch scratch(workspace + worker * worker_doubles);
                 Keys keys(problem, problem.slot_kv, scratch);
                 double* q_row = scratch.take(problem.head_dim_qk);
                 double* o_row = scratch.take(problem.head_dim_v);

                 const SequenceRange s = problem.sequence(n);
                 load_keys(problem, s, problem.kv_head(head), keys);
                 for (std::int64_t i = 0; i < s.q_len; ++i) {
                   const std::int64_t at = s.q_begin + i;
                   load_row(problem.q, s.batch, at, head, problem.head_dim_qk, q_row);
                   const auto pairs = keys.visible_pairs(n, s, head, i, q_row);
                   const double lse = forward_row(problem, keys, pairs, n, head, i, o_row);
                   store_row(problem.o, s.batch, at, head, problem.head_dim_v, o_row);
                   store_scalar(problem.lse, s.batch, at, head, lse);
                 }
               });
  clear_slack_rows(problem, RowAxis::q, problem.o, problem.num_heads_q, problem.head_dim_v);
  clear_slack_lse(problem);
}

PlanResult plan_attention_backward(const AttentionBackwardProblem& problem) {
  if (const char* reason = unsupported_options(problem)) return Reject{reason};
  return plan_with(BackwardTasks(problem).count(), backward_worker_layout(problem),
                   backward_shared_layout(problem));
}

void run_attention_backward(const BackendPlan& plan, const AttentionBackwardProblem& problem,
                            const RunContext& context) {
  const auto worker_doubles = static_cast<std::int64_t>(plan.words[kWorkerDoubles]);
  double* shared = as_doubles(context.workspace);
  double* workers = shared + plan.words[kSharedDoubles];
  std::fill_n(shared, plan.words[kSharedDoubles], 0.0);
  double* dbias = shared;
  double* dsink = shared + dbias_count(problem);

  const BackwardTasks tasks(problem);
  parallel_for(tasks.count(), planned_workers(plan), [&](std::int64_t task, std::int32_t worker) {
    const std::int64_t sequence_group = task / tasks.per_sequence_group();
    const std::int64_t head_group = task % tasks.per_sequence_group();
    BackwardWorker backward(problem, workers + worker * worker_doubles, dbias, dsink);
    for (std::int64_t x = 0; x < tasks.sequences_each; ++x) {
      for (std::int64_t y = 0; y < tasks.kv_heads_each; ++y) {
        backward.run(sequence_group * tasks.sequences_each + x,
                     head_group * tasks.kv_heads_each + y);
      }
    }
  });
  if (problem.dbias.wanted) store_dbias(problem, dbias);
  if (problem.dsink.wanted) store_dsink(problem, dsink);
  clear_slack_rows(problem, RowAxis::q, problem.dq, problem.num_heads_q, problem.head_dim_qk);
  clear_slack_rows(problem, RowAxis::kv, problem.dk, problem.num_heads_kv, problem.head_dim_qk);
  clear_slack_rows(problem, RowAxis::kv, problem.dv, problem.num_heads_kv, problem.head_dim_v);
}

PlanResult plan_attention_merge(const AttentionMergeProblem& problem) {
  if (const char* reason = unsupported(problem)) return Reject{reason};
  return plan_with(problem.batch * problem.num_heads, Layout{}, Layout{});
}

void run_attention_merge(const BackendPlan& plan, const AttentionMergeProblem& problem,
                         const RunContext&) {
  const auto merge_row = [&problem](std::int64_t batch, std::int64_t row, std::int64_t head) {
    const double lse1 = load_as_double(problem.lse1.at(batch, row, head), problem.lse1.dtype);
    const double lse2 = load_as_double(problem.lse2.at(batch, row, head), problem.lse2.dtype);
    const bool empty1 = lse1 == kMinusInfinity;
    const bool empty2 = lse2 == kMinusInfinity;
    double lse = kMinusInfinity;
    if (empty1 || empty2) {
      lse = empty1 ? lse2 : lse1;
    } else {
      const double larger = lse1 < lse2 ? lse2 : lse1;
      lse = larger + std::log(std::exp(lse1 - larger) + std::exp(lse2 - larger));
    }
    const double weight1 = empty1 ? 0.0 : std::exp(lse1 - lse);
    const double weight2 = empty2 ? 0.0 : std::exp(lse2 - lse);
    store_scalar(problem.lse, batch, row, head, lse);
    const std::byte* o1 = problem.o1.at(batch, row, head);
    const std::byte* o2 = problem.o2.at(batch, row, head);
    std::byte* o = problem.o.at(batch, row, head);
    for (std::int64_t d = 0; d < problem.head_dim; ++d) {
      const std::int64_t offset = d * dtype_size(problem.dtype);
      double value = 0.0;
      // An empty part has no influence, whatever its row holds.
      if (!empty1) value += weight1 * load_as_double(o1 + offset, problem.dtype);
      if (!empty2) value += weight2 * load_as_double(o2 + offset, problem.dtype);
      store_from_double(o + offset, problem.dtype, value);
    }
  };
  parallel_for(problem.batch * problem.num_heads, planned_workers(plan),
               [&](std::int64_t task, std::int32_t) {
                 for (std::int64_t row = 0; row < problem.rows; ++row) {
                   merge_row(task / problem.num_heads, row, task % problem.num_heads);
                 }
               });
}

}  // namespace onchip::reference
