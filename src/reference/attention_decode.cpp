#include "reference/attention_decode.hpp"

#include <algorithm>

#include "core/thread_pool.hpp"
#include "reference/attention_rows.hpp"

namespace onchip::reference {

namespace {

Layout worker_layout(const AttentionDecodeProblem& problem) {
  Layout layout;
  Keys::reserve(problem, problem.room, layout);
  layout.add(2, problem.head_dim_qk);
  layout.add(problem.head_dim_v);
  layout.add(Rotator::scratch(problem.rotary));
  layout.finish_line();
  return layout;
}

// One query head of one sequence.
void attend(const AttentionDecodeProblem& problem, const DecodeSequence& s, std::int64_t head,
            double* memory) {
  Scratch scratch(memory);
  Keys keys(problem, problem.room, scratch);
  double* q_row = scratch.take(problem.head_dim_qk);
  auto* turned = reinterpret_cast<std::byte*>(scratch.take(problem.head_dim_qk));
  double* o_row = scratch.take(problem.head_dim_v);
  Rotator rotator(problem.rotary, scratch.take(Rotator::scratch(problem.rotary)));

  const std::int64_t kv_head = problem.kv_head(head);
  keys.load(
      s.kv_len, [&](std::int64_t j) { return problem.cached_row(problem.k_cache, s, j, kv_head); },
      [&](std::int64_t j) { return problem.cached_row(problem.v_cache, s, j, kv_head); });
  for (std::int64_t i = 0; i < s.q_len; ++i) {
    const std::int64_t at = s.q_begin + i;
    if (s.skipped) {
      store_zeros(problem.o, s.batch, at, head, problem.head_dim_v);
      store_scalar(problem.lse, s.batch, at, head, kMinusInfinity);
      continue;
    }
    const std::byte* q = problem.q.at(s.batch, at, head);
    if (problem.rotary.wanted) {
      rotator.move_to(problem.q_position(s, i));
      rotator.turn(problem.dtype, problem.head_dim_qk, q, turned);
      q = turned;
    }
    load_row(q, problem.dtype, problem.head_dim_qk, q_row);
    const auto pairs = keys.visible_pairs(s.n, s, head, i, q_row);
    const double lse = forward_row(problem, keys, pairs, s.n, head, i, o_row);
    store_row(problem.o, s.batch, at, head, problem.head_dim_v, o_row);
    store_scalar(problem.lse, s.batch, at, head, lse);
  }
}

}  // namespace

PlanResult plan_attention_decode(const AttentionDecodeProblem& problem) {
  if (const char* reason = unsupported_options(problem)) return Reject{reason};
  return plan_with(problem.num_seqs * std::max<std::int64_t>(problem.num_heads_q, 1),
                   worker_layout(problem), Layout{});
}

void run_attention_decode(const BackendPlan& plan, const AttentionDecodeProblem& problem,
                          const RunContext& context) {
  double* workspace = as_doubles(context.workspace);
  const auto worker_doubles = static_cast<std::int64_t>(plan.words[kWorkerDoubles]);
  if (problem.appends()) {
    parallel_for(problem.num_seqs, planned_workers(plan), [&](std::int64_t n, std::int32_t worker) {
      const DecodeSequence s = problem.cached_sequence(n);
      double* scratch = workspace + worker * worker_doubles;
      for (std::int64_t t = 0; t < s.new_len; ++t) append_row(problem, s, t, scratch);
    });
  }
  parallel_for(problem.num_seqs * problem.num_heads_q, planned_workers(plan),
               [&](std::int64_t task, std::int32_t worker) {
                 attend(problem, problem.cached_sequence(task / problem.num_heads_q),
                        task % problem.num_heads_q, workspace + worker * worker_doubles);
               });
  clear_slack_rows(problem, RowAxis::q, problem.o, problem.num_heads_q, problem.head_dim_v);
  clear_slack_lse(problem);
}

}  // namespace onchip::reference
