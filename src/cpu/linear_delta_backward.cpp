// delta_rule's backward: a task is a (sequence, key head) with the value heads that read it, one
// after the other, so that no sum depends on the threads. A head keeps the states before some of
// its chunks from a walk forward, and those between two of them when it comes to them.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/thread_pool.hpp"
#include "cpu/linear_delta_host.hpp"
#include "cpu/linear_engines.hpp"

namespace onchip::cpu {

namespace {

constexpr std::int64_t kMinKept = 128;
constexpr double kMostNumbers = 0x1p54;  // in any part of the workspace

enum Word : std::size_t {
  kIsa,
  kWorkers,
  kSharedBytes,  // gradients of constants
  kWorkerBytes,
};

// One row of these a (sequence, value head): gradients of constants, summed over sequences later.
struct ConstantSums {
  explicit ConstantSums(const LinearBackwardProblem& problem)
      : rate(gate + (problem.gate_per_head ? 1 : 0)),
        dt_bias(rate + (problem.gradients.rate.wanted ? 1 : 0)),
        width(dt_bias + (problem.gradients.dt_bias.wanted ? problem.decay_width : 0)) {}

  std::int64_t gate = 0;
  std::int64_t rate, dt_bias, width;
};

std::int64_t group_of(const LinearProblem& problem) {
  return problem.num_heads_k == 0 ? 1 : problem.num_heads_v / problem.num_heads_k;
}

// Where a worker's memory lies, in bytes from its begin.
struct WorkerLayout {
  WorkerLayout(const LinearBackwardProblem& problem, const DeltaUnit& unit,
               const DeltaShape& shape) {
    const std::int64_t rows = problem.slot * problem.rows_per_token;
    // A chunk may be a single row, where every row resets.
    kept =
        problem.chunk_len > 0
            ? linear_ceil_div(rows, problem.chunk_len)
            : std::max(kMinKept, static_cast<std::int64_t>(std::sqrt(static_cast<double>(rows))));
    kept = std::clamp<std::int64_t>(kept, 1, std::max<std::int64_t>(rows, 1));
    between = linear_ceil_div(std::max<std::int64_t>(rows, 1), kept);
    state = linear_rounded_up(unit.state_bytes(shape));
    sum_row = unit.sum_row_bytes(shape);
    take(scratch, std::max(unit.backward_scratch_bytes(shape), unit.forward_scratch_bytes(shape)));
    take(d_state, state);
    take(ends, sum_row);
    take(kept_states, static_cast<std::size_t>(kept + 1) * state);
    take(between_states, static_cast<std::size_t>(between) * state);
    take(starts, static_cast<std::size_t>(rows + 1) * sizeof(std::int64_t));
    take(formed, formed_bytes(problem));
    take(d_formed, formed_bytes(problem));
    const std::size_t sums = group_of(problem) > 1 ? static_cast<std::size_t>(rows) * sum_row : 0;
    take(q_sums, sums);
    take(k_sums, sums);
    take(a_sums, shape.erase == EraseForm::other_keys ? sums : 0);
  }

  void take(std::size_t& at, std::size_t size) {
    at = bytes;
    bytes += linear_rounded_up(size);
  }

  std::int64_t kept = 0;     // states that a walk forward keeps at most; one more is the last one
  std::int64_t between = 0;  // chunks from one of them to the next at most
  std::size_t state = 0;
  std::size_t sum_row = 0;
  std::size_t scratch = 0, d_state = 0, ends = 0, kept_states = 0, between_states = 0, starts = 0,
              formed = 0, d_formed = 0, q_sums = 0, k_sums = 0, a_sums = 0;
  std::size_t bytes = 0;
};

class DeltaBackwardHeads {
 public:
  DeltaBackwardHeads(const BackendPlan& plan, const LinearBackwardProblem& problem, double* sums)
      : unit_(delta_unit(static_cast<Isa>(plan.words[kIsa]))),
        problem_(problem),
        shape_(delta_shape(problem)),
        layout_(problem, unit_, shape_),
        at_(problem),
        sums_(sums) {}

  void run(std::int64_t n, std::int64_t key_head, std::byte* memory) const {
    const std::int64_t group = group_of(problem_);
    if (group == 0) clear(n, key_head);
    for (std::int64_t member = 0; member < group; ++member) {
      Head head(*this, n, key_head * group + member, memory);
      head.walk_forward();
      head.walk_backward(member == 0, member == group - 1);
    }
  }

 private:
  // Of a key head that no value head reads.
  void clear(std::int64_t n, std::int64_t key_head) const {
    const TokenRange tokens = problem_.tokens(n);
    const LinearTensors& out = problem_.gradients;
    const std::int64_t each = problem_.rows_per_token;
    const bool shared = problem_.traits.erase == EraseForm::other_keys;
    for (std::int64_t row = tokens.begin * each; row < (tokens.begin + tokens.length) * each;
         ++row) {
      for (const RowsView* rows : {&out.k, shared ? &out.a : &kAbsent}) {
        if (rows->wanted) store_zeros(*rows, tokens.batch, row, key_head, problem_.head_dim_k);
      }
      if (out.q.wanted && row % each == 0) {
        store_zeros(out.q, tokens.batch, row / each, key_head, problem_.head_dim_k);
      }
    }
  }

  static constexpr RowsView kAbsent{};

  // One value head of one sequence.
  class Head {
   public:
    Head(const DeltaBackwardHeads& all, std::int64_t n, std::int64_t head, std::byte* memory)
        : all_(all),
          problem_(all.problem_),
          unit_(all.unit_),
          layout_(all.layout_),
          n_(n),
          head_(head),
          tokens_(problem_.tokens(n)),
          sequence_(problem_, tokens_, head),
          memory_(memory),
          starts_(reinterpret_cast<std::int64_t*>(memory + layout_.starts)),
          formed_(piece(layout_.formed)),
          d_formed_(piece(layout_.d_formed)) {
      for (std::int64_t first = 0; first < sequence_.rows(); first += sequence_.chunk_rows(first)) {
        starts_[chunks_++] = first;
      }
      every_ = std::max<std::int64_t>(linear_ceil_div(chunks_, layout_.kept), 1);
    }

    void walk_forward() {
      std::byte* state = kept((chunks_ + every_ - 1) / every_);  // becomes the last one
      const StateContent content =
          unit_.load_state(all_.shape_, unit_state(problem_.initial_state[0], n_, head_), state);
      empty_ = content.empty;
      finite_ = content.finite;
      for (std::int64_t c = 0; c < chunks_; ++c) {
        if (c % every_ == 0) std::memcpy(kept(c / every_), state, layout_.state);
        advance(c, state);
      }
      std::byte* d_state = memory_ + layout_.d_state;
      unit_.load_state(all_.shape_, unit_state(problem_.d_final_state[0], n_, head_), d_state);
      unit_.ends(all_.shape_, state, d_state, memory_ + layout_.ends);
    }

    void walk_backward(bool first_head, bool last_head) {
      for (std::int64_t c = chunks_ - 1; c >= 0; --c) {
        if (every_ > 1 && (c % every_ == every_ - 1 || c == chunks_ - 1)) restore(c / every_, c);
        run_chunk(c, first_head, last_head);
      }
      unit_.store_state(all_.shape_, memory_ + layout_.d_state,
                        unit_state(problem_.dinitial_state[0], n_, head_));
    }

   private:
    double* piece(std::size_t at) const {
      return forms_channels(problem_) ? reinterpret_cast<double*>(memory_ + at) : nullptr;
    }
    std::byte* kept(std::int64_t index) const {
      return memory_ + layout_.kept_states + static_cast<std::size_t>(index) * layout_.state;
    }
    std::byte* between(std::int64_t index) const {
      return memory_ + layout_.between_states + static_cast<std::size_t>(index) * layout_.state;
    }
    std::byte* sums_at(std::size_t at, std::int64_t row) const {
      if (group_of(problem_) == 1) return nullptr;
      return memory_ + at + static_cast<std::size_t>(row) * layout_.sum_row;
    }

    DeltaChunk chunk_at(std::int64_t c) {
      sequence_.load(starts_[c], gates_, formed_);
      DeltaChunk chunk = sequence_.chunk(all_.shape_, starts_[c], gates_, formed_);
      chunk.empty = (c == 0 && empty_) || (gates_.reset && !all_.shape_.exclusive);
      return chunk;
    }

    // `state`, before chunk c, to the one after it.
    void advance(std::int64_t c, std::byte* state) {
      DeltaChunk chunk = chunk_at(c);
      if (chunk.empty) finite_ = true;
      chunk.row_by_row = !finite_;
      const bool finite = unit_.forward(chunk, state, memory_ + layout_.scratch);
      finite_ = finite_ && finite;
    }

    // The states before the chunks from kept state `index` on to chunk `last`.
    void restore(std::int64_t index, std::int64_t last) {
      const std::int64_t first = index * every_;
      std::memcpy(between(0), kept(index), layout_.state);
      finite_ = true;
      for (std::int64_t c = first; c < last; ++c) {
        std::memcpy(between(c - first + 1), between(c - first), layout_.state);
        advance(c, between(c - first + 1));
      }
    }

    void run_chunk(std::int64_t c, bool first_head, bool last_head) {
      const LinearTensors& out = problem_.gradients;
      const std::int64_t each = problem_.rows_per_token;
      const std::int64_t first = starts_[c];
      const std::int64_t row = tokens_.begin * each + first;
      const std::int64_t key_head = problem_.key_head(head_);
      const bool own_head = problem_.traits.erase == EraseForm::channels;
      double d_decay[kDeltaRows] = {};
      double d_beta[kDeltaRows] = {};
      DeltaBackwardChunk chunk;
      chunk.forward = chunk_at(c);
      chunk.d_o = sequence_.reads(problem_.d_o, first, head_);
      chunk.dq = sequence_.reads(out.q, first, key_head);
      chunk.dk = unit_row(out.k, tokens_.batch, row, key_head);
      chunk.dv = unit_row(out.v, tokens_.batch, row, head_);
      chunk.da = unit_row(out.a, tokens_.batch, row, own_head ? head_ : key_head);
      chunk.db = unit_row(out.b, tokens_.batch, row, head_);
      if (formed_ == nullptr) chunk.d_log_decay = unit_row(out.gate, tokens_.batch, row, head_);
      chunk.q_sums = sums_at(layout_.q_sums, first);
      chunk.k_sums = sums_at(layout_.k_sums, first);
      chunk.a_sums = sums_at(layout_.a_sums, first);
      chunk.first_head = first_head;
      chunk.last_head = last_head;
      chunk.d_decay = problem_.traits.gate == GateForm::none ? nullptr : d_decay;
      chunk.d_channels = d_formed_;
      chunk.d_beta = d_beta;
      const std::byte* state = every_ > 1 ? between(c % every_) : kept(c);
      unit_.backward(chunk, state, memory_ + layout_.d_state, memory_ + layout_.ends,
                     memory_ + layout_.scratch);
      store_beta(first, d_beta);
      if (!all_.shape_.channels) {
        store_gates(first, d_decay);
      } else if (d_formed_ != nullptr) {
        store_gates(first, d_formed_);
      }
    }

    void store_beta(std::int64_t first, const double* d_beta) const {
      const RowsView& to = problem_.gradients.beta;
      if (!to.wanted) return;
      for (std::int64_t i = 0; i < gates_.rows; ++i) {
        store_from_double(
            to.at(tokens_.batch, tokens_.begin * problem_.rows_per_token + first + i, head_),
            to.dtype, sequence_.pull_beta(first + i, d_beta[i]));
      }
    }

    // `d_decay`: [rows][decay_width].
    void store_gates(std::int64_t first, const double* d_decay) const {
      const LinearTensors& out = problem_.gradients;
      const ConstantSums& at = all_.at_;
      double* sums = all_.sums_ + (n_ * problem_.num_heads_v + head_) * at.width;
      for (std::int64_t i = 0; i < gates_.rows; ++i) {
        const std::int64_t row = first + i;
        if (!sequence_.decays(row)) continue;
        const std::int64_t token = tokens_.begin + row / problem_.rows_per_token;
        for (std::int64_t d = 0; d < problem_.decay_width; ++d) {
          const DeltaSequence::RawGate raw =
              sequence_.pull_gate(row, d, d_decay[i * problem_.decay_width + d]);
          if (problem_.gate_per_head) {
            sums[at.gate] += raw.gate;
          } else if (out.gate.wanted) {
            store_from_double(
                out.gate.at(tokens_.batch, token, head_) + d * dtype_size(out.gate.dtype),
                out.gate.dtype, raw.gate);
          }
          if (out.rate.wanted) sums[at.rate] += raw.rate;
          if (out.dt_bias.wanted) sums[at.dt_bias + d] += raw.gate;
        }
      }
    }

    const DeltaBackwardHeads& all_;
    const LinearBackwardProblem& problem_;
    const DeltaUnit& unit_;
    const WorkerLayout& layout_;
    std::int64_t n_;
    std::int64_t head_;
    TokenRange tokens_;
    DeltaSequence sequence_;
    std::byte* memory_;
    std::int64_t* starts_;  // first row of each chunk
    double* formed_;
    double* d_formed_;
    DeltaGates gates_;
    std::int64_t chunks_ = 0;
    std::int64_t every_ = 1;  // chunks from one kept state to the next
    bool empty_ = true;       // the initial state
    bool finite_ = true;      // the state of the walk
  };

  DeltaUnit unit_;
  const LinearBackwardProblem& problem_;
  DeltaShape shape_;
  WorkerLayout layout_;
  ConstantSums at_;
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

}  // namespace

PlanResult plan_delta_backward(const LinearBackwardProblem& problem, const Settings& settings) {
  const LinearRefusal refusal = refuse_linear(problem, settings);
  if (!refusal.reason.empty()) return Reject{refusal.reason, refusal.by_setting};
  const IsaChoice choice = choose_isa(settings);
  if (!choice.problem.empty()) return Reject{choice.problem, true};
  const double shared = static_cast<double>(problem.num_seqs * problem.num_heads_v) *
                        static_cast<double>(ConstantSums(problem).width);
  const double rows = static_cast<double>(problem.slot * problem.rows_per_token) *
                      static_cast<double>((problem.head_dim_k + 1) * (problem.head_dim_v + 1));
  if (shared > kMostNumbers || rows > kMostNumbers) {
    return Reject{"needs more workspace than there can be"};
  }
  const DeltaUnit unit = delta_unit(choice.isa);
  const WorkerLayout layout(problem, unit, delta_shape(problem));
  const std::int64_t tasks = problem.num_seqs * problem.num_heads_k;
  const auto workers =
      static_cast<std::int32_t>(std::clamp<std::int64_t>(tasks, 1, std::max(num_threads(), 1)));
  BackendPlan plan;
  plan.kernel = unit.backward_name;
  plan.words[kIsa] = static_cast<std::uint64_t>(choice.isa);
  plan.words[kWorkers] = static_cast<std::uint64_t>(workers);
  plan.words[kSharedBytes] =
      linear_rounded_up(static_cast<std::size_t>(problem.num_seqs * problem.num_heads_v *
                                                 ConstantSums(problem).width) *
                        sizeof(double));
  plan.words[kWorkerBytes] = layout.bytes;
  plan.workspace_bytes =
      plan.words[kSharedBytes] + static_cast<std::size_t>(workers) * layout.bytes;
  plan.workspace_alignment = kLinearAlignment;
  return plan;
}

void run_delta_backward(const BackendPlan& plan, const LinearBackwardProblem& problem,
                        const RunContext& context) {
  auto* sums = reinterpret_cast<double*>(context.workspace);
  if (plan.words[kSharedBytes] > 0) std::memset(sums, 0, plan.words[kSharedBytes]);
  std::byte* workers = context.workspace + plan.words[kSharedBytes];
  const DeltaBackwardHeads heads(plan, problem, sums);
  parallel_for(problem.num_seqs * problem.num_heads_k,
               static_cast<std::int32_t>(plan.words[kWorkers]),
               [&](std::int64_t task, std::int32_t worker) {
                 heads.run(task / problem.num_heads_k, task % problem.num_heads_k,
                           workers + static_cast<std::size_t>(worker) * plan.words[kWorkerBytes]);
               });

  const LinearTensors& out = problem.gradients;
  const ConstantSums at(problem);
  if (problem.gate_per_head) store_constant(problem, out.gate, sums, at.gate, 1, at.width);
  store_constant(problem, out.rate, sums, at.rate, 1, at.width);
  store_constant(problem, out.dt_bias, sums, at.dt_bias, problem.decay_width, at.width);
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
