// scalar_decay's forward and step: how the work is cut. A (sequence, value head) is one task, its
// chunks in order. Where there are too few of those for the threads, windows of chunks are computed
// side by side: each chunk's own sum, then the states before every chunk in order, then the
// outputs. The bits are the same (linear_scalar_unit.cpp says why), so the choice may follow the
// number of threads.
#include <algorithm>
#include <cstring>

#include "core/ceil_div.hpp"
#include "core/thread_pool.hpp"
#include "core/thread_team.hpp"
#include "cpu/linear_engines.hpp"
#include "cpu/linear_scalar_host.hpp"

namespace onchip::cpu {

namespace {

constexpr std::int64_t kMinWindow = 4;
constexpr std::int64_t kMaxWindow = 32;

enum Word : std::size_t {
  kIsa,
  kWorkers,
  kScratchBytes,  // of a worker
  kWindow,        // chunks computed side by side; 0: a task is a (sequence, value head)
};

template <typename Problem>
PlanResult plan_scalar(const Problem& problem, const Settings& settings, std::int64_t window,
                       const char* ScalarUnit::* name) {
  const LinearRefusal refusal = refuse_linear(problem, settings);
  if (!refusal.reason.empty()) return Reject{refusal.reason, refusal.by_setting};
  const IsaChoice choice = choose_isa(settings);
  if (!choice.problem.empty()) return Reject{choice.problem, true};
  const ScalarUnit unit = scalar_unit(choice.isa);
  const LinearShape shape = linear_shape(problem);
  const std::int64_t pairs = problem.num_seqs * problem.num_heads_v;
  const std::size_t state = linear_rounded_up(unit.state_bytes(shape));
  const std::size_t scratch = linear_rounded_up(unit.forward_scratch_bytes(shape));
  const std::int64_t tasks = pairs * std::max<std::int64_t>(window, 1);
  const auto workers =
      static_cast<std::int32_t>(std::clamp<std::int64_t>(tasks, 1, std::max(num_threads(), 1)));
  BackendPlan plan;
  plan.kernel = unit.*name;
  plan.words[kIsa] = static_cast<std::uint64_t>(choice.isa);
  plan.words[kWorkers] = static_cast<std::uint64_t>(workers);
  plan.words[kScratchBytes] = window > 0 ? scratch : scratch + state;
  plan.words[kWindow] = static_cast<std::uint64_t>(window);
  plan.workspace_bytes = static_cast<std::size_t>(workers) * plan.words[kScratchBytes];
  if (window > 0) {
    const std::size_t gates = linear_rounded_up(sizeof(ChunkGates));
    plan.workspace_bytes += static_cast<std::size_t>(pairs) *
                            (static_cast<std::size_t>(window + 1) * state +
                             static_cast<std::size_t>(window) * gates + kLinearAlignment);
  }
  plan.workspace_alignment = kLinearAlignment;
  return plan;
}

// Chunks side by side where (sequence, head) pairs alone would leave threads idle.
std::int64_t window_of(const LinearForwardProblem& problem) {
  const std::int64_t pairs = problem.num_seqs * problem.num_heads_v;
  const std::int64_t threads = std::max(num_threads(), 1);
  const std::int64_t chunks = chunks_of(problem.slot);
  if (threads == 1 || pairs == 0 || pairs >= 2 * threads || chunks < kMinWindow) return 0;
  return std::clamp(ceil_div(4 * threads, pairs), kMinWindow, std::min(kMaxWindow, chunks));
}

// One (sequence, value head) after the other.
class InOrder {
 public:
  InOrder(const BackendPlan& plan, const LinearProblem& problem, const RowsView& o)
      : unit_(scalar_unit(static_cast<Isa>(plan.words[kIsa]))),
        problem_(problem),
        o_(o),
        shape_(linear_shape(problem)) {}

  void run(const TokenRange& tokens, std::int64_t head, const StateViews& from, std::int64_t slot,
           const StateViews& to, std::byte* memory) const {
    std::byte* state = memory;
    std::byte* scratch = memory + linear_rounded_up(unit_.state_bytes(shape_));
    bool empty = !unit_.load_state(shape_, unit_state(from[0], slot, head),
                                   unit_state(from[1], slot, head), state);
    double stabiliser = load_stabiliser(from, slot, head);
    const LinearGates gates(problem_, tokens, head);
    ChunkGates now;
    for (std::int64_t first = 0; first < tokens.length; first += kChunkRows) {
      stabiliser = gates.load(first, stabiliser, now);
      ScalarChunk chunk = scalar_chunk(problem_, tokens, head, first, now);
      chunk.o = unit_row(o_, tokens.batch, tokens.begin + first, head);
      chunk.empty = empty;
      // The last state may be of no use.
      const bool keeps = first + kChunkRows < tokens.length || to[0].wanted || to[1].wanted;
      unit_.outputs(chunk, state, keeps ? state : nullptr, scratch);
      empty = false;
    }
    unit_.store_state(shape_, state, unit_state(to[0], slot, head), unit_state(to[1], slot, head));
    store_stabiliser(to, slot, head, stabiliser);
  }

 private:
  ScalarUnit unit_;
  const LinearProblem& problem_;
  const RowsView& o_;
  LinearShape shape_;
};

// Windows of chunks of all (sequence, value head) pairs at once.
class SideBySide {
 public:
  SideBySide(const BackendPlan& plan, const LinearForwardProblem& problem, std::byte* workspace)
      : unit_(scalar_unit(static_cast<Isa>(plan.words[kIsa]))),
        problem_(problem),
        shape_(linear_shape(problem)),
        workers_(static_cast<std::int32_t>(plan.words[kWorkers])),
        scratch_bytes_(plan.words[kScratchBytes]),
        window_(static_cast<std::int64_t>(plan.words[kWindow])),
        pairs_(problem.num_seqs * problem.num_heads_v),
        state_bytes_(linear_rounded_up(unit_.state_bytes(shape_))),
        scratch_(workspace),
        states_(scratch_ + static_cast<std::size_t>(workers_) * scratch_bytes_),
        gates_(states_ + static_cast<std::size_t>(pairs_ * (window_ + 1)) * state_bytes_),
        pair_(gates_ +
              static_cast<std::size_t>(pairs_ * window_) * linear_rounded_up(sizeof(ChunkGates))) {}

  void run(ThreadTeam& team) {
    team_ = &team;
    std::int64_t longest = 0;
    for (std::int64_t n = 0; n < problem_.num_seqs; ++n) {
      longest = std::max(longest, problem_.tokens(n).length);
    }
    each_pair([&](std::int64_t p) {
      const auto [n, head] = pair_at(p);
      pair(p).empty =
          !unit_.load_state(shape_, unit_state(problem_.initial_state[0], n, head),
                            unit_state(problem_.initial_state[1], n, head), state(p, 0));
      pair(p).stabiliser = load_stabiliser(problem_.initial_state, n, head);
      pair(p).last = 0;
    });
    for (std::int64_t first = 0; first < chunks_of(longest); first += window_) run_window(first);
    each_pair([&](std::int64_t p) {
      const auto [n, head] = pair_at(p);
      const StateViews& to = problem_.final_state;
      unit_.store_state(shape_, state(p, pair(p).last), unit_state(to[0], n, head),
                        unit_state(to[1], n, head));
      store_stabiliser(to, n, head, pair(p).stabiliser);
    });
  }

 private:
  struct Pair {
    double stabiliser;
    std::int64_t last;  // which of the window's states is the newest
    bool empty;
  };
  static_assert(sizeof(Pair) <= kLinearAlignment);

  struct At {
    std::int64_t n;
    std::int64_t head;
  };
  At pair_at(std::int64_t p) const { return {p / problem_.num_heads_v, p % problem_.num_heads_v}; }
  Pair& pair(std::int64_t p) const {
    return *reinterpret_cast<Pair*>(pair_ + static_cast<std::size_t>(p) * kLinearAlignment);
  }
  std::byte* state(std::int64_t p, std::int64_t c) const {
    return states_ + static_cast<std::size_t>(p * (window_ + 1) + c) * state_bytes_;
  }
  ChunkGates& gates(std::int64_t p, std::int64_t c) const {
    return *reinterpret_cast<ChunkGates*>(gates_ + static_cast<std::size_t>(p * window_ + c) *
                                                       linear_rounded_up(sizeof(ChunkGates)));
  }
  std::byte* scratch(std::int32_t worker) const {
    return scratch_ + static_cast<std::size_t>(worker) * scratch_bytes_;
  }
  std::int64_t count(std::int64_t p, std::int64_t first) const {
    const std::int64_t chunks = chunks_of(problem_.tokens(pair_at(p).n).length);
    return std::clamp<std::int64_t>(chunks - first, 0, window_);
  }

  template <typename F>
  void each_pair(F&& f) const {
    team_->for_each(pairs_, [&](std::int64_t p, std::int32_t) { f(p); });
  }

  ScalarChunk chunk(std::int64_t p, std::int64_t first, std::int64_t c) const {
    const auto [n, head] = pair_at(p);
    const TokenRange tokens = problem_.tokens(n);
    const std::int64_t token = (first + c) * kChunkRows;
    ScalarChunk chunk = scalar_chunk(problem_, tokens, head, token, gates(p, c));
    chunk.o = unit_row(problem_.o, tokens.batch, tokens.begin + token, head);
    chunk.empty = first + c == 0 && pair(p).empty;
    return chunk;
  }

  void run_window(std::int64_t first) const {
    each_pair([&](std::int64_t p) {
      if (count(p, first) == 0) return;
      const auto [n, head] = pair_at(p);
      Pair& own = pair(p);
      if (own.last > 0) std::memcpy(state(p, 0), state(p, own.last), state_bytes_);
      own.last = count(p, first);
      const LinearGates all(problem_, problem_.tokens(n), head);
      for (std::int64_t c = 0; c < own.last; ++c) {
        own.stabiliser = all.load((first + c) * kChunkRows, own.stabiliser, gates(p, c));
      }
    });
    team_->for_each(pairs_ * window_, [&](std::int64_t task, std::int32_t worker) {
      const std::int64_t p = task / window_;
      const std::int64_t c = task % window_;
      if (c >= count(p, first)) return;
      const ScalarChunk now = chunk(p, first, c);
      if (!now.recurrent) unit_.local_state(now, state(p, c + 1), scratch(worker));
    });
    team_->for_each(pairs_ * workers_, [&](std::int64_t task, std::int32_t) {
      const std::int64_t p = task / workers_;
      for (std::int64_t c = 0; c < count(p, first); ++c) {
        const ScalarChunk now = chunk(p, first, c);
        if (now.recurrent) return;
        unit_.join(shape_, gates(p, c), now.empty, task % workers_, workers_, state(p, c),
                   state(p, c + 1), state(p, c + 1));
      }
    });
    team_->for_each(pairs_ * window_, [&](std::int64_t task, std::int32_t worker) {
      const std::int64_t p = task / window_;
      const std::int64_t c = task % window_;
      if (c >= count(p, first)) return;
      const ScalarChunk now = chunk(p, first, c);
      unit_.outputs(now, state(p, c), now.recurrent ? state(p, c + 1) : nullptr, scratch(worker));
    });
  }

  ScalarUnit unit_;
  const LinearForwardProblem& problem_;
  LinearShape shape_;
  std::int32_t workers_;
  std::size_t scratch_bytes_;
  std::int64_t window_;
  std::int64_t pairs_;
  std::size_t state_bytes_;
  std::byte* scratch_;  // [workers]
  std::byte* states_;   // [pairs][window + 1]: before each chunk of the window, and after it
  std::byte* gates_;    // [pairs][window]
  std::byte* pair_;     // [pairs]
  ThreadTeam* team_ = nullptr;
};

}  // namespace

PlanResult plan_scalar_forward(const LinearForwardProblem& problem, const Settings& settings) {
  return plan_scalar(problem, settings, window_of(problem), &ScalarUnit::forward_name);
}

void run_scalar_forward(const BackendPlan& plan, const LinearForwardProblem& problem,
                        const RunContext& context) {
  if (plan.words[kWindow] > 0) {
    SideBySide chunks(plan, problem, context.workspace);
    ThreadTeam::run(static_cast<std::int32_t>(plan.words[kWorkers]),
                    [&](ThreadTeam& team) { chunks.run(team); });
  } else {
    const InOrder sequences(plan, problem, problem.o);
    parallel_for(problem.num_seqs * problem.num_heads_v,
                 static_cast<std::int32_t>(plan.words[kWorkers]),
                 [&](std::int64_t task, std::int32_t worker) {
                   const std::int64_t n = task / problem.num_heads_v;
                   sequences.run(problem.tokens(n), task % problem.num_heads_v,
                                 problem.initial_state, n, problem.final_state,
                                 context.workspace +
                                     static_cast<std::size_t>(worker) * plan.words[kScratchBytes]);
                 });
  }
  clear_slack(problem, problem.o, problem.num_heads_v, problem.head_dim_v);
}

PlanResult plan_scalar_step(const LinearStepProblem& problem, const Settings& settings) {
  return plan_scalar(problem, settings, 0, &ScalarUnit::step_name);
}

void run_scalar_step(const BackendPlan& plan, const LinearStepProblem& problem,
                     const RunContext& context) {
  const InOrder rows(plan, problem, problem.o);
  const auto row_bytes = static_cast<std::size_t>(problem.head_dim_v * dtype_size(problem.dtype));
  parallel_for(
      problem.num_seqs * problem.num_heads_v, static_cast<std::int32_t>(plan.words[kWorkers]),
      [&](std::int64_t task, std::int32_t worker) {
        const std::int64_t n = task / problem.num_heads_v;
        const std::int64_t head = task % problem.num_heads_v;
        const std::int64_t slot = problem.state_slot(n);
        if (slot < 0) {
          if (row_bytes > 0) std::memset(problem.o.at(n, 0, head), 0, row_bytes);
          return;
        }
        rows.run(problem.tokens(n), head, problem.state, slot, problem.state,
                 context.workspace + static_cast<std::size_t>(worker) * plan.words[kScratchBytes]);
      });
}

}  // namespace onchip::cpu
