#include "cpu/attention_backward_bias.hpp"

#include <algorithm>
#include <cstring>

#include "core/ceil_div.hpp"
#include "core/thread_pool.hpp"

namespace onchip::cpu {

namespace {

// Of a tile, and numbers that they take: a MiB.
constexpr std::int64_t kMaxPieces = 32;
constexpr std::int64_t kMaxPartNumbers = std::int64_t{1} << 17;
static_assert(kMaxBlockRows * kMaxChunkKeys <= kMaxPartNumbers);

// Where the pieces of all tiles take no more than this, each is a task. Else there are more tiles
// than the 32 that fill it, and tasks enough.
constexpr double kMaxPartsBytes = 32.0 * 1024.0 * 1024.0;

std::size_t sums_bytes(const BackwardShape& shape) {
  return rounded_up(
      static_cast<std::size_t>(shape.chunk_keys * shape.tile_rows * arithmetic_size(shape.dtype)));
}

// In eight sums side by side: one would be waited for at every number.
template <typename T>
double sum_of(const T* numbers, std::int64_t count, std::int64_t stride) {
  double sums[8] = {};
  std::int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    for (int m = 0; m < 8; ++m) sums[m] += static_cast<double>(numbers[(i + m) * stride]);
  }
  for (; i < count; ++i) sums[i % 8] += static_cast<double>(numbers[i * stride]);
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

template <typename Stored, typename Convert>
void store_as(std::byte* to, std::int64_t stride, const double* from, std::int64_t count,
              const Convert& convert) {
  for (std::int64_t i = 0; i < count; ++i) {
    const Stored x = convert(from[i]);
    std::memcpy(to + i * stride, &x, sizeof(x));
  }
}

void store_numbers(std::byte* to, DType dtype, std::int64_t stride, const double* from,
                   std::int64_t count) {
  switch (dtype) {
    case DType::f64:
      store_as<double>(to, stride, from, count, [](double x) { return x; });
      return;
    case DType::f32:
      store_as<float>(to, stride, from, count, [](double x) { return static_cast<float>(x); });
      return;
    case DType::f16:
      store_as<Float16>(to, stride, from, count, [](double x) { return to_float16(x); });
      return;
    default:
      store_as<BFloat16>(to, stride, from, count, [](double x) { return to_bfloat16(x); });
      return;
  }
}

}  // namespace

BiasGradient::BiasGradient(const AttentionBackwardProblem& problem, const BackwardShape& shape)
    : problem_(problem), shape_(shape), wanted_(wants_dbias(problem)) {
  if (!wanted_) return;
  // In floating point: views with stride 0 may have more pairs than an integer counts.
  double steps = 1.0;
  if (broadcast(0)) steps *= static_cast<double>(problem.num_seqs);
  if (broadcast(1)) steps *= static_cast<double>(problem.num_heads_q);
  if (broadcast(2)) steps *= static_cast<double>(ceil_div(problem.slot_q, shape.tile_rows));
  if (steps <= 1.0) return;
  most_pieces_ =
      steps < static_cast<double>(kMaxPieces) ? static_cast<std::int64_t>(steps) : kMaxPieces;
  double all = 1.0;
  for (int axis = 0; axis < 4; ++axis) all *= static_cast<double>(tiles(axis));
  const std::int64_t elements =
      std::min(sizes_[2], problem.dbias_shape[2]) * std::min(sizes_[3], problem.dbias_shape[3]);
  part_numbers_ = std::min(most_pieces_ * elements, kMaxPartNumbers);
  pieces_are_tasks_ =
      all * static_cast<double>(part_numbers_) * double{sizeof(double)} <= kMaxPartsBytes;
}

std::size_t BiasGradient::worker_bytes() const {
  if (!wanted_) return 0;
  const std::size_t parts = static_cast<std::size_t>(part_numbers_) * sizeof(double);
  return sums_bytes(shape_) + (pieces_are_tasks_ ? 0 : rounded_up(parts));
}

std::size_t BiasGradient::parts_bytes() const {
  if (!pieces_are_tasks_) return 0;
  return rounded_up(static_cast<std::size_t>(all_tiles() * part_numbers_) * sizeof(double));
}

std::int64_t BiasGradient::tasks() const {
  if (!wanted_) return 0;
  return all_tiles() * (pieces_are_tasks_ ? most_pieces_ : 1);
}

// ---- tiles --------------------------------------------------------------------------------------

std::int64_t BiasGradient::tiles(int axis) const {
  return ceil_div(problem_.dbias_shape[axis], sizes_[axis]);
}

// A broadcast axis is gone through as a whole.
BiasGradient::Span BiasGradient::span(const Tile& tile, int axis, std::int64_t all) const {
  if (broadcast(axis)) return {0, all};
  return {std::min(tile.origin[axis], all), std::min(tile.origin[axis] + sizes_[axis], all)};
}

std::int64_t BiasGradient::steps_of_head(const Tile& tile, const SequenceRange& s) const {
  if (span(tile, 3, s.kv_len).length() == 0) return 0;
  return ceil_div(span(tile, 2, s.q_len).length(), shape_.tile_rows);
}

BiasGradient::Tile BiasGradient::tile(std::int64_t index) const {
  Tile tile;
  for (int axis = 3; axis >= 0; --axis) {
    tile.origin[axis] = index % tiles(axis) * sizes_[axis];
    index /= tiles(axis);
  }
  tile.sequences = span(tile, 0, live_sequences(problem_));
  tile.heads = span(tile, 1, problem_.num_heads_q);
  for (std::int64_t n = tile.sequences.begin; n < tile.sequences.end; ++n) {
    const SequenceRange s = problem_.sequence(n);
    const std::int64_t steps = steps_of_head(tile, s);
    if (steps == 0) continue;
    tile.steps += tile.heads.length() * steps;
    tile.sum_rows = std::max(tile.sum_rows, std::min(span(tile, 2, s.q_len).length(), sizes_[2]));
    tile.sum_keys = std::max(tile.sum_keys, std::min(span(tile, 3, s.kv_len).length(), sizes_[3]));
  }
  tile.rows = broadcast(2) ? std::min<std::int64_t>(tile.sum_rows, 1) : tile.sum_rows;
  tile.keys = broadcast(3) ? std::min<std::int64_t>(tile.sum_keys, 1) : tile.sum_keys;
  if (tile.steps > 0) {
    tile.pieces = std::clamp<std::int64_t>(kMaxPartNumbers / (tile.rows * tile.keys), 1,
                                           std::min(tile.steps, kMaxPieces));
  }
  return tile;
}

// ---- sums ---------------------------------------------------------------------------------------

void BiasGradient::run(std::int64_t task, const Unit& unit, const Memory& memory) const {
  if (!pieces_are_tasks_) {
    const Tile all = tile(task);
    Memory own = memory;
    own.parts = memory.sums + sums_bytes(shape_);
    for (std::int64_t piece = 0; piece < all.pieces; ++piece) sum_piece(all, piece, unit, own);
    if (all.pieces > 1) fold(all, reinterpret_cast<const double*>(own.parts));
    return;
  }
  const std::int64_t index = task / most_pieces_;
  const std::int64_t piece = task % most_pieces_;
  const Tile whole = tile(index);
  if (piece >= whole.pieces) return;
  Memory shared = memory;
  shared.parts += static_cast<std::size_t>(index * part_numbers_) * sizeof(double);
  sum_piece(whole, piece, unit, shared);
}

void BiasGradient::finish(const std::byte* parts, std::int32_t workers) const {
  if (!pieces_are_tasks_) return;
  parallel_for(all_tiles(), workers, [&](std::int64_t index, std::int32_t) {
    const Tile whole = tile(index);
    if (whole.pieces > 1) {
      fold(whole, reinterpret_cast<const double*>(parts) + index * part_numbers_);
    }
  });
}

void BiasGradient::sum_piece(const Tile& tile, std::int64_t piece, const Unit& unit,
                             const Memory& memory) const {
  std::memset(
      memory.sums, 0,
      static_cast<std::size_t>(tile.sum_keys * shape_.tile_rows * arithmetic_size(shape_.dtype)));
  const Span mine{tile.steps * piece / tile.pieces, tile.steps * (piece + 1) / tile.pieces};
  const std::int64_t group = group_size(problem_);
  std::int64_t before = 0;
  for (std::int64_t n = tile.sequences.begin; n < tile.sequences.end && before < mine.end; ++n) {
    const SequenceRange s = problem_.sequence(n);
    const Span rows = span(tile, 2, s.q_len);
    const Span keys = span(tile, 3, s.kv_len);
    const std::int64_t steps = steps_of_head(tile, s);
    for (std::int64_t head = tile.heads.begin; head < tile.heads.end; ++head, before += steps) {
      const std::int64_t first = std::max<std::int64_t>(mine.begin - before, 0);
      const std::int64_t last = std::min(mine.end - before, steps);
      if (first >= last) continue;
      BackwardTask scores = backward_task(problem_, shape_, memory.shift, n, s, head / group);
      const std::int64_t head_row = head % group * s.q_len;
      scores.row_begin = head_row + rows.begin + first * shape_.tile_rows;
      scores.row_end = head_row + std::min(rows.begin + last * shape_.tile_rows, rows.end);
      scores.key_begin = keys.begin;
      scores.key_end = keys.end;
      scores.bias_sums = memory.sums;
      unit.backward(scores, memory.scratch);
    }
  }
  auto* parts = reinterpret_cast<double*>(memory.parts);
  if (shape_.dtype == DType::f64) {
    finish_piece(tile, piece, reinterpret_cast<const double*>(memory.sums), parts);
  } else {
    finish_piece(tile, piece, reinterpret_cast<const float*>(memory.sums), parts);
  }
}

template <typename T>
void BiasGradient::finish_piece(const Tile& tile, std::int64_t piece, const T* sums,
                                double* parts) const {
  if (tile.pieces == 1) {
    store(tile, [&](std::int64_t row, double* to) { read_row(tile, sums, row, to); });
    return;
  }
  for (std::int64_t row = 0; row < tile.rows; ++row) {
    read_row(tile, sums, row, parts + (piece * tile.rows + row) * tile.keys);
  }
}

// The elements of a row from the unit's sums, [key][row].
template <typename T>
void BiasGradient::read_row(const Tile& tile, const T* sums, std::int64_t row, double* to) const {
  const std::int64_t stride = shape_.tile_rows;
  if (!broadcast(2) && !broadcast(3)) {
    for (std::int64_t j = 0; j < tile.keys; ++j)
      to[j] = static_cast<double>(sums[j * stride + row]);
  } else if (!broadcast(2)) {
    to[0] = sum_of(sums + row, tile.sum_keys, stride);
  } else {
    std::fill(to, to + tile.keys, 0.0);
    for (std::int64_t key = 0; key < tile.sum_keys; ++key) {
      to[broadcast(3) ? 0 : key] += sum_of(sums + key * stride, tile.sum_rows, 1);
    }
  }
}

void BiasGradient::fold(const Tile& tile, const double* parts) const {
  store(tile, [&](std::int64_t row, double* to) {
    std::fill(to, to + tile.keys, 0.0);
    for (std::int64_t piece = 0; piece < tile.pieces; ++piece) {
      const double* part = parts + (piece * tile.rows + row) * tile.keys;
      for (std::int64_t j = 0; j < tile.keys; ++j) to[j] += part[j];
    }
  });
}

// Elements that nothing is summed into are 0.
template <typename ReadRow>
void BiasGradient::store(const Tile& tile, const ReadRow& read_row) const {
  const std::int64_t* extents = problem_.dbias_shape;
  const std::int64_t rows = std::min(sizes_[2], extents[2] - tile.origin[2]);
  const std::int64_t keys = std::min(sizes_[3], extents[3] - tile.origin[3]);
  double numbers[kMaxChunkKeys] = {};
  for (std::int64_t i = 0; i < rows; ++i) {
    if (i < tile.rows) {
      read_row(i, numbers);
    } else if (i == tile.rows) {
      std::fill(numbers, numbers + tile.keys, 0.0);
    }
    store_numbers(
        problem_.dbias.at(tile.origin[0], tile.origin[1], tile.origin[2] + i, tile.origin[3]),
        problem_.dbias.dtype, problem_.dbias.column_stride, numbers, keys);
  }
}

}  // namespace onchip::cpu
