// delta_rule's forward and step: how the work is cut. A task is a (sequence, value head), its
// chunks in order. Where that leaves threads idle, windows of chunks are computed side by side
// (linear_delta_windows.hpp), or, for a few rows, columns of a head: the bits are the same.
#include <algorithm>
#include <cstring>

#include "core/ceil_div.hpp"
#include "core/thread_pool.hpp"
#include "cpu/linear_delta_host.hpp"
#include "cpu/linear_delta_windows.hpp"
#include "cpu/linear_engines.hpp"

namespace onchip::cpu {

namespace {

// Columns of a slice at least: the triangular systems are the same for all columns, and made anew
// by each slice.
constexpr std::int64_t kSliceColumns = 32;

enum Word : std::size_t {
  kIsa,
  kWorkers,
  kScratchBytes,  // of a worker
  kSlices,        // of a head's columns
  kWindow,        // chunks side by side; 0: in order
};

std::int64_t heads_of(const LinearProblem& problem) {
  return problem.num_seqs * problem.num_heads_v;
}

template <typename Problem>
PlanResult plan_delta(const Problem& problem, const Settings& settings, const DeltaCut& cut,
                      const char* DeltaUnit::* name) {
  const LinearRefusal refusal = refuse_linear(problem, settings);
  if (!refusal.reason.empty()) return Reject{refusal.reason, refusal.by_setting};
  const IsaChoice choice = choose_isa(settings);
  if (!choice.problem.empty()) return Reject{choice.problem, true};
  const DeltaUnit unit = delta_unit(choice.isa);
  const DeltaShape shape = delta_shape(problem);
  const std::int64_t tasks = heads_of(problem) * std::max(cut.slices, cut.window);
  const auto workers =
      static_cast<std::int32_t>(std::clamp<std::int64_t>(tasks, 1, std::max(num_threads(), 1)));
  BackendPlan plan;
  plan.kernel = unit.*name;
  plan.words[kIsa] = static_cast<std::uint64_t>(choice.isa);
  plan.words[kWorkers] = static_cast<std::uint64_t>(workers);
  plan.words[kScratchBytes] = linear_rounded_up(unit.state_bytes(shape)) +
                              linear_rounded_up(unit.forward_scratch_bytes(shape));
  plan.words[kSlices] = static_cast<std::uint64_t>(cut.slices);
  plan.words[kWindow] = static_cast<std::uint64_t>(cut.window);
  plan.workspace_bytes =
      cut.window > 0
          ? DeltaWindows(problem, unit, cut, heads_of(problem), unit.forward_scratch_bytes(shape))
                .bytes()
          : static_cast<std::size_t>(workers) * plan.words[kScratchBytes];
  plan.workspace_alignment = kLinearAlignment;
  return plan;
}

DeltaCut columns_alone(const LinearProblem& problem) {
  const std::int64_t heads = std::max<std::int64_t>(heads_of(problem), 1);
  const std::int64_t threads = std::max(num_threads(), 1);
  const std::int64_t most = std::max<std::int64_t>(problem.head_dim_v / kSliceColumns, 1);
  return {0, heads >= threads ? 1 : std::min(ceil_div(threads, heads), most)};
}

// Columns begin .. of rows, states and outputs, as if there were no others.
struct Columns {
  std::int64_t begin = 0;
  std::int64_t count = 0;

  UnitRow of(UnitRow rows, DType dtype) const {
    if (rows.data != nullptr) rows.data += begin * dtype_size(dtype);
    return rows;
  }
  UnitState of(UnitState state) const {
    if (state.data != nullptr) state.data += begin * state.column_stride;
    return state;
  }
};

class DeltaHeads {
 public:
  DeltaHeads(const BackendPlan& plan, const LinearProblem& problem, const RowsView& o)
      : unit_(delta_unit(static_cast<Isa>(plan.words[kIsa]))),
        problem_(problem),
        o_(o),
        shape_(delta_shape(problem)),
        slices_(static_cast<std::int64_t>(plan.words[kSlices])) {}

  void run(const TokenRange& tokens, std::int64_t head, std::int64_t slice, const StateViews& from,
           std::int64_t slot, const StateViews& to, std::byte* memory) const {
    Columns columns;
    columns.begin = problem_.head_dim_v * slice / slices_;
    columns.count = problem_.head_dim_v * (slice + 1) / slices_ - columns.begin;
    DeltaShape shape = shape_;
    shape.linear.head_dim_v = columns.count;
    std::byte* state = memory;
    std::byte* scratch = state + linear_rounded_up(unit_.state_bytes(shape_));
    StateContent content =
        unit_.load_state(shape, columns.of(unit_state(from[0], slot, head)), state);
    const DeltaSequence sequence(problem_, tokens, head);
    DeltaGates gates;
    for (std::int64_t first = 0; first < sequence.rows(); first += gates.rows) {
      sequence.load(first, gates);
      if (gates.reset && !shape.exclusive) content = {};
      DeltaChunk chunk = sequence.chunk(shape, first, gates);
      chunk.v = columns.of(chunk.v, problem_.dtype);
      chunk.b = columns.of(chunk.b, chunk.b_dtype);
      chunk.o = columns.of(sequence.reads(o_, first, head), problem_.dtype);
      chunk.empty = content.empty;
      chunk.row_by_row = !content.finite;
      const bool finite = unit_.forward(chunk, state, scratch);
      content.empty = false;
      content.finite = content.finite && finite;
    }
    unit_.store_state(shape, state, columns.of(unit_state(to[0], slot, head)));
  }

 private:
  DeltaUnit unit_;
  const LinearProblem& problem_;
  const RowsView& o_;
  DeltaShape shape_;
  std::int64_t slices_;
};

void run_side_by_side(const BackendPlan& plan, const LinearForwardProblem& problem,
                      std::byte* workspace, ThreadTeam& team) {
  const DeltaUnit unit = delta_unit(static_cast<Isa>(plan.words[kIsa]));
  const DeltaShape shape = delta_shape(problem);
  DeltaWindows all(problem, unit,
                   {static_cast<std::int64_t>(plan.words[kWindow]),
                    static_cast<std::int64_t>(plan.words[kSlices])},
                   heads_of(problem), unit.forward_scratch_bytes(shape));
  all.place(workspace, team);
  all.each_head([&](std::int64_t p) {
    all.begin(p, p / problem.num_heads_v, p % problem.num_heads_v, problem.initial_state);
  });
  const std::int64_t windows = all.windows();
  for (std::int64_t w = 0; w < windows; ++w) {
    all.fill(
        w,
        [&](std::int64_t p, std::int64_t c, const DeltaChunk& chunk) {
          return unit.prepare(chunk, all.record(p, c));
        },
        [&](std::int64_t p, std::int64_t c, const DeltaChunk& chunk, const DeltaColumns& columns) {
          unit.advance(chunk, columns, all.state(p, c), all.state(p, c + 1), all.record(p, c));
        });
    all.each_chunk(w, [&](std::int64_t p, std::int64_t c, std::int32_t) {
      const DeltaSequence rows = all.rows(p);
      DeltaChunk chunk = all.chunk(rows, p, w, c);
      chunk.o = rows.reads(problem.o, all.first_row(p, w, c), all.head(p));
      unit.read(chunk, all.state(p, c), all.record(p, c));
    });
    for (std::int64_t p = 0; p < all.heads(); ++p) all.go_on(p, w);
  }
  all.each_head([&](std::int64_t p) {
    unit.store_state(shape, all.state(p, 0),
                     unit_state(problem.final_state[0], all.sequence(p), all.head(p)));
  });
}

}  // namespace

PlanResult plan_delta_forward(const LinearForwardProblem& problem, const Settings& settings) {
  const DeltaCut cut = delta_cut(problem, heads_of(problem));
  return plan_delta(problem, settings, cut.window > 0 ? cut : columns_alone(problem),
                    &DeltaUnit::forward_name);
}

void run_delta_forward(const BackendPlan& plan, const LinearForwardProblem& problem,
                       const RunContext& context) {
  if (plan.words[kWindow] > 0) {
    ThreadTeam::run(static_cast<std::int32_t>(plan.words[kWorkers]), [&](ThreadTeam& team) {
      run_side_by_side(plan, problem, context.workspace, team);
    });
  } else {
    const DeltaHeads heads(plan, problem, problem.o);
    const auto slices = static_cast<std::int64_t>(plan.words[kSlices]);
    parallel_for(heads_of(problem) * slices, static_cast<std::int32_t>(plan.words[kWorkers]),
                 [&](std::int64_t task, std::int32_t worker) {
                   const std::int64_t pair = task / slices;
                   const std::int64_t n = pair / problem.num_heads_v;
                   heads.run(problem.tokens(n), pair % problem.num_heads_v, task % slices,
                             problem.initial_state, n, problem.final_state,
                             context.workspace +
                                 static_cast<std::size_t>(worker) * plan.words[kScratchBytes]);
                 });
  }
  clear_slack(problem, problem.o, problem.num_heads_v, problem.head_dim_v);
}

PlanResult plan_delta_step(const LinearStepProblem& problem, const Settings& settings) {
  return plan_delta(problem, settings, columns_alone(problem), &DeltaUnit::step_name);
}

void run_delta_step(const BackendPlan& plan, const LinearStepProblem& problem,
                    const RunContext& context) {
  const DeltaHeads heads(plan, problem, problem.o);
  const auto slices = static_cast<std::int64_t>(plan.words[kSlices]);
  const auto row_bytes = static_cast<std::size_t>(problem.head_dim_v * dtype_size(problem.dtype));
  parallel_for(
      problem.num_seqs * problem.num_heads_v * slices,
      static_cast<std::int32_t>(plan.words[kWorkers]), [&](std::int64_t task, std::int32_t worker) {
        const std::int64_t pair = task / slices;
        const std::int64_t n = pair / problem.num_heads_v;
        const std::int64_t head = pair % problem.num_heads_v;
        const std::int64_t slot = problem.state_slot(n);
        if (slot < 0) {
          if (row_bytes > 0 && task % slices == 0) {
            std::memset(problem.o.at(n, 0, head), 0, row_bytes);
          }
          return;
        }
        heads.run(problem.tokens(n), head, task % slices, problem.state, slot, problem.state,
                  context.workspace + static_cast<std::size_t>(worker) * plan.words[kScratchBytes]);
      });
}

}  // namespace onchip::cpu
