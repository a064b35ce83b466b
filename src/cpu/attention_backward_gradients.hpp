// What P and dS of one tile add to the gradients: to dv and dk of its keys, to dq of the block's
// rows, or to the sums of dbias.
#pragma once

#include "cpu/attention_backward_pass.hpp"

namespace onchip::cpu::ONCHIP_CPU_ISA {
namespace {

template <DType kStored>
void BackwardPass<kStored>::add_to_bias_sums(int offset, Span tile) {
  using S = Simd<T>;
  auto* sums = reinterpret_cast<T*>(task_.bias_sums);
  for (int j = tile.begin; j < tile.end; ++j) {
    const T* ds = scratch_.ds_t + j * scratch_.rows;
    T* to = sums + (offset + j) * scratch_.rows;
    for (int r = 0; r < block_.rows; r += kLanes<T>) {
      S::store(to + r, S::load(to + r) + S::load(ds + r));
    }
  }
}

// Rows of the next block come from memory or an outer cache, in bursts that would be waited for:
// they are fetched one by one between the products before.
template <DType kStored>
void BackwardPass<kStored>::fetch_next_row() {
  const std::int64_t end = smaller(block_.first + 2 * scratch_.rows, task_.row_end);
  if (next_row_ >= end) return;
  const std::int64_t head = next_row_ / task_.seqlen_q;
  const std::int64_t i = next_row_ - head * task_.seqlen_q;
  const auto fetch = [&](const UnitRows& rows, std::int64_t bytes) {
    const std::byte* row = rows.data + head * rows.head_stride + i * rows.row_stride;
    constexpr std::int64_t kLine = 64;
    constexpr int kOuterCache = 2;
    for (std::int64_t at = 0; at < bytes; at += kLine) __builtin_prefetch(row + at, 0, kOuterCache);
  };
  constexpr std::int64_t kSize = sizeof(typename Arithmetic<kStored>::Element);
  fetch(task_.q, task_.head_dim_qk * kSize);
  fetch(task_.d_o, task_.head_dim_v * kSize);
  if (task_.dq.data != nullptr) {
    fetch(task_.dq_sums, task_.head_dim_qk * static_cast<std::int64_t>(sizeof(T)));
  }
  ++next_row_;
}

// A register tile's width of channels, of which `channels` are left.
template <DType kStored>
template <Factor kFactor>
void BackwardPass<kStored>::add_product(const Product<T>& x, std::int64_t rows,
                                        std::int64_t channels) {
  if (channels <= kLanes<T>) {
    product<T, kFactor, 1, true>(x, rows);
  } else {
    product<T, kFactor, kPanelVectors, true>(x, rows);
  }
}

// Keys in groups of the register tile's rows, each over the panels that reach it.
template <DType kStored>
void BackwardPass<kStored>::add_to_keys(int offset, Span tile) {
  Span reaching[kMaxTileKeys / kRegisterRows];
  for (int j = tile.begin, g = 0; j < tile.end; j += kRegisterRows, ++g) {
    reaching[g] = {};
    for (int p = 0; p < block_.panels; ++p) {
      const Span& keys = panel_keys_[p];
      if (keys.end <= j || keys.begin >= smaller(j + kRegisterRows, tile.end)) continue;
      reaching[g].include(p * kPanelRows<T>,
                          static_cast<int>(smaller((p + 1) * kPanelRows<T>, block_.rows)));
    }
  }
  const auto add = [&](const T* weights, const T* rows, T* sums, std::int64_t stride,
                       std::int64_t dim) {
    for (std::int64_t d = 0; d < dim; d += kPanelRows<T>) {
      for (int j = tile.begin, g = 0; j < tile.end; j += kRegisterRows, ++g) {
        const Span& from = reaching[g];
        fetch_next_row();
        add_product<Factor::rows>({weights + j * scratch_.rows + from.begin, scratch_.rows,
                                   rows + from.begin * stride + d, stride,
                                   sums + (offset + j) * stride + d, stride, from.end - from.begin},
                                  smaller(kRegisterRows, tile.end - j), dim - d);
      }
    }
  };
  if (task_.dv.data != nullptr) {
    add(scratch_.p_t, scratch_.d_o, scratch_.dv, scratch_.v_stride, task_.head_dim_v);
  }
  if (task_.dk.data != nullptr) {
    add(scratch_.ds_t, scratch_.q, scratch_.dk, scratch_.k_stride, task_.head_dim_qk);
  }
}

// Rows in groups, each over the keys that its panels reach.
template <DType kStored>
void BackwardPass<kStored>::add_to_rows(int offset) {
  Span reached[kMaxBlockRows / kRegisterRows];
  for (int r = 0, g = 0; r < block_.rows; r += kRegisterRows, ++g) {
    reached[g] = {};
    const auto last = static_cast<int>(smaller(r + kRegisterRows, block_.rows)) - 1;
    for (int p = r / kPanelRows<T>; p <= last / kPanelRows<T>; ++p) {
      if (panel_keys_[p].begin < panel_keys_[p].end) {
        reached[g].include(panel_keys_[p].begin, panel_keys_[p].end);
      }
    }
  }
  const std::int64_t stride = scratch_.k_stride;
  for (std::int64_t d = 0; d < task_.head_dim_qk; d += kPanelRows<T>) {
    for (int r = 0, g = 0; r < block_.rows; r += kRegisterRows, ++g) {
      const Span& keys = reached[g];
      fetch_next_row();
      add_product<Factor::columns>({scratch_.ds_t + keys.begin * scratch_.rows + r, scratch_.rows,
                                    finite_k_ + (offset + keys.begin) * stride + d, stride,
                                    scratch_.dq + r * stride + d, stride, keys.end - keys.begin},
                                   smaller(kRegisterRows, block_.rows - r), task_.head_dim_qk - d);
    }
  }
}

template <typename T>
void add_scaled(T factor, const T* row, std::int64_t dim, T* to) {
  for (std::int64_t d = 0; d < dim; ++d) to[d] += factor * row[d];
}

template <DType kStored>
const BackwardPass<kStored>::T* BackwardPass<kStored>::read_whole_row(const std::byte* from,
                                                                      std::int64_t dim) {
  load_rows<kStored>(from, 0, dim, 1, scratch_.whole_row, 0);
  return scratch_.whole_row;
}

// What non-finite rows add to those that are in a visible pair with them.
template <DType kStored>
void BackwardPass<kStored>::add_apart(int offset, Span tile) {
  const auto each_key_of = [&](int r, const T* weights, const T* row, T* sums, std::int64_t stride,
                               std::int64_t dim) {
    for (int j = tile.begin; j < tile.end; ++j) {
      const std::int64_t at = j * scratch_.rows + r;
      if (scratch_.seen[at] != T{0}) {
        add_scaled(weights[at], row, dim, sums + (offset + j) * stride);
      }
    }
  };
  for (int r = 0; r < block_.rows && block_.some_non_finite; ++r) {
    if (block_.non_finite_d_o[r] && task_.dv.data != nullptr) {
      const T* row = read_whole_row(row_of(task_.d_o, block_, r), task_.head_dim_v);
      each_key_of(r, scratch_.p_t, row, scratch_.dv, scratch_.v_stride, task_.head_dim_v);
    }
    if (block_.non_finite_q[r] && task_.dk.data != nullptr) {
      const T* row = read_whole_row(row_of(task_.q, block_, r), task_.head_dim_qk);
      each_key_of(r, scratch_.ds_t, row, scratch_.dk, scratch_.k_stride, task_.head_dim_qk);
    }
  }
  if (!some_non_finite_k_ || task_.dq.data == nullptr) return;
  for (int j = tile.begin; j < tile.end; ++j) {
    if (!non_finite_k_[offset + j]) continue;
    for (int r = 0; r < block_.rows; ++r) {
      const std::int64_t at = j * scratch_.rows + r;
      if (scratch_.seen[at] == T{0}) continue;
      add_scaled(scratch_.ds_t[at], scratch_.k + (offset + j) * scratch_.k_stride,
                 task_.head_dim_qk, scratch_.dq + r * scratch_.k_stride);
    }
  }
}

}  // namespace
}  // namespace onchip::cpu::ONCHIP_CPU_ISA
