// Normalised arguments of decoding: attention over keys and values that lie in a cache, to which
// the call may append the last of them. Strides are in bytes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/attention.hpp"
#include "core/tensor.hpp"

namespace onchip {

// cos and sin: [position, pair]; channels 2 pairs and up pass through.
struct RotaryView {
  const std::byte* cos = nullptr;
  const std::byte* sin = nullptr;
  DType dtype = DType::f32;
  std::int64_t cos_stride = 0;  // of a position
  std::int64_t sin_stride = 0;
  std::int64_t positions = 0;
  std::int64_t pairs = 0;    // rotary_dim / 2
  bool interleaved = false;  // pair p is channels 2p and 2p + 1, else p and p + pairs
  bool wanted = false;
};

// Turns rows to one position after another: in double precision, rounded once to the row's dtype.
class Rotator {
 public:
  static std::int64_t scratch(const RotaryView& rotary) { return 4 * rotary.pairs; }  // doubles

  Rotator(const RotaryView& rotary, double* scratch) : rotary_(rotary), cos_sin_(scratch) {}

  // Where the rows to come stand.
  void move_to(std::int64_t position);

  // `from` and `to` hold `dim` elements, apart or the same.
  void turn(DType dtype, std::int64_t dim, const std::byte* from, std::byte* to) const;

 private:
  const RotaryView& rotary_;
  double* cos_sin_;  // cosines, then sines, then a row's first channels
};

// One sequence as it is after the append: kv_len is the length then, key j is row j of the cache.
struct DecodeSequence : SequenceRange {
  std::int64_t n = 0;
  bool skipped = false;         // no row of it is read or written; its outputs are 0 and -inf
  std::int64_t slot = 0;        // of contiguous caches
  std::int64_t cached_len = 0;  // length before the append
  std::int64_t new_len = 0;     // rows appended
  std::int64_t new_begin = 0;   // row on the axis of k_new and v_new
};

// k, v and slot_kv of the base are those of the new rows, as are its cu_seqlens_kv and seqlens_kv;
// k is not wanted where nothing is appended.
struct AttentionDecodeProblem : AttentionProblem {
  // [slot, row, head, dim], or [page, row, head, dim] where there is a page table.
  RowsView k_cache, v_cache;
  bool v_in_k = false;          // v_cache is k_cache's first channels: k_new brings both
  std::int64_t num_blocks = 0;  // slots or pages
  std::int64_t block_rows = 0;  // capacity or page size
  std::int64_t room = 0;        // rows that one sequence can have: capacity or max_pages page_size
  TensorView cache_seqlens;     // int32 [num_seqs]
  TensorView cache_slot;        // int32 [num_seqs]; absent: 0, 1, ..
  TensorView page_table;        // int32 [num_seqs, max_pages]; absent: contiguous
  TensorView q_positions;       // [num_seqs, slot_q], packed [slot_q]; absent: as the last keys
  RotaryView rotary;

  bool appends() const { return k.wanted; }

  // Below: valid only where lengths and tables are in host memory.

  DecodeSequence cached_sequence(std::int64_t n) const;

  // The slot or page of the entry-th block_rows keys.
  std::int64_t block(const DecodeSequence& s, std::int64_t entry) const;

  std::byte* cached_row(const RowsView& cache, const DecodeSequence& s, std::int64_t j,
                        std::int64_t head) const {
    return cache.at(block(s, j / block_rows), j % block_rows, head);
  }

  // Where rotary embedding puts query row i.
  std::int64_t q_position(const DecodeSequence& s, std::int64_t i) const;
};

// Writes new row t of a sequence to the caches, all heads. `scratch` is a Rotator's.
void append_row(const AttentionDecodeProblem& problem, const DecodeSequence& s, std::int64_t t,
                double* scratch);

}  // namespace onchip
