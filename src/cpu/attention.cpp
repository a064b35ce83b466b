#include "cpu/attention.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <string_view>

#include "core/ceil_div.hpp"
#include "core/thread_pool.hpp"
#include "cpu/attention_host.hpp"

namespace onchip::cpu {

namespace {

constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();
constexpr std::int64_t kMinTaskRows = 32;
constexpr double kMaxPartsBytes = 32.0 * 1024.0 * 1024.0;

// Which of the plan's words says what.
enum Word : std::size_t {
  kIsa,
  kWorkers,
  kTaskRows,
  kScratchBytes,
  kTableBytes,
  kTaskParts,  // that the keys of a task are computed in, each by itself; 0: all by one worker
  kPartBytes,
};

Isa planned_isa(const BackendPlan& plan) { return static_cast<Isa>(plan.words[kIsa]); }

std::int32_t planned_workers(const BackendPlan& plan) {
  return static_cast<std::int32_t>(plan.words[kWorkers]);
}

// ---- forward ------------------------------------------------------------------------------------

// Packed rows are there even without any sequence: all of them are slack then.
bool has_output(const AttentionForwardProblem& problem) {
  return (problem.packed || problem.num_seqs > 0) && problem.slot_q > 0 &&
         problem.num_heads_q > 0 && (problem.head_dim_v > 0 || problem.lse.wanted);
}

// fp64 numbers can be beyond the range of the fp32 arithmetic of other inputs. A bias is too large
// to look for them.
bool has_wide_bias(const AttentionForwardProblem& problem) {
  const ScoresView& bias = problem.options.bias;
  return problem.dtype != DType::f64 && bias.wanted && bias.dtype == DType::f64;
}

bool may_be_wide(const AttentionForwardProblem& problem) {
  const auto is_f64 = [](const HeadScalarsView& scalars) {
    return scalars.wanted && scalars.dtype == DType::f64;
  };
  return has_wide_bias(problem) ||
         (problem.dtype != DType::f64 &&
          (is_f64(problem.options.sink) || is_f64(problem.options.alibi_slopes)));
}

// Whether one of the numbers of query heads [head, head + count) is beyond fp32.
bool any_wide(const HeadScalarsView& scalars, std::int64_t sequence, std::int64_t head,
              std::int64_t count) {
  if (!scalars.wanted || scalars.dtype != DType::f64) return false;
  for (std::int64_t h = head; h < head + count; ++h) {
    const double x = std::fabs(load_as_double(scalars.at(sequence, h), scalars.dtype));
    if (x > double{std::numeric_limits<float>::max()} && std::isfinite(x)) return true;
  }
  return false;
}

bool is_wide(const AttentionForwardProblem& problem, std::int64_t n, std::int64_t kv_head) {
  const std::int64_t group = group_size(problem);
  return has_wide_bias(problem) ||
         (problem.dtype != DType::f64 &&
          (any_wide(problem.options.sink, n, kv_head * group, group) ||
           any_wide(problem.options.alibi_slopes, n, kv_head * group, group)));
}

ForwardShape forward_shape(const AttentionForwardProblem& problem) {
  const AttentionOptions& options = problem.options;
  ForwardShape shape;
  shape.dtype = problem.dtype;
  shape.seqlen_kv = problem.slot_kv;
  shape.wide = may_be_wide(problem);
  shape.head_dim_qk = problem.head_dim_qk;
  shape.head_dim_v = problem.head_dim_v;
  shape.adjusts_scores = options.bias.wanted || options.mask.wanted ||
                         options.alibi_slopes.wanted || options.q_segment_ids.wanted;
  shape.dropout = options.dropout_p > 0.0;
  // Long tasks read K and V less often. But their Q and O have to stay in the outer private cache,
  // and every thread needs a few of them.
  constexpr std::int64_t kMaxElements = std::int64_t{1} << 16;
  const std::int64_t width = shape.head_dim_qk + shape.head_dim_v;
  const std::int64_t rows = problem.slot_q * group_size(problem);
  const std::int64_t lists =
      problem.num_heads_kv * (problem.packed ? 1 : problem.num_seqs);  // of rows
  const auto too_long = [&](std::int64_t task_rows) {
    return task_rows * width > kMaxElements ||
           ceil_div(rows, task_rows) * lists < 4 * std::int64_t{num_threads()};
  };
  while (shape.task_rows > kMinTaskRows && too_long(shape.task_rows)) shape.task_rows /= 2;
  return shape;
}

// For each sequence the number of the tasks before it: first_task[num_seqs] is the number of all.
class TaskTable {
 public:
  TaskTable(const AttentionForwardProblem& problem, std::int64_t task_rows, std::byte* memory)
      : problem_(problem),
        task_rows_(task_rows),
        first_task_(reinterpret_cast<std::int64_t*>(memory)) {
    std::int64_t count = 0;
    for (std::int64_t n = 0; n < problem.num_seqs; ++n) {
      first_task_[n] = count;
      count += problem.num_heads_kv * blocks(problem.sequence(n));
    }
    first_task_[problem.num_seqs] = count;
  }

  static std::size_t bytes(const AttentionForwardProblem& problem) {
    return rounded_up(static_cast<std::size_t>(problem.num_seqs + 1) * sizeof(std::int64_t));
  }

  std::int64_t count() const { return first_task_[problem_.num_seqs]; }

  ForwardTask task(std::int64_t index) const;

 private:
  std::int64_t group_rows(const SequenceRange& s) const { return s.q_len * group_size(problem_); }
  std::int64_t blocks(const SequenceRange& s) const { return ceil_div(group_rows(s), task_rows_); }

  const AttentionForwardProblem& problem_;
  std::int64_t task_rows_;
  std::int64_t* first_task_;
};

ForwardTask TaskTable::task(std::int64_t index) const {
  const std::int64_t* next = std::upper_bound(first_task_, first_task_ + problem_.num_seqs, index);
  const std::int64_t n = next - first_task_ - 1;
  const SequenceRange s = problem_.sequence(n);
  const std::int64_t in_sequence = index - first_task_[n];
  const std::int64_t num_blocks = blocks(s);
  const std::int64_t kv_head = in_sequence / num_blocks;
  // Under a causal mask the last rows see most keys: they go first, and the ends of threads meet.
  const std::int64_t block = num_blocks - 1 - in_sequence % num_blocks;

  ForwardTask task = attention_task(problem_, n, s, kv_head);
  task.wide = is_wide(problem_, n, kv_head);
  task.row_begin = block * task_rows_;
  task.row_end = std::min(task.row_begin + task_rows_, group_rows(s));
  return task;
}

void clear_slack(const AttentionForwardProblem& problem) {
  const auto row_bytes = static_cast<std::size_t>(problem.head_dim_v * dtype_size(problem.dtype));
  for_each_slack(problem, RowAxis::q,
                 [&](std::int64_t batch, std::int64_t begin, std::int64_t end) {
                   for (std::int64_t row = begin; row < end; ++row) {
                     for (std::int64_t head = 0; head < problem.num_heads_q; ++head) {
                       if (row_bytes > 0) std::memset(problem.o.at(batch, row, head), 0, row_bytes);
                       if (problem.lse.wanted) {
                         store_from_double(problem.lse.at(batch, row, head), problem.lse.dtype,
                                           kMinusInfinity);
                       }
                     }
                   }
                 });
}

}  // namespace

PlanResult plan_attention_forward(const AttentionForwardProblem& problem,
                                  const Settings& settings) {
  if (auto refusal = attention_refusal(problem, settings)) return *refusal;
  const IsaChoice choice = choose_isa(settings);
  if (!choice.problem.empty()) return Reject{choice.problem, true};
  const Unit unit = unit_of(choice.isa);
  BackendPlan plan;
  plan.kernel = has_wide_bias(problem) ? unit.forward_wide_name : unit.forward_name;
  plan.words[kIsa] = static_cast<std::uint64_t>(choice.isa);
  if (!has_output(problem)) return plan;
  ForwardShape shape = forward_shape(problem);

  // From shapes alone: the lengths may have changed when the plan is run. More workers than tasks
  // would only cost memory.
  const std::int64_t rows = problem.slot_q * group_size(problem);
  const std::int64_t per_head = problem.packed ? ceil_div(rows, shape.task_rows) + problem.num_seqs
                                               : ceil_div(rows, shape.task_rows) * problem.num_seqs;
  const std::int64_t tasks = per_head * problem.num_heads_kv;
  std::size_t scratch = rounded_up(unit.forward_scratch_bytes(shape));
  std::size_t part = unit.forward_part_bytes(shape);
  if (shape.wide) {
    // Sized for either arithmetic: which one a task takes depends on values.
    shape.wide = false;
    scratch = std::max(scratch, rounded_up(unit.forward_scratch_bytes(shape)));
    part = std::max(part, unit.forward_part_bytes(shape));
  }
  part = rounded_up(part);
  // Few rows and many keys: workers share the keys of a task. How they do shows in no bit.
  std::int64_t parts = 0;
  const std::int64_t chunks = ceil_div(problem.slot_kv, kChunkKeys);
  if (chunks > 1 && num_threads() > 1 && tasks < 4 * std::int64_t{num_threads()} &&
      static_cast<double>(tasks * chunks) * static_cast<double>(part) <= kMaxPartsBytes) {
    parts = chunks;
  }
  const std::int32_t workers = workers_for(tasks * std::max<std::int64_t>(parts, 1));

  plan.words[kWorkers] = static_cast<std::uint64_t>(workers);
  plan.words[kTaskRows] = static_cast<std::uint64_t>(shape.task_rows);
  plan.words[kScratchBytes] = scratch;
  plan.words[kTableBytes] = TaskTable::bytes(problem);
  plan.words[kTaskParts] = static_cast<std::uint64_t>(parts);
  plan.words[kPartBytes] = part;
  plan.workspace_bytes = plan.words[kTableBytes] + static_cast<std::size_t>(workers) * scratch +
                         static_cast<std::size_t>(tasks * parts) * part;
  plan.workspace_alignment = kScratchAlignment;
  return plan;
}

PlanResult plan_attention_forward(const AttentionForwardProblem& problem) {
  return plan_attention_forward(problem, settings());
}

void run_attention_forward(const BackendPlan& plan, const AttentionForwardProblem& problem,
                           const RunContext& context) {
  if (!has_output(problem)) return;
  const Unit unit = unit_of(planned_isa(plan));
  const TaskTable tasks(problem, static_cast<std::int64_t>(plan.words[kTaskRows]),
                        context.workspace);
  std::byte* scratch = context.workspace + plan.words[kTableBytes];
  const std::size_t scratch_bytes = plan.words[kScratchBytes];
  const std::int32_t workers = planned_workers(plan);
  const auto scratch_of = [&](std::int32_t worker) {
    return scratch + static_cast<std::size_t>(worker) * scratch_bytes;
  };
  const auto num_parts = static_cast<std::int64_t>(plan.words[kTaskParts]);
  if (num_parts == 0) {
    parallel_for(tasks.count(), workers, [&](std::int64_t index, std::int32_t worker) {
      unit.forward(tasks.task(index), scratch_of(worker));
    });
  } else {
    const std::size_t part_bytes = plan.words[kPartBytes];
    std::byte* parts = scratch_of(workers);
    const auto part_of = [&](std::int64_t index, std::int64_t chunk) {
      return parts + static_cast<std::size_t>(index * num_parts + chunk) * part_bytes;
    };
    parallel_for(tasks.count() * num_parts, workers, [&](std::int64_t at, std::int32_t worker) {
      const std::int64_t index = at / num_parts;
      const std::int64_t chunk = at % num_parts;
      unit.forward_part(tasks.task(index), chunk, part_of(index, chunk), scratch_of(worker));
    });
    parallel_for(tasks.count(), workers, [&](std::int64_t index, std::int32_t) {
      unit.forward_join(tasks.task(index), part_of(index, 0), part_bytes);
    });
  }
  clear_slack(problem);
}

// ---- merge --------------------------------------------------------------------------------------

namespace {

constexpr std::int64_t kMergeRows = 64;  // of one head, a task

void merge_row(const Unit& unit, const AttentionMergeProblem& problem, std::int64_t batch,
               std::int64_t row, std::int64_t head) {
  const double lse1 = load_as_double(problem.lse1.at(batch, row, head), problem.lse1.dtype);
  const double lse2 = load_as_double(problem.lse2.at(batch, row, head), problem.lse2.dtype);
  MergeRow parts;
  parts.o = problem.o.at(batch, row, head);
  parts.o1 = problem.o1.at(batch, row, head);
  parts.o2 = problem.o2.at(batch, row, head);
  parts.has1 = lse1 != kMinusInfinity;
  parts.has2 = lse2 != kMinusInfinity;
  double lse = parts.has1 ? lse1 : lse2;
  if (parts.has1 && parts.has2) {
    const double greater = lse1 < lse2 ? lse2 : lse1;
    lse = greater + std::log(std::exp(lse1 - greater) + std::exp(lse2 - greater));
  }
  if (parts.has1) parts.weight1 = std::exp(lse1 - lse);
  if (parts.has2) parts.weight2 = std::exp(lse2 - lse);
  unit.merge_row(problem.dtype, problem.head_dim, parts);
  if (problem.lse.wanted) {
    store_from_double(problem.lse.at(batch, row, head), problem.lse.dtype, lse);
  }
}

}  // namespace

PlanResult plan_attention_merge(const AttentionMergeProblem& problem, const Settings& settings) {
  if (const std::string_view reason = unsupported(problem); !reason.empty()) {
    return Reject{std::string(reason)};
  }
  if (const std::string& reason = settings.num_threads_problem; !reason.empty()) {
    return Reject{reason, true};
  }
  const IsaChoice choice = choose_isa(settings);
  if (!choice.problem.empty()) return Reject{choice.problem, true};
  BackendPlan plan;
  plan.kernel = unit_of(choice.isa).merge_name;
  plan.words[kIsa] = static_cast<std::uint64_t>(choice.isa);
  plan.words[kWorkers] = static_cast<std::uint64_t>(std::max(num_threads(), 1));
  return plan;
}

PlanResult plan_attention_merge(const AttentionMergeProblem& problem) {
  return plan_attention_merge(problem, settings());
}

void run_attention_merge(const BackendPlan& plan, const AttentionMergeProblem& problem,
                         const RunContext&) {
  const Unit unit = unit_of(planned_isa(plan));
  const std::int64_t blocks = ceil_div(problem.rows, kMergeRows);
  parallel_for(problem.batch * problem.num_heads * blocks, planned_workers(plan),
               [&](std::int64_t task, std::int32_t) {
                 const std::int64_t pair = task / blocks;
                 const std::int64_t begin = task % blocks * kMergeRows;
                 const std::int64_t end = std::min(begin + kMergeRows, problem.rows);
                 for (std::int64_t row = begin; row < end; ++row) {
                   merge_row(unit, problem, pair / problem.num_heads, row,
                             pair % problem.num_heads);
                 }
               });
}

}  // namespace onchip::cpu
