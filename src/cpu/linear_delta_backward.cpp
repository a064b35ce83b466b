// delta_rule's backward: a task is a (sequence, key head) with the value heads that read it, one
// after the other, so that no sum depends on the threads. A head keeps the states before some of
// its chunks from a walk forward, and those between two of them when it comes to them. Where that
// leaves threads idle, linear_delta_backward_windows.cpp computes the same bits.
#include <algorithm>
#include <cstring>

#include "core/ceil_div.hpp"
#include "core/thread_pool.hpp"
#include "cpu/linear_delta_gradients.hpp"
#include "cpu/linear_engines.hpp"

namespace onchip::cpu {

namespace {

constexpr double kMostNumbers = 0x1p54;  // in any part of the workspace

enum Word : std::size_t {
  kIsa,
  kWorkers,
  kSharedBytes,  // gradients of constants
  kSlices,
  kWindow,  // chunks side by side; 0: in order
};

// Where a worker's memory lies, in bytes from its begin.
struct WorkerLayout {
  WorkerLayout(const LinearBackwardProblem& problem, const DeltaUnit& unit,
               const DeltaShape& shape) {
    const std::int64_t rows = problem.slot * problem.rows_per_token;
    kept = kept_delta_states(problem);
    // A chunk may be a single row, where every row resets.
    between = ceil_div(std::max<std::int64_t>(rows, 1), kept);
    state = linear_rounded_up(unit.state_bytes(shape));
    sum_row = unit.sum_row_bytes(shape);
    take(record, std::max(unit.backward_record_bytes(shape), unit.forward_scratch_bytes(shape)));
    take(scratch, unit.backward_scratch_bytes(shape));
    take(d_state, state);
    take(kept_states, static_cast<std::size_t>(kept + 1) * state);
    take(between_states, static_cast<std::size_t>(between) * state);
    take(starts, static_cast<std::size_t>(rows + 1) * sizeof(std::int64_t));
    take(finite, static_cast<std::size_t>(kept + 1) * sizeof(bool));
    take(constants, static_cast<std::size_t>(DeltaConstants(problem).width) * sizeof(double));
    const std::size_t sums = delta_sums_bytes(problem, unit);
    take(q_sums, sums);
    take(k_sums, sums);
    take(a_sums, problem.traits.erase == EraseForm::other_keys ? sums : 0);
  }

  void take(std::size_t& at, std::size_t size) {
    at = bytes;
    bytes += linear_rounded_up(size);
  }

  std::int64_t kept = 0;     // states that a walk forward keeps at most; one more is the last one
  std::int64_t between = 0;  // chunks from one of them to the next at most
  std::size_t state = 0;
  std::size_t sum_row = 0;
  std::size_t record = 0, scratch = 0, d_state = 0, kept_states = 0, between_states = 0, starts = 0,
              finite = 0, constants = 0, q_sums = 0, k_sums = 0, a_sums = 0;
  std::size_t bytes = 0;
};

// Of key heads that no value head reads.
void clear_key_head(const LinearBackwardProblem& problem, std::int64_t n, std::int64_t key_head) {
  const TokenRange tokens = problem.tokens(n);
  const LinearTensors& out = problem.gradients;
  const std::int64_t each = problem.rows_per_token;
  const RowsView absent;
  const bool shared = problem.traits.erase == EraseForm::other_keys;
  for (std::int64_t row = tokens.begin * each; row < (tokens.begin + tokens.length) * each; ++row) {
    for (const RowsView* rows : {&out.k, shared ? &out.a : &absent}) {
      if (rows->wanted) store_zeros(*rows, tokens.batch, row, key_head, problem.head_dim_k);
    }
    if (out.q.wanted && row % each == 0) {
      store_zeros(out.q, tokens.batch, row / each, key_head, problem.head_dim_k);
    }
  }
}

// One value head of one sequence, its chunks in order.
class DeltaBackwardHead {
 public:
  DeltaBackwardHead(const LinearBackwardProblem& problem, const DeltaUnit& unit,
                    const WorkerLayout& layout, std::int64_t n, std::int64_t head,
                    std::byte* memory)
      : problem_(problem),
        unit_(unit),
        shape_(delta_shape(problem)),
        layout_(layout),
        n_(n),
        head_(head),
        tokens_(problem.tokens(n)),
        rows_(problem, tokens_, head),
        memory_(memory),
        starts_(reinterpret_cast<std::int64_t*>(memory + layout.starts)) {
    for (std::int64_t first = 0; first < rows_.rows(); first += rows_.chunk_rows(first)) {
      starts_[chunks_++] = first;
    }
    every_ = std::max<std::int64_t>(ceil_div(chunks_, layout_.kept), 1);
  }

  // Adds to `totals`, of DeltaConstants.
  void run(double* totals) {
    walk_forward();
    for (std::int64_t c = chunks_ - 1; c >= 0; --c) {
      if (every_ > 1 && (c % every_ == every_ - 1 || c == chunks_ - 1)) restore(c / every_, c);
      run_chunk(c, totals);
    }
    unit_.store_state(shape_, memory_ + layout_.d_state,
                      unit_state(problem_.dinitial_state[0], n_, head_));
  }

 private:
  void walk_forward() {
    std::byte* state = kept(ceil_div(chunks_, every_));  // becomes the last one
    const StateContent content =
        unit_.load_state(shape_, unit_state(problem_.initial_state[0], n_, head_), state);
    empty_ = content.empty;
    finite_ = content.finite;
    for (std::int64_t c = 0; c < chunks_; ++c) {
      if (c % every_ == 0) {
        std::memcpy(kept(c / every_), state, layout_.state);
        kept_finite()[c / every_] = finite_;
      }
      if (c + 1 < chunks_) advance(c, state);
    }
    std::byte* d_state = memory_ + layout_.d_state;
    unit_.load_state(shape_, unit_state(problem_.d_final_state[0], n_, head_), d_state);
  }

  std::byte* kept(std::int64_t index) const {
    return memory_ + layout_.kept_states + static_cast<std::size_t>(index) * layout_.state;
  }
  bool* kept_finite() const { return reinterpret_cast<bool*>(memory_ + layout_.finite); }
  std::byte* between(std::int64_t index) const {
    return memory_ + layout_.between_states + static_cast<std::size_t>(index) * layout_.state;
  }

  DeltaChunk chunk_at(std::int64_t c) {
    rows_.load(starts_[c], gates_);
    DeltaChunk chunk = rows_.chunk(shape_, starts_[c], gates_);
    chunk.empty = (c == 0 && empty_) || (gates_.reset && !shape_.exclusive);
    return chunk;
  }

  // `state`, before chunk c, to the one after it.
  void advance(std::int64_t c, std::byte* state) {
    DeltaChunk chunk = chunk_at(c);
    if (chunk.empty) finite_ = true;
    chunk.row_by_row = !finite_;
    const bool finite = unit_.forward(chunk, state, memory_ + layout_.record);
    finite_ = finite_ && finite;
  }

  // The states before the chunks from kept state `index` on to chunk `last`.
  void restore(std::int64_t index, std::int64_t last) {
    const std::int64_t first = index * every_;
    std::memcpy(between(0), kept(index), layout_.state);
    finite_ = kept_finite()[index];
    for (std::int64_t c = first; c < last; ++c) {
      std::memcpy(between(c - first + 1), between(c - first), layout_.state);
      advance(c, between(c - first + 1));
    }
  }

  void run_chunk(std::int64_t c, double* totals) {
    const DeltaConstants at(problem_);
    auto* constants = reinterpret_cast<double*>(memory_ + layout_.constants);
    DeltaSums sums;
    if (delta_group(problem_) > 1) {
      std::byte* row = memory_ + static_cast<std::size_t>(starts_[c]) * layout_.sum_row;
      sums = {row + layout_.q_sums, row + layout_.k_sums, row + layout_.a_sums};
    }
    DeltaChunkGradients gradients(problem_, tokens_, head_, rows_, chunk_at(c), starts_[c], sums,
                                  constants);
    const std::byte* state = every_ > 1 ? between(c % every_) : kept(c);
    unit_.backward(gradients.chunk(), state, memory_ + layout_.d_state, memory_ + layout_.record,
                   memory_ + layout_.scratch);
    gradients.store_gates();
    for (std::int64_t i = 0; i < at.width; ++i) totals[i] += constants[i];
  }

  const LinearBackwardProblem& problem_;
  const DeltaUnit& unit_;
  DeltaShape shape_;
  const WorkerLayout& layout_;
  std::int64_t n_;
  std::int64_t head_;
  TokenRange tokens_;
  DeltaSequence rows_;
  std::byte* memory_;
  std::int64_t* starts_;  // first row of each chunk
  DeltaGates gates_;
  std::int64_t chunks_ = 0;
  std::int64_t every_ = 1;  // chunks from one kept state to the next
  bool empty_ = true;       // the initial state
  bool finite_ = true;      // the state of the walk
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

// Rows that no sequence has, `each` a token.
void clear_rows(const LinearProblem& problem, const RowsView& rows, std::int64_t heads,
                std::int64_t dim, std::int64_t each) {
  if (!rows.wanted) return;
  for_each_slack(problem, [&](std::int64_t batch, std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin * each; row < end * each; ++row) {
      for (std::int64_t head = 0; head < heads; ++head) store_zeros(rows, batch, row, head, dim);
    }
  });
}

void run_in_order(const BackendPlan& plan, const LinearBackwardProblem& problem, double* totals,
                  std::byte* memory) {
  const DeltaUnit unit = delta_unit(static_cast<Isa>(plan.words[kIsa]));
  const WorkerLayout layout(problem, unit, delta_shape(problem));
  const std::int64_t width = DeltaConstants(problem).width;
  const std::int64_t group = delta_group(problem);
  parallel_for(problem.num_seqs * problem.num_heads_k,
               static_cast<std::int32_t>(plan.words[kWorkers]),
               [&](std::int64_t task, std::int32_t worker) {
                 const std::int64_t n = task / problem.num_heads_k;
                 const std::int64_t key_head = task % problem.num_heads_k;
                 std::byte* own = memory + static_cast<std::size_t>(worker) * layout.bytes;
                 if (group == 0) clear_key_head(problem, n, key_head);
                 for (std::int64_t head = key_head * group; head < (key_head + 1) * group; ++head) {
                   DeltaBackwardHead(problem, unit, layout, n, head, own)
                       .run(totals + (n * problem.num_heads_v + head) * width);
                 }
               });
}

}  // namespace

PlanResult plan_delta_backward(const LinearBackwardProblem& problem, const Settings& settings) {
  const LinearRefusal refusal = refuse_linear(problem, settings);
  if (!refusal.reason.empty()) return Reject{refusal.reason, refusal.by_setting};
  const IsaChoice choice = choose_isa(settings);
  if (!choice.problem.empty()) return Reject{choice.problem, true};
  const double shared = static_cast<double>(problem.num_seqs * problem.num_heads_v) *
                        static_cast<double>(DeltaConstants(problem).width);
  const double rows = static_cast<double>(problem.slot * problem.rows_per_token) *
                      static_cast<double>((problem.head_dim_k + 1) * (problem.head_dim_v + 1));
  if (shared > kMostNumbers || rows > kMostNumbers) {
    return Reject{"needs more workspace than there can be"};
  }
  const DeltaUnit unit = delta_unit(choice.isa);
  const std::int64_t heads = problem.num_seqs * problem.num_heads_k;
  const DeltaCut cut = delta_group(problem) == 0 ? DeltaCut{} : delta_cut(problem, heads);
  const auto workers = static_cast<std::int32_t>(std::clamp<std::int64_t>(
      heads * std::max(cut.window, cut.slices), 1, std::max(num_threads(), 1)));
  BackendPlan plan;
  plan.kernel = unit.backward_name;
  plan.words[kIsa] = static_cast<std::uint64_t>(choice.isa);
  plan.words[kWorkers] = static_cast<std::uint64_t>(workers);
  plan.words[kSlices] = static_cast<std::uint64_t>(cut.slices);
  plan.words[kWindow] = static_cast<std::uint64_t>(cut.window);
  plan.words[kSharedBytes] =
      linear_rounded_up(static_cast<std::size_t>(problem.num_seqs * problem.num_heads_v *
                                                 DeltaConstants(problem).width) *
                        sizeof(double));
  const std::size_t own = cut.window > 0
                              ? delta_backward_windows_bytes(problem, unit, cut, workers)
                              : static_cast<std::size_t>(workers) *
                                    WorkerLayout(problem, unit, delta_shape(problem)).bytes;
  plan.workspace_bytes = plan.words[kSharedBytes] + own;
  plan.workspace_alignment = kLinearAlignment;
  return plan;
}

void run_delta_backward(const BackendPlan& plan, const LinearBackwardProblem& problem,
                        const RunContext& context) {
  auto* totals = reinterpret_cast<double*>(context.workspace);
  if (plan.words[kSharedBytes] > 0) std::memset(totals, 0, plan.words[kSharedBytes]);
  std::byte* memory = context.workspace + plan.words[kSharedBytes];
  if (plan.words[kWindow] > 0) {
    const DeltaCut cut{static_cast<std::int64_t>(plan.words[kWindow]),
                       static_cast<std::int64_t>(plan.words[kSlices])};
    run_delta_backward_windows(problem, delta_unit(static_cast<Isa>(plan.words[kIsa])), cut,
                               static_cast<std::int32_t>(plan.words[kWorkers]), totals, memory);
  } else {
    run_in_order(plan, problem, totals, memory);
  }

  const LinearTensors& out = problem.gradients;
  const DeltaConstants at(problem);
  if (problem.gate_per_head) store_constant(problem, out.gate, totals, at.gate, 1, at.width);
  store_constant(problem, out.rate, totals, at.rate, 1, at.width);
  store_constant(problem, out.dt_bias, totals, at.dt_bias, problem.decay_width, at.width);
  const std::int64_t hk = problem.num_heads_k;
  const std::int64_t hv = problem.num_heads_v;
  const std::int64_t dk = problem.head_dim_k;
  const std::int64_t dv = problem.head_dim_v;
  const std::int64_t each = problem.rows_per_token;
  clear_rows(problem, out.q, hk, dk, 1);
  clear_rows(problem, out.k, hk, dk, each);
  clear_rows(problem, out.v, hv, dv, each);
  clear_rows(problem, out.beta, hv, 1, each);
  clear_rows(problem, out.a, problem.traits.erase == EraseForm::channels ? hv : hk, dk, each);
  clear_rows(problem, out.b, hv, dv, each);
  if (!problem.gate_per_head) clear_rows(problem, out.gate, hv, problem.decay_width, 1);
}

}  // namespace onchip::cpu
