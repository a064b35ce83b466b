// Exact attention, backward: gradients by recomputation from the saved o and lse (Dao et al. 2022,
// Algorithm 4; Dao 2023). Compiled once per instruction set.
//
// For a block of query rows and a tile of keys, with rows on the lanes of vectors as in forward:
//   S^T = K Q^T, P^T = exp(S^T - lse), dP^T = V dO^T, dS^T = P^T (dP^T + d_lse - sum(o dO)),
//   dV += P^T dO, dK += dS^T Q, dQ += (dS^T)^T K.
// The first two products take the rows transposed; the other three take all their vector factors as
// they lie and P^T, dS^T as numbers to broadcast, so no score is ever transposed.
//
// S is computed by the same operations in the same order as in forward: what rounding did to lse it
// does to S again, and P keeps its sum of 1 where scores are large.
//
// Every sum has one order. dQ of a row is summed over tiles of keys that start at multiples of the
// tile from key 0, dK and dV of a key over blocks of the row list, in ascending order; the part of
// a tile is a sum of its own in the order of its keys or rows. A pair that is not visible adds
// exactly 0. So neither tasks nor threads nor the way dQ is gathered (in one pass with dK and dV,
// or alone) shows in any bit.
#include "cpu/attention_backward_gradients.hpp"
#include "cpu/attention_backward_pass.hpp"
#include "cpu/attention_backward_scores.hpp"
#include "cpu/attention_backward_shift.hpp"
#include "cpu/attention_unit.hpp"
#include "cpu/score_adjustments.hpp"
#include "cpu/simd.hpp"

namespace onchip::cpu::ONCHIP_CPU_ISA {
namespace {

template <DType kStored>
void BackwardPass<kStored>::prepare_rows() {
  if (one_block_) {
    find_rows(task_, task_.row_begin, scratch_, block_);
    clear(scratch_.dq, scratch_.rows * scratch_.k_stride);
    return;
  }
  if (task_.dq.data == nullptr) return;
  for (std::int64_t first = task_.row_begin; first < task_.row_end; first += scratch_.rows) {
    find_rows(task_, first, scratch_, block_);
    for (int r = 0; r < block_.rows; ++r) {
      std::memset(row_to(task_.dq_sums, block_, r), 0,
                  static_cast<std::size_t>(task_.head_dim_qk) * sizeof(T));
    }
  }
}

template <DType kStored>
void BackwardPass<kStored>::run_keys() {
  keys_loaded_ = false;
  if (task_.dk.data != nullptr) clear(scratch_.dk, num_keys_ * scratch_.k_stride);
  if (task_.dv.data != nullptr) clear(scratch_.dv, num_keys_ * scratch_.v_stride);
  for (std::int64_t first = task_.row_begin; first < task_.row_end; first += scratch_.rows) {
    if (!one_block_) {
      find_rows(task_, first, scratch_, block_);
      block_loaded_ = false;
    }
    if (block_.keys.begin >= first_key_ + num_keys_ || block_.keys.end <= first_key_) continue;
    if (!keys_loaded_) load_keys();
    if (!block_loaded_) load_block<kStored>(task_, scratch_, block_);
    block_loaded_ = true;
    next_row_ = first + scratch_.rows;
    const bool gathers = !one_block_ && task_.dq.data != nullptr;
    if (gathers) load_sums();
    for (int offset = 0; offset < num_keys_; offset += static_cast<int>(scratch_.tile_keys)) {
      run_tile(first_key_ + offset, offset,
               static_cast<int>(smaller(scratch_.tile_keys, num_keys_ - offset)));
    }
    if (gathers) store_sums();
  }
  for (int j = 0; j < num_keys_; ++j) {
    const std::int64_t key = first_key_ + j;
    if (task_.dk.data != nullptr) {
      store_row<kStored>(task_.dk.data + key * task_.dk.row_stride,
                         scratch_.dk + j * scratch_.k_stride, task_.head_dim_qk);
    }
    if (task_.dv.data != nullptr) {
      store_row<kStored>(task_.dv.data + key * task_.dv.row_stride,
                         scratch_.dv + j * scratch_.v_stride, task_.head_dim_v);
    }
  }
}

template <DType kStored>
void BackwardPass<kStored>::load_keys() {
  keys_loaded_ = true;
  load_rows<kStored>(task_.k.data + first_key_ * task_.k.row_stride, task_.k.row_stride,
                     task_.head_dim_qk, num_keys_, scratch_.k, scratch_.k_stride);
  load_rows<kStored>(task_.v.data + first_key_ * task_.v.row_stride, task_.v.row_stride,
                     task_.head_dim_v, num_keys_, scratch_.v, scratch_.v_stride);
  some_non_finite_k_ = false;
  for (int j = 0; j < num_keys_; ++j) {
    non_finite_k_[j] = !all_finite(scratch_.k + j * scratch_.k_stride, task_.head_dim_qk);
    some_non_finite_k_ = some_non_finite_k_ || non_finite_k_[j];
  }
  finite_k_ = scratch_.k;
  if (!some_non_finite_k_) return;
  std::memcpy(scratch_.finite_k, scratch_.k,
              static_cast<std::size_t>(num_keys_ * scratch_.k_stride) * sizeof(T));
  for (int j = 0; j < num_keys_; ++j) {
    if (non_finite_k_[j]) clear(scratch_.finite_k + j * scratch_.k_stride, scratch_.k_stride);
  }
  finite_k_ = scratch_.finite_k;
}

template <DType kStored>
template <int kVectors>
void BackwardPass<kStored>::compute_scores(int panel, Span keys, std::int64_t key, int offset) {
  constexpr int kRows = kVectors * kLanes<T>;
  const std::int64_t first = std::int64_t{panel} * kPanelRows<T>;
  const std::int64_t begin = offset + keys.begin;
  const std::int64_t to = keys.begin * scratch_.rows + first;
  // The sums of forward's score_tile, in its order.
  for (std::int64_t d = 0; d < larger(task_.head_dim_qk, 1); d += kSumChannels) {
    const Product<T> part{scratch_.k + begin * scratch_.k_stride + d,
                          scratch_.k_stride,
                          scratch_.q_t + first * task_.head_dim_qk + d * kRows,
                          kRows,
                          scratch_.p_t + to,
                          scratch_.rows,
                          smaller(kSumChannels, task_.head_dim_qk - d)};
    if (d == 0) {
      product<T, Factor::rows, kVectors, false>(part, keys.end - keys.begin);
    } else {
      product<T, Factor::rows, kVectors, true>(part, keys.end - keys.begin);
    }
  }
  product<T, Factor::rows, kVectors, false>(
      {scratch_.v + begin * scratch_.v_stride, scratch_.v_stride,
       scratch_.d_o_t + first * task_.head_dim_v, kRows, scratch_.ds_t + to, scratch_.rows,
       task_.head_dim_v},
      keys.end - keys.begin);

  PanelScores<T> tile;
  tile.begin = keys.begin;
  tile.end = keys.end;
  T key_begin[kRows];
  T key_end[kRows];
  const PanelRange& range = block_.range[panel];
  tile.partial = range.all.begin > key + keys.begin || range.all.end < key + keys.end;
  if (tile.partial) {
    for (int lane = 0; lane < kRows; ++lane) {
      // Between 0 and the length of a tile: exact in any T.
      const auto relative = [&](std::int64_t at) {
        return static_cast<T>(larger(0, smaller(kMaxTileKeys, at - key)));
      };
      key_begin[lane] = relative(block_.table.key_begin[first + lane]);
      key_end[lane] = relative(block_.table.key_end[first + lane]);
    }
    tile.key_begin = key_begin;
    tile.key_end = key_end;
  }
  const PanelKeys panel_keys{first, key, keys.begin, keys.end};
  if (task_.bias.data != nullptr || task_.mask.data != nullptr ||
      task_.alibi_slopes.data != nullptr || task_.q_segment_ids.data != nullptr) {
    fill_adjustments<T, kRows>(task_, block_.table, panel_keys, scratch_.adjust);
    tile.adjust = scratch_.adjust;
  }
  if (task_.dropout) {
    fill_dropout<T, kRows>(task_, block_.table, panel_keys, scratch_.keep);
    tile.keep = scratch_.keep;
    tile.kept_scale =
        static_cast<T>(65536.0 / (65536.0 - static_cast<double>(task_.dropout_threshold)));
  }
  tile.softcap = static_cast<T>(task_.softcap);
  tile.score_factor = kScalesScores<kStored> ? static_cast<T>(task_.scale) : T{1};
  tile.scale = static_cast<T>(task_.scale);
  tile.of_bias = task_.bias_sums != nullptr;
  tile.lse = scratch_.lse + first;
  tile.shift = scratch_.shift + first;
  tile.p_t = scratch_.p_t + first;
  tile.ds_t = scratch_.ds_t + first;
  tile.stride = scratch_.rows;
  if (block_.some_non_finite || some_non_finite_k_) tile.seen = scratch_.seen + first;
  const bool plain = !tile.partial && tile.adjust == nullptr && tile.keep == nullptr &&
                     tile.softcap == T{0} && !tile.of_bias && tile.seen == nullptr;
  if (plain) {
    differentiate_softmax<T, kVectors, true>(tile);
  } else {
    differentiate_softmax<T, kVectors, false>(tile);
  }
}

// Keys that the panel does not reach, among those that other panels do.
template <DType kStored>
void BackwardPass<kStored>::clear_around(int panel, Span keys, Span tile) {
  const int rows = block_.vectors(panel) * kLanes<T>;
  for (int j = tile.begin; j < tile.end; ++j) {
    if (j == keys.begin) j = keys.end;
    if (j >= tile.end) return;
    const std::int64_t at = j * scratch_.rows + panel * kPanelRows<T>;
    clear(scratch_.p_t + at, rows);
    clear(scratch_.ds_t + at, rows);
    if (block_.some_non_finite || some_non_finite_k_) clear(scratch_.seen + at, rows);
  }
}

template <DType kStored>
void BackwardPass<kStored>::run_tile(std::int64_t key, int offset, int count) {
  Span tile;
  for (int p = 0; p < block_.panels; ++p) {
    const KeyRange& range = block_.range[p].any;
    panel_keys_[p] = {static_cast<int>(larger(range.begin - key, 0)),
                      static_cast<int>(smaller(range.end - key, count))};
    if (panel_keys_[p].begin >= panel_keys_[p].end) {
      panel_keys_[p] = {};
    } else {
      tile.include(panel_keys_[p].begin, panel_keys_[p].end);
    }
  }
  if (tile.begin == tile.end) return;
  for (int p = 0; p < block_.panels; ++p) {
    clear_around(p, panel_keys_[p], tile);
    if (panel_keys_[p].begin == panel_keys_[p].end) continue;
    if (block_.vectors(p) == 1) {
      compute_scores<1>(p, panel_keys_[p], key, offset);
    } else {
      compute_scores<kPanelVectors>(p, panel_keys_[p], key, offset);
    }
  }
  if (task_.bias_sums != nullptr) {
    add_to_bias_sums(offset, tile);
    return;
  }
  if (wants_keys_) add_to_keys(offset, tile);
  if (task_.dq.data != nullptr) add_to_rows(offset);
  if (block_.some_non_finite || some_non_finite_k_) add_apart(offset, tile);
}

template <typename T>
constexpr DType kSums = sizeof(T) == sizeof(double) ? DType::f64 : DType::f32;

template <DType kStored>
void BackwardPass<kStored>::load_sums() {
  for (int r = 0; r < block_.rows; ++r) {
    load_rows<kSums<T>>(row_of(task_.dq_sums, block_, r), 0, task_.head_dim_qk, 1,
                        scratch_.dq + r * scratch_.k_stride, 0);
  }
}

template <DType kStored>
void BackwardPass<kStored>::store_sums() {
  for (int r = 0; r < block_.rows; ++r) {
    store_row<kSums<T>>(row_to(task_.dq_sums, block_, r), scratch_.dq + r * scratch_.k_stride,
                        task_.head_dim_qk);
  }
}

template <DType kStored>
void BackwardPass<kStored>::finish_rows() {
  if (!one_block_ && task_.dq_sums.data == task_.dq.data) return;
  for (std::int64_t first = task_.row_begin; first < task_.row_end; first += scratch_.rows) {
    if (!one_block_) {
      find_rows(task_, first, scratch_, block_);
      load_sums();
    }
    for (int r = 0; r < block_.rows; ++r) {
      store_row<kStored>(row_to(task_.dq, block_, r), scratch_.dq + r * scratch_.k_stride,
                         task_.head_dim_qk);
    }
  }
}

}  // namespace

std::size_t attention_backward_scratch_bytes(const BackwardShape& shape) {
  if (shape.dtype == DType::f64) return BackwardScratch<double>().place(shape, nullptr);
  return BackwardScratch<float>().place(shape, nullptr);
}

void attention_backward(const BackwardTask& task, std::byte* scratch) {
  switch (task.dtype) {
    case DType::f64:
      BackwardPass<DType::f64>(task, scratch).run();
      return;
    case DType::f32:
      BackwardPass<DType::f32>(task, scratch).run();
      return;
    case DType::bf16:
      BackwardPass<DType::bf16>(task, scratch).run();
      return;
    case DType::f16:
      BackwardPass<DType::f16>(task, scratch).run();
      return;
    default:
      return;
  }
}

void attention_backward_shift(const BackwardTask& task) {
  switch (task.dtype) {
    case DType::f64:
      find_shifts<DType::f64>(task);
      return;
    case DType::f32:
      find_shifts<DType::f32>(task);
      return;
    case DType::bf16:
      find_shifts<DType::bf16>(task);
      return;
    case DType::f16:
      find_shifts<DType::f16>(task);
      return;
    default:
      return;
  }
}

}  // namespace onchip::cpu::ONCHIP_CPU_ISA
