// dbias on the CPU, summed over the axes that the bias is broadcast over.
//
// dbias is cut into tiles. What is summed into a tile, blocks of rows in ascending order of
// sequence, head and row, is cut into equal pieces: a piece is summed in the arithmetic of the
// call, then the pieces are added in their order in double precision. A tile's pieces follow from
// its extents and from what is summed into it, so neither threads nor who computes which piece nor
// the rest of the call shows in any bit.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/attention_backward_host.hpp"

namespace onchip::cpu {

class BiasGradient {
 public:
  BiasGradient(const AttentionBackwardProblem& problem, const BackwardShape& shape);

  std::size_t worker_bytes() const;  // for the sums of what a worker computes
  std::size_t parts_bytes() const;   // for the sums of all pieces, if they are tasks of their own

  struct Memory {
    std::byte* shift = nullptr;    // as in backward_task()
    std::byte* scratch = nullptr;  // the worker's
    std::byte* sums = nullptr;     // the worker's
    std::byte* parts = nullptr;
  };

  std::int64_t tasks() const;
  void run(std::int64_t task, const Unit& unit, const Memory& memory) const;
  // After all tasks.
  void finish(const std::byte* parts, std::int32_t workers) const;

 private:
  struct Span {
    std::int64_t begin = 0;
    std::int64_t end = 0;
    std::int64_t length() const { return end - begin; }
  };
  struct Tile {
    std::int64_t origin[4];
    Span sequences;
    Span heads;
    std::int64_t rows = 0;  // of elements that anything is summed into
    std::int64_t keys = 0;
    std::int64_t sum_rows = 0;  // of the unit's sums
    std::int64_t sum_keys = 0;
    std::int64_t steps = 0;  // blocks of rows
    std::int64_t pieces = 1;
  };

  bool broadcast(int axis) const { return problem_.dbias_shape[axis] == 1; }
  std::int64_t tiles(int axis) const;
  std::int64_t all_tiles() const { return tiles(0) * tiles(1) * tiles(2) * tiles(3); }
  Span span(const Tile& tile, int axis, std::int64_t all) const;
  std::int64_t steps_of_head(const Tile& tile, const SequenceRange& s) const;
  Tile tile(std::int64_t index) const;

  void sum_piece(const Tile& tile, std::int64_t piece, const Unit& unit,
                 const Memory& memory) const;
  template <typename T>
  void read_row(const Tile& tile, const T* sums, std::int64_t row, double* to) const;
  template <typename T>
  void finish_piece(const Tile& tile, std::int64_t piece, const T* sums, double* parts) const;
  void fold(const Tile& tile, const double* parts) const;
  template <typename ReadRow>
  void store(const Tile& tile, const ReadRow& read_row) const;

  const AttentionBackwardProblem& problem_;
  const BackwardShape shape_;
  const bool wanted_;
  // Of a tile.
  const std::int64_t sizes_[4] = {1, 1, shape_.tile_rows, shape_.chunk_keys};
  std::int64_t most_pieces_ = 1;   // of any tile
  std::int64_t part_numbers_ = 0;  // of all pieces of a tile; 0 where no tile has two
  bool pieces_are_tasks_ = false;
};

}  // namespace onchip::cpu
