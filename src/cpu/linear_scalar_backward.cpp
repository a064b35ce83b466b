// scalar_decay's backward: how the work is cut. Heads are taken a few at a time (a batch), and
// their chunks in windows, from the last one back. In a window the phases follow each other, and
// inside a phase all chunks are independent, but for two sums that run along the chunks:
//   states before each chunk, from the one kept where the window begins;
//   gradients of what each chunk's rows read, and what they add to the state's gradient;
//   the gradient of the state after each chunk, backwards;
//   the rows' gradients, one task a (key head, chunk), its value heads in order.
// Every sum has one order, so neither the batch nor the window nor the threads show in any bit.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/ceil_div.hpp"
#include "core/thread_team.hpp"
#include "cpu/linear_engines.hpp"
#include "cpu/linear_scalar_host.hpp"

namespace onchip::cpu {

namespace {

// Chunks of a window where the caller does not say: few kept states and short windows cost little
// memory, long ones save computing states twice. Heads of a group are all in a batch at once.
constexpr std::int64_t kWindow = 32;
constexpr std::int64_t kGroupWindow = 8;

constexpr double kMostBytes = 0x1p60;  // of a workspace

// Gradients of constants are summed over sequences: one row of these a (sequence, value head).
struct ConstantSums {
  explicit ConstantSums(const LinearBackwardProblem& problem)
      : rate(gate + (problem.gate_per_head ? 1 : 0)),
        dt_bias(rate + (problem.gradients.rate.wanted ? 1 : 0)),
        skip(dt_bias + (problem.gradients.dt_bias.wanted ? 1 : 0)),
        width(skip + (problem.gradients.skip.wanted ? problem.skip_width : 0)) {}

  std::int64_t gate = 0;
  std::int64_t rate, dt_bias, skip, width;
};

enum Word : std::size_t { kIsa, kWorkers, kBatch, kWindowWord };

struct Layout {
  Layout(const ScalarUnit& unit, const LinearBackwardProblem& problem, std::int64_t batch_keys,
         std::int64_t window_chunks, std::int32_t num_workers)
      : batch(batch_keys),
        window(window_chunks),
        workers(num_workers),
        group(problem.num_heads_k == 0 ? 0 : problem.num_heads_v / problem.num_heads_k),
        pairs(batch * group),
        windows(ceil_div(chunks_of(problem.slot), window)),
        width(ConstantSums(problem).width),
        state_bytes(linear_rounded_up(unit.state_bytes(linear_shape(problem)))),
        read_bytes(linear_rounded_up(unit.read_bytes(linear_shape(problem)))),
        scratch_bytes(linear_rounded_up(unit.backward_scratch_bytes(linear_shape(problem)))),
        gates_bytes(linear_rounded_up(sizeof(ChunkGates))),
        sums_bytes(linear_rounded_up(static_cast<std::size_t>(width) * sizeof(double))) {
    const auto add = [this](std::size_t& at, std::int64_t count, std::size_t each) {
      at = bytes;
      bytes += static_cast<std::size_t>(count) * each;
    };
    add(totals, problem.num_seqs * problem.num_heads_v, sums_bytes);
    add(scratch, workers, scratch_bytes);
    add(states, pairs * (window + 1), state_bytes);
    add(d_states, pairs * (window + 1), state_bytes);
    add(kept, pairs * windows, state_bytes);
    add(reads, pairs * window, read_bytes);
    add(gates, pairs * window, gates_bytes);
    add(sums, pairs * window, sums_bytes);
    add(stabilisers, pairs * (windows + 1), kLinearAlignment);
  }

  std::int64_t batch, window;
  std::int32_t workers;
  std::int64_t group, pairs, windows, width;
  std::size_t state_bytes, read_bytes, scratch_bytes, gates_bytes, sums_bytes;
  std::size_t bytes = 0;
  std::size_t totals, scratch, states, d_states, kept, reads, gates, sums, stabilisers;
};

std::int64_t window_of(const LinearBackwardProblem& problem) {
  const std::int64_t chunks = std::max<std::int64_t>(chunks_of(problem.slot), 1);
  if (problem.chunk_len > 0) {
    return std::min(chunks_of(std::min(problem.chunk_len, std::max<std::int64_t>(problem.slot, 1))),
                    chunks);
  }
  const bool grouped = problem.num_heads_v > 2 * problem.num_heads_k;
  const auto root = static_cast<std::int64_t>(std::ceil(std::sqrt(static_cast<double>(chunks))));
  return std::min(chunks, std::max(root, grouped ? kGroupWindow : kWindow));
}

class Backward {
 public:
  Backward(const BackendPlan& plan, const LinearBackwardProblem& problem, std::byte* workspace)
      : unit_(scalar_unit(static_cast<Isa>(plan.words[kIsa]))),
        problem_(problem),
        shape_(linear_shape(problem)),
        at_(unit_, problem, static_cast<std::int64_t>(plan.words[kBatch]),
            static_cast<std::int64_t>(plan.words[kWindowWord]),
            static_cast<std::int32_t>(plan.words[kWorkers])),
        memory_(workspace) {}

  void run(ThreadTeam& team) {
    team_ = &team;
    std::memset(memory_ + at_.totals, 0, at_.scratch - at_.totals);
    const std::int64_t keys = problem_.num_seqs * problem_.num_heads_k;
    for (first_ = 0; first_ < keys; first_ += at_.batch) {
      count_ = std::min(at_.batch, keys - first_);
      run_batch();
    }
    store_constants();
  }

 private:
  // ---- where things are: key u of the batch, its value heads' pairs, chunk c of the window -----

  struct Key {
    std::int64_t n;
    std::int64_t head;
  };
  Key key_at(std::int64_t u) const {
    return {(first_ + u) / problem_.num_heads_k, (first_ + u) % problem_.num_heads_k};
  }
  Key pair_at(std::int64_t p) const {
    const auto [n, key] = key_at(p / at_.group);
    return {n, key * at_.group + p % at_.group};
  }
  std::int64_t pairs() const { return count_ * at_.group; }

  std::byte* piece(std::size_t begin, std::int64_t index, std::size_t bytes) const {
    return memory_ + begin + static_cast<std::size_t>(index) * bytes;
  }
  std::byte* state(std::int64_t p, std::int64_t c) const {
    return piece(at_.states, p * (at_.window + 1) + c, at_.state_bytes);
  }
  std::byte* d_state(std::int64_t p, std::int64_t c) const {
    return piece(at_.d_states, p * (at_.window + 1) + c, at_.state_bytes);
  }
  std::byte* kept(std::int64_t p, std::int64_t w) const {
    return piece(at_.kept, p * at_.windows + w, at_.state_bytes);
  }
  std::byte* d_read(std::int64_t p, std::int64_t c) const {
    return piece(at_.reads, p * at_.window + c, at_.read_bytes);
  }
  ChunkGates& gates(std::int64_t p, std::int64_t c) const {
    return *reinterpret_cast<ChunkGates*>(piece(at_.gates, p * at_.window + c, at_.gates_bytes));
  }
  double* sums(std::int64_t p, std::int64_t c) const {
    return reinterpret_cast<double*>(piece(at_.sums, p * at_.window + c, at_.sums_bytes));
  }
  double* totals(std::int64_t n, std::int64_t head) const {
    return reinterpret_cast<double*>(
        piece(at_.totals, n * problem_.num_heads_v + head, at_.sums_bytes));
  }
  std::byte* scratch(std::int32_t worker) const {
    return piece(at_.scratch, worker, at_.scratch_bytes);
  }

  // The stabiliser before window w of a pair; the last one says whether its first state is 0.
  struct PairNote {
    double stabiliser;
    bool empty;
  };
  PairNote& note(std::int64_t p, std::int64_t w) const {
    return *reinterpret_cast<PairNote*>(
        piece(at_.stabilisers, p * (at_.windows + 1) + w, kLinearAlignment));
  }

  std::int64_t chunks_in(std::int64_t n, std::int64_t w) const {
    return std::clamp<std::int64_t>(chunks_of(problem_.tokens(n).length) - w * at_.window, 0,
                                    at_.window);
  }

  template <typename F>
  void each_pair(F&& f) const {
    team_->for_each(pairs(), [&](std::int64_t p, std::int32_t) { f(p); });
  }

  // f(p, c, worker) for each chunk of the window.
  template <typename F>
  void each_chunk(std::int64_t w, F&& f) const {
    team_->for_each(pairs() * at_.window, [&](std::int64_t task, std::int32_t worker) {
      const std::int64_t p = task / at_.window;
      const std::int64_t c = task % at_.window;
      if (c < chunks_in(pair_at(p).n, w)) f(p, c, worker);
    });
  }

  // f(p, slice) for slices of the states of every pair.
  template <typename F>
  void each_slice(F&& f) const {
    team_->for_each(pairs() * at_.workers, [&](std::int64_t task, std::int32_t) {
      f(task / at_.workers, task % at_.workers);
    });
  }

  ScalarChunk chunk(std::int64_t p, std::int64_t w, std::int64_t c) const {
    const auto [n, head] = pair_at(p);
    const std::int64_t index = w * at_.window + c;
    ScalarChunk chunk =
        scalar_chunk(problem_, problem_.tokens(n), head, index * kChunkRows, gates(p, c));
    chunk.empty = index == 0 && note(p, at_.windows).empty;
    return chunk;
  }

  ScalarGradients outputs(std::int64_t p, std::int64_t w, std::int64_t c) const {
    const auto [n, head] = pair_at(p);
    const TokenRange tokens = problem_.tokens(n);
    const std::int64_t row = tokens.begin + (w * at_.window + c) * kChunkRows;
    const LinearTensors& out = problem_.gradients;
    const std::int64_t key_head = problem_.key_head(head);
    ScalarGradients gradients;
    gradients.d_o = unit_row(problem_.d_o, tokens.batch, row, head);
    gradients.dq = unit_row(out.q, tokens.batch, row, key_head);
    gradients.dk = unit_row(out.k, tokens.batch, row, key_head);
    gradients.dv = unit_row(out.v, tokens.batch, row, head);
    gradients.dz = unit_row(out.z, tokens.batch, row, head);
    gradients.first_head = head % at_.group == 0;
    gradients.last_head = head % at_.group == at_.group - 1;
    return gradients;
  }

  // ---- the phases ------------------------------------------------------------

  void run_batch() const {
    std::int64_t windows = 0;
    for (std::int64_t u = 0; u < count_; ++u) {
      const std::int64_t chunks = chunks_of(problem_.tokens(key_at(u).n).length);
      windows = std::max(windows, ceil_div(chunks, at_.window));
    }
    each_pair([&](std::int64_t p) { load_pair(p); });
    for (std::int64_t w = 0; w + 1 < windows; ++w) {
      fill_states(w);
      each_pair([&](std::int64_t p) {
        if (chunks_in(pair_at(p).n, w + 1) == 0) return;
        std::memcpy(kept(p, w + 1), state(p, at_.window), at_.state_bytes);
      });
    }
    for (std::int64_t w = windows - 1; w >= 0; --w) run_window(w);
    each_pair([&](std::int64_t p) { store_pair(p); });
  }

  void load_pair(std::int64_t p) const {
    const auto [n, head] = pair_at(p);
    const StateViews& initial = problem_.initial_state;
    const StateViews& final = problem_.d_final_state;
    std::byte* first = at_.windows == 0 ? state(p, 0) : kept(p, 0);
    note(p, at_.windows).empty = !unit_.load_state(shape_, unit_state(initial[0], n, head),
                                                   unit_state(initial[1], n, head), first);
    note(p, 0).stabiliser = load_stabiliser(initial, n, head);
    unit_.load_state(shape_, unit_state(final[0], n, head), unit_state(final[1], n, head),
                     d_state(p, 0));
  }

  // The states before and after every chunk of the window.
  void fill_states(std::int64_t w) const {
    each_pair([&](std::int64_t p) {
      const auto [n, head] = pair_at(p);
      const std::int64_t chunks = chunks_in(n, w);
      if (chunks == 0) return;
      std::memcpy(state(p, 0), kept(p, w), at_.state_bytes);
      const LinearGates all(problem_, problem_.tokens(n), head);
      double stabiliser = note(p, w).stabiliser;
      for (std::int64_t c = 0; c < chunks; ++c) {
        stabiliser = all.load((w * at_.window + c) * kChunkRows, stabiliser, gates(p, c));
      }
      if (w + 1 < at_.windows) note(p, w + 1).stabiliser = stabiliser;
    });
    each_chunk(w, [&](std::int64_t p, std::int64_t c, std::int32_t worker) {
      unit_.local_state(chunk(p, w, c), state(p, c + 1), scratch(worker));
    });
    each_slice([&](std::int64_t p, std::int64_t slice) {
      for (std::int64_t c = 0; c < chunks_in(pair_at(p).n, w); ++c) {
        unit_.join(shape_, gates(p, c), chunk(p, w, c).empty, slice, at_.workers, state(p, c),
                   state(p, c + 1), state(p, c + 1));
      }
    });
  }

  void run_window(std::int64_t w) const {
    fill_states(w);
    each_chunk(w, [&](std::int64_t p, std::int64_t c, std::int32_t worker) {
      const ScalarChunk now = chunk(p, w, c);
      ScalarGradients out = outputs(p, w, c);
      const ConstantSums constants(problem_);
      std::fill_n(sums(p, c), at_.width, 0.0);
      if (problem_.gradients.skip.wanted) out.d_skip = sums(p, c) + constants.skip;
      unit_.pull_read(now, out, state(p, c), d_read(p, c), scratch(worker));
      // What comes from the later window waits in slot 0.
      if (c > 0) unit_.local_gradient(now, d_read(p, c), d_state(p, c), scratch(worker));
    });
    each_pair([&](std::int64_t p) {
      const std::int64_t chunks = chunks_in(pair_at(p).n, w);
      if (chunks > 0) std::memcpy(d_state(p, chunks), d_state(p, 0), at_.state_bytes);
    });
    each_pair_first(w);
    each_slice([&](std::int64_t p, std::int64_t slice) {
      for (std::int64_t c = chunks_in(pair_at(p).n, w) - 1; c >= 0; --c) {
        unit_.join(shape_, gates(p, c), false, slice, at_.workers, d_state(p, c + 1), d_state(p, c),
                   d_state(p, c));
      }
    });
    team_->for_each(count_ * at_.window, [&](std::int64_t task, std::int32_t worker) {
      const std::int64_t u = task / at_.window;
      const std::int64_t c = task % at_.window;
      if (c >= chunks_in(key_at(u).n, w)) return;
      if (at_.group == 0) clear_keys(u, w, c);
      for (std::int64_t p = u * at_.group; p < (u + 1) * at_.group; ++p) {
        run_chunk(p, w, c, scratch(worker));
      }
    });
    each_pair([&](std::int64_t p) {
      const auto [n, head] = pair_at(p);
      for (std::int64_t c = chunks_in(n, w) - 1; c >= 0; --c) {
        for (std::int64_t i = 0; i < at_.width; ++i) totals(n, head)[i] += sums(p, c)[i];
      }
    });
  }

  // The first chunk's own part, once its slot is free.
  void each_pair_first(std::int64_t w) const {
    team_->for_each(pairs(), [&](std::int64_t p, std::int32_t worker) {
      if (chunks_in(pair_at(p).n, w) == 0) return;
      unit_.local_gradient(chunk(p, w, 0), d_read(p, 0), d_state(p, 0), scratch(worker));
    });
  }

  void run_chunk(std::int64_t p, std::int64_t w, std::int64_t c, std::byte* memory) const {
    const auto [n, head] = pair_at(p);
    const LinearTensors& out = problem_.gradients;
    const ScalarChunk now = chunk(p, w, c);
    ScalarGradients rows = outputs(p, w, c);
    double d_decay[kChunkRows] = {};
    double d_write[kChunkRows] = {};
    const bool gated = out.gate.wanted || out.rate.wanted || out.dt_bias.wanted;
    if (gated) rows.d_decay = d_decay;
    if (now.weighs && (gated || out.beta.wanted)) rows.d_write = d_write;
    unit_.gradients(now, rows, state(p, c), d_state(p, c + 1), d_read(p, c), memory);
    if (!gated && !out.beta.wanted) return;

    const ConstantSums constants(problem_);
    const TokenRange tokens = problem_.tokens(n);
    const LinearGates all(problem_, tokens, head);
    double* mine = sums(p, c);
    const std::int64_t first = (w * at_.window + c) * kChunkRows;
    for (std::int64_t i = 0; i < gates(p, c).rows; ++i) {
      const LinearGates::Raw raw =
          all.pull(first + i, d_decay[i], d_write[i], gates(p, c).write[i]);
      const std::int64_t row = tokens.begin + first + i;
      if (out.beta.wanted) {
        store_from_double(out.beta.at(tokens.batch, row, head), out.beta.dtype, raw.beta);
      }
      if (problem_.gate_per_head) {
        mine[constants.gate] += raw.gate;
      } else if (out.gate.wanted) {
        store_from_double(out.gate.at(tokens.batch, row, head), out.gate.dtype, raw.gate);
      }
      if (out.rate.wanted) mine[constants.rate] += raw.rate;
      if (out.dt_bias.wanted) mine[constants.dt_bias] += raw.dt_bias;
    }
  }

  // A key head that no value head reads.
  void clear_keys(std::int64_t u, std::int64_t w, std::int64_t c) const {
    const auto [n, head] = key_at(u);
    const TokenRange tokens = problem_.tokens(n);
    const std::int64_t begin = (w * at_.window + c) * kChunkRows;
    const std::int64_t end = std::min(begin + kChunkRows, tokens.length);
    for (const RowsView& rows : {problem_.gradients.q, problem_.gradients.k}) {
      for (std::int64_t row = begin; rows.wanted && row < end; ++row) {
        store_zeros(rows, tokens.batch, tokens.begin + row, head, problem_.head_dim_k);
      }
    }
  }

  // The stabiliser's gradient is that of the factor e^{m_0} in front of the initial state.
  void store_pair(std::int64_t p) const {
    const auto [n, head] = pair_at(p);
    const StateViews& to = problem_.dinitial_state;
    unit_.store_state(shape_, d_state(p, 0), unit_state(to[0], n, head),
                      unit_state(to[1], n, head));
    if (!to[2].wanted) return;
    const std::byte* first = at_.windows == 0 ? state(p, 0) : kept(p, 0);
    store_stabiliser(to, n, head, unit_.state_dot(shape_, first, d_state(p, 0)));
  }

  void store_constant(const RowsView& to, std::int64_t first, std::int64_t dim) const {
    if (!to.wanted) return;
    for (std::int64_t head = 0; head < problem_.num_heads_v; ++head) {
      for (std::int64_t d = 0; d < dim; ++d) {
        double total = 0.0;
        for (std::int64_t n = 0; n < problem_.num_seqs; ++n) total += totals(n, head)[first + d];
        store_from_double(to.at(0, 0, head) + d * dtype_size(to.dtype), to.dtype, total);
      }
    }
  }

  void store_constants() const {
    const LinearTensors& out = problem_.gradients;
    const ConstantSums constants(problem_);
    if (problem_.gate_per_head) store_constant(out.gate, constants.gate, 1);
    store_constant(out.rate, constants.rate, 1);
    store_constant(out.dt_bias, constants.dt_bias, 1);
    store_constant(out.skip, constants.skip, problem_.skip_width);
  }

  ScalarUnit unit_;
  const LinearBackwardProblem& problem_;
  LinearShape shape_;
  Layout at_;
  std::byte* memory_;
  std::int64_t first_ = 0;  // of the batch's (sequence, key head) pairs
  std::int64_t count_ = 0;
  ThreadTeam* team_ = nullptr;
};

}  // namespace

PlanResult plan_scalar_backward(const LinearBackwardProblem& problem, const Settings& settings) {
  const LinearRefusal refusal = refuse_linear(problem, settings);
  if (!refusal.reason.empty()) return Reject{refusal.reason, refusal.by_setting};
  const IsaChoice choice = choose_isa(settings);
  if (!choice.problem.empty()) return Reject{choice.problem, true};
  const ScalarUnit unit = scalar_unit(choice.isa);
  const std::int64_t keys = problem.num_seqs * problem.num_heads_k;
  const std::int64_t window = window_of(problem);
  const auto workers = static_cast<std::int32_t>(
      std::clamp<std::int64_t>(keys * window, 1, std::max(num_threads(), 1)));
  const std::int64_t batch =
      std::clamp<std::int64_t>(ceil_div(2 * workers, window), 1, std::max<std::int64_t>(keys, 1));
  const std::size_t state = unit.state_bytes(linear_shape(problem));
  const double windows = static_cast<double>(chunks_of(problem.slot)) / static_cast<double>(window);
  const double states = 2.0 * static_cast<double>(window + 1) + windows + 1.0;
  const std::int64_t group =
      problem.num_heads_k == 0 ? 0 : problem.num_heads_v / problem.num_heads_k;
  if (static_cast<double>(batch) * static_cast<double>(group) * states *
          static_cast<double>(state) >
      kMostBytes) {
    return Reject{"needs more workspace than there can be"};
  }
  BackendPlan plan;
  plan.kernel = unit.backward_name;
  plan.words[kIsa] = static_cast<std::uint64_t>(choice.isa);
  plan.words[kWorkers] = static_cast<std::uint64_t>(workers);
  plan.words[kBatch] = static_cast<std::uint64_t>(batch);
  plan.words[kWindowWord] = static_cast<std::uint64_t>(window);
  plan.workspace_bytes = Layout(unit, problem, batch, window, workers).bytes;
  plan.workspace_alignment = kLinearAlignment;
  return plan;
}

void run_scalar_backward(const BackendPlan& plan, const LinearBackwardProblem& problem,
                         const RunContext& context) {
  Backward backward(plan, problem, context.workspace);
  ThreadTeam::run(static_cast<std::int32_t>(plan.words[kWorkers]),
                  [&](ThreadTeam& team) { backward.run(team); });
  const LinearTensors& out = problem.gradients;
  clear_slack(problem, out.q, problem.num_heads_k, problem.head_dim_k);
  clear_slack(problem, out.k, problem.num_heads_k, problem.head_dim_k);
  clear_slack(problem, out.v, problem.num_heads_v, problem.head_dim_v);
  clear_slack(problem, out.z, problem.num_heads_v, problem.head_dim_v);
  clear_slack(problem, out.beta, problem.num_heads_v, 1);
  if (!problem.gate_per_head) clear_slack(problem, out.gate, problem.num_heads_v, 1);
}

}  // namespace onchip::cpu
