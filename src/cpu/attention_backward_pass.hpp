// One task of attention backward: its steps and what they share. attention_backward_unit.cpp goes
// from rows and keys to P and dS, attention_backward_gradients.hpp has what these add to gradients.
#pragma once

#include "cpu/attention_backward_block.hpp"
#include "cpu/attention_backward_products.hpp"
#include "cpu/attention_rows.hpp"
#include "cpu/attention_unit.hpp"
#include "cpu/simd.hpp"

namespace onchip::cpu::ONCHIP_CPU_ISA {
namespace {

// Rows [begin, end) of a block, or keys of a tile.
struct Span {
  int begin = 0;
  int end = 0;

  void include(int from, int to) {
    begin = begin == end ? from : static_cast<int>(smaller(begin, from));
    end = static_cast<int>(larger(end, to));
  }
};

template <DType kStored>
class BackwardPass {
 public:
  using T = Arithmetic<kStored>::T;

  BackwardPass(const BackwardTask& task, std::byte* memory)
      : task_(task),
        one_block_(task.row_end - task.row_begin <= task.shape.tile_rows),
        wants_keys_(task.dk.data != nullptr || task.dv.data != nullptr) {
    scratch_.place(task.shape, memory);
  }

  void run() {
    if (task_.row_begin < task_.row_end) prepare_rows();
    for (std::int64_t key = task_.key_begin; key < task_.key_end; key += task_.shape.chunk_keys) {
      first_key_ = key;
      num_keys_ = static_cast<int>(smaller(task_.shape.chunk_keys, task_.key_end - key));
      run_keys();
    }
    if (task_.dq.data != nullptr) finish_rows();
  }

 private:
  void prepare_rows();
  void run_keys();
  void load_keys();
  void run_tile(std::int64_t key, int offset, int count);
  template <int kVectors>
  void compute_scores(int panel, Span keys, std::int64_t key, int offset);
  void clear_around(int panel, Span keys, Span tile);
  void add_to_bias_sums(int offset, Span tile);
  void add_to_keys(int offset, Span tile);
  void add_to_rows(int offset);
  void add_apart(int offset, Span tile);
  template <Factor kFactor>
  void add_product(const Product<T>& x, std::int64_t rows, std::int64_t channels);
  void fetch_next_row();
  void load_sums();
  void store_sums();
  void finish_rows();
  const T* read_whole_row(const std::byte* from, std::int64_t dim);

  const BackwardTask& task_;
  const bool one_block_;  // dq stays in the scratch memory from the first key to the last
  const bool wants_keys_;
  BackwardScratch<T> scratch_;
  RowBlock<T> block_;
  bool block_loaded_ = false;
  std::int64_t next_row_ = 0;   // of the block after this one, to be fetched
  std::int64_t first_key_ = 0;  // of the chunk
  int num_keys_ = 0;
  bool keys_loaded_ = false;
  bool some_non_finite_k_ = false;
  const T* finite_k_ = nullptr;
  bool non_finite_k_[kMaxChunkKeys];
  Span panel_keys_[kMaxPanels<T>];
};

}  // namespace
}  // namespace onchip::cpu::ONCHIP_CPU_ISA
