#include "cpu/linear_delta_windows.hpp"
#include "core/ceil_div.hpp"

namespace onchip::cpu {

namespace {

constexpr std::int64_t kMinChunks = 4;
constexpr std::int64_t kMinWindow = 4;

// Slices begin at a multiple of this many columns, whole vectors of any instruction set; those of
// twice as many make full register tiles.
constexpr std::int64_t kSliceUnit = 16;
constexpr std::int64_t kFullSlice = 32;

// Whether more than a fifth of the threads' time is idle where all tasks are alike.
bool leaves_idle(std::int64_t tasks, std::int64_t threads) {
  return 5 * (ceil_div(tasks, threads) * threads - tasks) > tasks;
}

}  // namespace

DeltaCut delta_cut(const LinearProblem& problem, std::int64_t heads) {
  const std::int64_t threads = std::max(num_threads(), 1);
  const std::int64_t rows = problem.slot * problem.rows_per_token;
  const std::int64_t chunks = ceil_div(rows, longest_delta_chunk(problem));
  if (heads == 0 || chunks < kMinChunks || !leaves_idle(heads, threads)) return {};
  const std::int64_t most = std::max<std::int64_t>(problem.head_dim_v / kFullSlice, 1);
  std::int64_t slices = ceil_div(threads, heads);
  while (slices < most && leaves_idle(heads * slices, threads)) ++slices;
  const std::int64_t units = std::max<std::int64_t>(ceil_div(problem.head_dim_v, kSliceUnit), 1);
  return {std::clamp(ceil_div(4 * threads, heads), kMinWindow, kMaxDeltaWindow),
          std::min(slices, units)};
}

DeltaWindows::DeltaWindows(const LinearProblem& problem, const DeltaUnit& unit, const DeltaCut& cut,
                           std::int64_t heads, std::size_t record_bytes)
    : problem_(problem),
      unit_(unit),
      shape_(delta_shape(problem)),
      cut_(cut),
      heads_(heads),
      record_bytes_(linear_rounded_up(record_bytes)),
      state_bytes_(linear_rounded_up(unit.state_bytes(shape_))),
      // A chunk may be a single row, where every row resets.
      starts_bytes_(linear_rounded_up(
          static_cast<std::size_t>(problem.slot * problem.rows_per_token) * sizeof(std::int64_t))) {
  const auto add = [this](std::size_t& at, std::int64_t count, std::size_t each) {
    at = bytes_;
    bytes_ += static_cast<std::size_t>(count) * each;
  };
  add(notes_, heads, linear_rounded_up(sizeof(Note)));
  add(starts_, heads, starts_bytes_);
  add(gates_, heads * cut.window, linear_rounded_up(sizeof(DeltaGates)));
  add(states_, heads * (cut.window + 1), state_bytes_);
  add(records_, heads * cut.window, record_bytes_);
}

void DeltaWindows::begin(std::int64_t p, std::int64_t n, std::int64_t head,
                         const StateViews& initial) const {
  Note& own = note(p);
  own.n = n;
  own.head = head;
  own.chunks = 0;
  own.base = 0;
  const DeltaSequence all = rows(p);
  for (std::int64_t first = 0; first < all.rows(); first += all.chunk_rows(first)) {
    starts(p)[own.chunks++] = first;
  }
  const StateContent content =
      unit_.load_state(shape_, unit_state(initial[0], n, head), state(p, 0));
  own.empty = content.empty;
  own.finite = content.finite;
}

std::int64_t DeltaWindows::windows() const {
  std::int64_t most = 0;
  for (std::int64_t p = 0; p < heads_; ++p) most = std::max(most, windows(p));
  return most;
}

DeltaColumns DeltaWindows::columns(std::int64_t slice) const {
  const std::int64_t dv = problem_.head_dim_v;
  const std::int64_t units = ceil_div(dv, kSliceUnit);
  return {std::min(units * slice / cut_.slices * kSliceUnit, dv),
          std::min(units * (slice + 1) / cut_.slices * kSliceUnit, dv)};
}

// Rows are walked that are not finite, or whose state is not.
void DeltaWindows::find_walked(std::int64_t p, std::int64_t w) const {
  Note& own = note(p);
  for (std::int64_t c = 0; c < count(p, w); ++c) {
    if (starts_empty(p, w, c)) own.finite = true;
    own.finite = own.finite && own.row_finite[c];
    own.row_by_row[c] = !own.finite;
  }
}

}  // namespace onchip::cpu
