// delta_rule's backward where a task a (sequence, key head) leaves threads idle: of all key heads
// the first value head, then the second one, and so on; their chunks in windows
// (linear_delta_windows.hpp), from the last one back. In a window, once its states are known, the
// gradients of the states run backwards, a task a slice of columns; then those of the rows, a task
// a chunk.
#include <algorithm>
#include <cstring>

#include "core/ceil_div.hpp"
#include "cpu/linear_delta_gradients.hpp"

namespace onchip::cpu {

namespace {

class DeltaBackwardWindows {
 public:
  DeltaBackwardWindows(const LinearBackwardProblem& problem, const DeltaUnit& unit,
                       const DeltaCut& cut, std::int32_t workers)
      : problem_(problem),
        unit_(unit),
        shape_(delta_shape(problem)),
        at_(problem),
        heads_(problem, unit, cut, problem.num_seqs * problem.num_heads_k,
               std::max(unit.backward_record_bytes(shape_), unit.forward_scratch_bytes(shape_))),
        state_bytes_(linear_rounded_up(unit.state_bytes(shape_))),
        scratch_bytes_(linear_rounded_up(unit.backward_scratch_bytes(shape_))),
        constants_bytes_(linear_rounded_up(static_cast<std::size_t>(at_.width) * sizeof(double))),
        sums_bytes_(delta_sums_bytes(problem, unit)) {
    // A chunk may be a single row.
    const std::int64_t rows = problem.slot * problem.rows_per_token;
    const std::int64_t windows = std::max<std::int64_t>(ceil_div(rows, cut.window), 1);
    kept_ = std::min(kept_delta_states(problem), windows);
    between_ = ceil_div(windows, kept_);
    notes_bytes_ = linear_rounded_up(static_cast<std::size_t>(windows + 1) * sizeof(bool));
    const std::int64_t heads = heads_.heads();
    bytes_ = heads_.bytes();
    add(scratch_, workers, scratch_bytes_);
    add(kept_states_, heads * kept_, state_bytes_);
    add(between_states_, heads * between_, state_bytes_);
    add(finite_, heads, notes_bytes_);
    add(d_states_, heads * (cut.window + 1), state_bytes_);
    add(bases_, heads, kBaseBytes);
    add(constants_, heads * cut.window, constants_bytes_);
    const bool shared = problem.traits.erase == EraseForm::other_keys;
    add(sums_, heads, (shared ? 3 : 2) * sums_bytes_);
  }

  std::size_t bytes() const { return bytes_; }

  void run(double* totals, std::byte* memory, ThreadTeam& team) {
    memory_ = memory;
    totals_ = totals;
    heads_.place(memory, team);
    for (member_ = 0; member_ < delta_group(problem_); ++member_) run_members();
  }

 private:
  // A cache line each: tasks of different heads write them.
  static constexpr std::size_t kBaseBytes = 64;

  void add(std::size_t& at, std::int64_t count, std::size_t each) {
    at = bytes_;
    bytes_ += static_cast<std::size_t>(count) * each;
  }
  std::byte* piece(std::size_t begin, std::int64_t index, std::size_t bytes) const {
    return memory_ + begin + static_cast<std::size_t>(index) * bytes;
  }
  std::byte* scratch(std::int32_t worker) const { return piece(scratch_, worker, scratch_bytes_); }
  // Where in the ring the gradient of the state after the window is.
  std::int64_t& base(std::int64_t p) const {
    return *reinterpret_cast<std::int64_t*>(piece(bases_, p, kBaseBytes));
  }
  // Before every window: whether its state is finite.
  bool& finite(std::int64_t p, std::int64_t w) const {
    return reinterpret_cast<bool*>(piece(finite_, p, notes_bytes_))[w];
  }
  std::byte* kept(std::int64_t p, std::int64_t index) const {
    return piece(kept_states_, p * kept_ + index, state_bytes_);
  }
  std::byte* between(std::int64_t p, std::int64_t index) const {
    return piece(between_states_, p * between_ + index, state_bytes_);
  }
  // The gradient of the state after the window's last `back` chunks have been gone back.
  std::byte* d_state(std::int64_t p, std::int64_t back) const {
    const std::int64_t ring = heads_.window() + 1;
    return piece(d_states_, p * ring + (base(p) + back) % ring, state_bytes_);
  }
  double* constants(std::int64_t p, std::int64_t c) const {
    return reinterpret_cast<double*>(piece(constants_, p * heads_.window() + c, constants_bytes_));
  }
  DeltaSums sums(std::int64_t p, std::int64_t row) const {
    if (sums_bytes_ == 0) return {};
    const bool shared = problem_.traits.erase == EraseForm::other_keys;
    std::byte* q = piece(sums_, p, (shared ? 3 : 2) * sums_bytes_) +
                   static_cast<std::size_t>(row) * unit_.sum_row_bytes(shape_);
    return {q, q + sums_bytes_, shared ? q + 2 * sums_bytes_ : nullptr};
  }

  // One value head of every key head.
  void run_members() {
    heads_.each_head([&](std::int64_t p) {
      const std::int64_t n = p / problem_.num_heads_k;
      const std::int64_t head = p % problem_.num_heads_k * delta_group(problem_) + member_;
      heads_.begin(p, n, head, problem_.initial_state);
      base(p) = 0;
      unit_.load_state(shape_, unit_state(problem_.d_final_state[0], n, head), d_state(p, 0));
    });
    const std::int64_t windows = heads_.windows();
    every_ = std::max<std::int64_t>(ceil_div(windows, kept_), 1);
    // Every window's states are known when it is run itself: the walk ends before the last one.
    walk(0, windows, [&](std::int64_t p, std::int64_t w) {
      if (w % every_ == 0) std::memcpy(kept(p, w / every_), heads_.state(p, 0), state_bytes_);
    });
    for (std::int64_t w = windows - 1; w >= 0; --w) {
      const std::int64_t first = w / every_ * every_;
      if (every_ > 1 && (w == windows - 1 || w % every_ == every_ - 1)) {
        go_to(first, [&](std::int64_t p) { return kept(p, first / every_); });
        walk(first, w + 1, [&](std::int64_t p, std::int64_t now) {
          std::memcpy(between(p, now - first), heads_.state(p, 0), state_bytes_);
        });
      }
      go_to(w, [&](std::int64_t p) { return every_ > 1 ? between(p, w - first) : kept(p, w); });
      run_window(w);
    }
    heads_.each_head([&](std::int64_t p) {
      unit_.store_state(shape_, d_state(p, 0),
                        unit_state(problem_.dinitial_state[0], heads_.sequence(p), heads_.head(p)));
    });
  }

  // `from(p)` becomes the state before window w.
  template <typename F>
  void go_to(std::int64_t w, F&& from) {
    heads_.each_head([&](std::int64_t p) {
      if (w >= heads_.windows(p)) return;
      std::memcpy(heads_.state(p, 0), from(p), state_bytes_);
      heads_.finite(p) = finite(p, w);
    });
  }

  // keep(p, w) with the state before each of the windows first .. end - 1.
  template <typename F>
  void walk(std::int64_t first, std::int64_t end, F&& keep) {
    for (std::int64_t w = first; w < end; ++w) {
      heads_.each_head([&](std::int64_t p) {
        if (w >= heads_.windows(p)) return;
        finite(p, w) = heads_.finite(p);
        keep(p, w);
      });
      if (w + 1 == end) return;
      heads_.fill(
          w,
          [&](std::int64_t p, std::int64_t c, const DeltaChunk& chunk) {
            return unit_.prepare(chunk, heads_.record(p, c));
          },
          [&](std::int64_t p, std::int64_t c, const DeltaChunk& chunk,
              const DeltaColumns& columns) {
            unit_.advance(chunk, columns, heads_.state(p, c), heads_.state(p, c + 1),
                          heads_.record(p, c));
          });
      for (std::int64_t p = 0; p < heads_.heads(); ++p) heads_.go_on(p, w);
    }
  }

  void run_window(std::int64_t w) {
    heads_.fill(
        w,
        [&](std::int64_t p, std::int64_t c, const DeltaChunk& chunk) {
          DeltaBackwardChunk backward;
          backward.forward = chunk;
          const DeltaSequence rows = heads_.rows(p);
          backward.d_o = rows.reads(problem_.d_o, heads_.first_row(p, w, c), heads_.head(p));
          return unit_.backward_prepare(backward, heads_.record(p, c));
        },
        [&](std::int64_t p, std::int64_t c, const DeltaChunk& chunk, const DeltaColumns& columns) {
          DeltaBackwardChunk backward;
          backward.forward = chunk;
          unit_.backward_advance(backward, columns, heads_.state(p, c), heads_.state(p, c + 1),
                                 heads_.record(p, c));
        });
    heads_.each_slice([&](std::int64_t p, const DeltaColumns& columns) {
      const DeltaSequence rows = heads_.rows(p);
      const std::int64_t count = heads_.count(p, w);
      for (std::int64_t c = count - 1; c >= 0; --c) {
        DeltaBackwardChunk backward;
        backward.forward = heads_.chunk(rows, p, w, c);
        unit_.backward_values(backward, columns, d_state(p, count - 1 - c), d_state(p, count - c),
                              heads_.record(p, c));
      }
    });
    heads_.each_chunk(w, [&](std::int64_t p, std::int64_t c, std::int32_t worker) {
      run_chunk(p, w, c, scratch(worker));
    });
    for (std::int64_t p = 0; p < heads_.heads(); ++p) end_window(p, w);
  }

  void run_chunk(std::int64_t p, std::int64_t w, std::int64_t c, std::byte* memory) const {
    const std::int64_t count = heads_.count(p, w);
    const TokenRange tokens = problem_.tokens(heads_.sequence(p));
    const DeltaSequence rows = heads_.rows(p);
    const std::int64_t first = heads_.first_row(p, w, c);
    DeltaChunkGradients out(problem_, tokens, heads_.head(p), rows, heads_.chunk(rows, p, w, c),
                            first, sums(p, first), constants(p, c));
    unit_.backward_rows(out.chunk(), heads_.state(p, c), d_state(p, count - 1 - c),
                        heads_.record(p, c), memory);
    out.store_gates();
  }

  void end_window(std::int64_t p, std::int64_t w) const {
    const std::int64_t count = heads_.count(p, w);
    if (count == 0) return;
    double* totals =
        totals_ + (heads_.sequence(p) * problem_.num_heads_v + heads_.head(p)) * at_.width;
    for (std::int64_t c = count - 1; c >= 0; --c) {
      for (std::int64_t i = 0; i < at_.width; ++i) totals[i] += constants(p, c)[i];
    }
    base(p) = (base(p) + count) % (heads_.window() + 1);
  }

  const LinearBackwardProblem& problem_;
  const DeltaUnit& unit_;
  DeltaShape shape_;
  DeltaConstants at_;
  DeltaWindows heads_;
  std::size_t state_bytes_, scratch_bytes_, constants_bytes_, sums_bytes_;
  std::size_t notes_bytes_ = 0;
  std::int64_t kept_ = 1;     // states of a head that the walk forward keeps at most
  std::int64_t between_ = 1;  // windows from one to the next at most
  std::int64_t every_ = 1;    // as it is
  std::int64_t member_ = 0;
  std::size_t scratch_ = 0, kept_states_ = 0, between_states_ = 0, finite_ = 0, d_states_ = 0,
              bases_ = 0, constants_ = 0, sums_ = 0, bytes_ = 0;
  double* totals_ = nullptr;
  std::byte* memory_ = nullptr;
};

}  // namespace

std::size_t delta_backward_windows_bytes(const LinearBackwardProblem& problem,
                                         const DeltaUnit& unit, const DeltaCut& cut,
                                         std::int32_t workers) {
  return DeltaBackwardWindows(problem, unit, cut, workers).bytes();
}

void run_delta_backward_windows(const LinearBackwardProblem& problem, const DeltaUnit& unit,
                                const DeltaCut& cut, std::int32_t workers, double* totals,
                                std::byte* memory) {
  DeltaBackwardWindows windows(problem, unit, cut, workers);
  ThreadTeam::run(workers, [&](ThreadTeam& team) { windows.run(totals, memory, team); });
}

}  // namespace onchip::cpu
