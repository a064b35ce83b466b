// Chunks of few heads side by side, for delta_rule where there are too few heads for the threads.
// Of a window of chunks first all that needs no state is computed, a task a chunk; then the states
// along the window, a task a slice of columns, since columns do not meet; then what reads them, a
// task a chunk again. Every number is computed as in linear_delta_unit.cpp's whole chunks, so the
// bits are theirs, and the cut may follow the number of threads.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/ceil_div.hpp"
#include "core/thread_team.hpp"
#include "cpu/linear_delta_host.hpp"

namespace onchip::cpu {

constexpr std::int64_t kMaxDeltaWindow = 32;

struct DeltaCut {
  std::int64_t window = 0;  // chunks side by side; 0: a task is a head, or some of its columns
  std::int64_t slices = 1;  // of a head's columns
};

// For `heads` heads of all sequences together.
DeltaCut delta_cut(const LinearProblem& problem, std::int64_t heads);

// Heads that are cut alike, each with a window's records and states.
class DeltaWindows {
 public:
  DeltaWindows(const LinearProblem& problem, const DeltaUnit& unit, const DeltaCut& cut,
               std::int64_t heads, std::size_t record_bytes);

  std::size_t bytes() const { return bytes_; }
  std::int64_t heads() const { return heads_; }
  std::int64_t window() const { return cut_.window; }
  void place(std::byte* memory, ThreadTeam& team) {
    memory_ = memory;
    team_ = &team;
  }

  // Head p is to be value head `head` of sequence n, with its state in `initial`.
  void begin(std::int64_t p, std::int64_t n, std::int64_t head, const StateViews& initial) const;

  // Windows of the longest head.
  std::int64_t windows() const;
  std::int64_t windows(std::int64_t p) const { return ceil_div(note(p).chunks, cut_.window); }
  std::int64_t count(std::int64_t p, std::int64_t w) const {
    return std::clamp<std::int64_t>(note(p).chunks - w * cut_.window, 0, cut_.window);
  }

  std::int64_t sequence(std::int64_t p) const { return note(p).n; }
  std::int64_t head(std::int64_t p) const { return note(p).head; }
  std::int64_t first_row(std::int64_t p, std::int64_t w, std::int64_t c) const {
    return starts(p)[w * cut_.window + c];
  }
  const DeltaGates& gates(std::int64_t p, std::int64_t c) const { return gates_at(p, c); }
  DeltaSequence rows(std::int64_t p) const {
    return {problem_, problem_.tokens(note(p).n), note(p).head};
  }
  std::byte* record(std::int64_t p, std::int64_t c) const {
    return piece(records_, p * cut_.window + c, record_bytes_);
  }
  // The state before chunk c of the window, or after chunk c - 1.
  std::byte* state(std::int64_t p, std::int64_t c) const {
    const std::int64_t slot = (note(p).base + c) % (cut_.window + 1);
    return piece(states_, p * (cut_.window + 1) + slot, state_bytes_);
  }
  // Whether the state before the window is finite.
  bool& finite(std::int64_t p) const { return note(p).finite; }
  // The last state of a window becomes the first of the next one.
  void go_on(std::int64_t p, std::int64_t w) const {
    note(p).base = (note(p).base + count(p, w)) % (cut_.window + 1);
  }

  // Chunk c of window w, of a head's `rows`, once the window is filled; everything but o.
  DeltaChunk chunk(const DeltaSequence& rows, std::int64_t p, std::int64_t w,
                   std::int64_t c) const {
    DeltaChunk chunk = rows.chunk(shape_, first_row(p, w, c), gates_at(p, c));
    chunk.empty = starts_empty(p, w, c);
    chunk.row_by_row = note(p).row_by_row[c];
    return chunk;
  }
  // Whether nothing of the state before passes into the chunk.
  bool forgets(std::int64_t p, std::int64_t c) const {
    return gates_at(p, c).reset && !shape_.exclusive;
  }

  // f(p).
  template <typename F>
  void each_head(F&& f) const {
    team_->for_each(heads_, [&](std::int64_t p, std::int32_t) { f(p); });
  }
  // f(p, c, worker) for each chunk of window w.
  template <typename F>
  void each_chunk(std::int64_t w, F&& f) const {
    team_->for_each(heads_ * cut_.window, [&](std::int64_t task, std::int32_t worker) {
      const std::int64_t p = task / cut_.window;
      const std::int64_t c = task % cut_.window;
      if (c < count(p, w)) f(p, c, worker);
    });
  }
  // f(p, columns).
  template <typename F>
  void each_slice(F&& f) const {
    team_->for_each(heads_ * cut_.slices, [&](std::int64_t task, std::int32_t) {
      f(task / cut_.slices, columns(task % cut_.slices));
    });
  }

  // The states of window w from the one before it: finite = prepare(p, c, chunk), then
  // advance(p, c, chunk, columns) from state c to state c + 1.
  template <typename Prepare, typename Advance>
  void fill(std::int64_t w, Prepare&& prepare, Advance&& advance) const {
    each_chunk(w, [&](std::int64_t p, std::int64_t c, std::int32_t) {
      const DeltaSequence own = rows(p);
      own.load(first_row(p, w, c), gates_at(p, c));
      note(p).row_by_row[c] = false;
      note(p).row_finite[c] = prepare(p, c, chunk(own, p, w, c));
    });
    for (std::int64_t p = 0; p < heads_; ++p) find_walked(p, w);
    each_slice([&](std::int64_t p, const DeltaColumns& columns) {
      const DeltaSequence own = rows(p);
      for (std::int64_t c = 0; c < count(p, w); ++c) advance(p, c, chunk(own, p, w, c), columns);
    });
  }

 private:
  struct Note {
    std::int64_t n;
    std::int64_t head;
    std::int64_t chunks;
    std::int64_t base;  // where in the ring of states the first one of the window is
    bool empty;         // the initial state is 0
    bool finite;
    bool row_finite[kMaxDeltaWindow];
    bool row_by_row[kMaxDeltaWindow];
  };

  std::byte* piece(std::size_t begin, std::int64_t index, std::size_t bytes) const {
    return memory_ + begin + static_cast<std::size_t>(index) * bytes;
  }
  Note& note(std::int64_t p) const {
    return *reinterpret_cast<Note*>(piece(notes_, p, linear_rounded_up(sizeof(Note))));
  }
  std::int64_t* starts(std::int64_t p) const {
    return reinterpret_cast<std::int64_t*>(piece(starts_, p, starts_bytes_));
  }
  DeltaGates& gates_at(std::int64_t p, std::int64_t c) const {
    return *reinterpret_cast<DeltaGates*>(
        piece(gates_, p * cut_.window + c, linear_rounded_up(sizeof(DeltaGates))));
  }
  bool starts_empty(std::int64_t p, std::int64_t w, std::int64_t c) const {
    return (w == 0 && c == 0 && note(p).empty) || forgets(p, c);
  }
  DeltaColumns columns(std::int64_t slice) const;
  void find_walked(std::int64_t p, std::int64_t w) const;

  const LinearProblem& problem_;
  const DeltaUnit& unit_;
  DeltaShape shape_;
  DeltaCut cut_;
  std::int64_t heads_;
  std::size_t record_bytes_, state_bytes_, starts_bytes_;
  std::size_t notes_ = 0, starts_ = 0, gates_ = 0, states_ = 0, records_ = 0, bytes_ = 0;
  std::byte* memory_ = nullptr;
  ThreadTeam* team_ = nullptr;
};

}  // namespace onchip::cpu
