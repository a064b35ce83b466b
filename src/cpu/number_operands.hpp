// Q, K and V of a task as numbers of the arithmetic: fp32, or fp64 for fp64 inputs and where scores
// need its range.
#pragma once

#include "cpu/attention_rows.hpp"
#include "cpu/attention_unit.hpp"
#include "cpu/online_softmax.hpp"
#include "cpu/pieces.hpp"
#include "cpu/simd.hpp"
#include "cpu/tile_products.hpp"

namespace onchip::cpu::ONCHIP_CPU_ISA {
namespace {

template <DType kDType, typename Number>
class NumberOperands {
 public:
  using T = Number;
  static constexpr DType kStored = kDType;

  void place(const ForwardShape& shape, std::int64_t rows, Pieces& pieces) {
    head_dim_qk_ = shape.head_dim_qk;
    head_dim_v_ = shape.head_dim_v;
    k_stride_ = padded(shape.head_dim_qk);
    v_stride_ = padded(shape.head_dim_v);
    q_t_ = pieces.take<T>(rows * shape.head_dim_qk);
    k_buffer_ = pieces.take<T>(kTileKeys * k_stride_);
    v_buffer_ = pieces.take<T>(kTileKeys * v_stride_);
  }

  void load_queries(const ForwardTask& task, const RowTable& rows, std::int64_t first,
                    int vectors) {
    ONCHIP_CPU_ISA::load_queries<kStored, T>(task, rows, first, vectors,
                                             q_t_ + first * head_dim_qk_);
  }

  void load_tile(const ForwardTask& task, std::int64_t key, int begin, int end) {
    k_ = tile_of(task.k, head_dim_qk_, key, begin, end, k_buffer_, k_stride_);
    const Tile<T> v = tile_of(task.v, head_dim_v_, key, begin, end, v_buffer_, v_stride_);
    any_apart_ = false;
    for (int j = begin; j < end; ++j) {
      v_[j] = v.data + j * v.stride;
      // A weight of 0 would make NaN of it, in rows that do not see it too.
      apart_[j] = !all_finite(v_[j], head_dim_v_);
      any_apart_ = any_apart_ || apart_[j];
    }
  }

  // NULL: none.
  const bool* apart() const { return any_apart_ ? apart_ : nullptr; }

  // Whether a tile in which all rows see all keys has to set value rows apart too: no, then every
  // row that a product would spoil reads the value.
  static constexpr bool kAlwaysApart = false;

  template <int kVectors>
  void scores(const ForwardTask&, const RowTable&, std::int64_t first, int begin, int end,
              T* s_t) const {
    ONCHIP_CPU_ISA::scores<T, kVectors>(q_t_ + first * head_dim_qk_, head_dim_qk_, k_, begin, end,
                                        s_t);
  }

  // Scores become probabilities and add their values to o_t. Whether some row saw some key.
  template <int kVectors, bool kPlain>
  bool accumulate(const PanelTile<T>& tile, T* s_t, T* running_max, T* running_sum, bool started,
                  T* o_t) {
    constexpr int kRows = kVectors * kLanes<T>;
    Rescale<T, kVectors> rescale;
    rescale.first = !started;
    const T* seen_v[kTileKeys];
    const int count = softmax_tile<T, kVectors, kPlain>(tile, s_t, running_max, running_sum, v_,
                                                        seen_v, rescale.alpha);
    if (count == 0 && tile.apart == nullptr) return false;
    outputs<T, kVectors>(s_t + tile.begin * kRows, count, kPlain ? v_ + tile.begin : seen_v,
                         head_dim_v_, rescale, o_t);
    return true;
  }

  T value(int key, std::int64_t channel) const { return v_[key][channel]; }

 private:
  // An odd number of cache lines a row: the same column of all rows spreads over the cache's sets.
  static std::int64_t padded(std::int64_t dim) {
    constexpr std::int64_t kLine = 64 / sizeof(T);
    return ((dim + kLine - 1) / kLine | 1) * kLine;
  }

  // The used rows of a tile, in place where they lie densely in the type of the arithmetic, else
  // copied.
  static Tile<T> tile_of(const UnitRows& rows, std::int64_t dim, std::int64_t key, int begin,
                         int end, T* buffer, std::int64_t buffer_stride) {
    const std::byte* from = rows.data + key * rows.row_stride;
    constexpr bool kSameType = (kStored == DType::f32 && sizeof(T) == sizeof(float)) ||
                               (kStored == DType::f64 && sizeof(T) == sizeof(double));
    if (kSameType && rows.row_stride == dim * static_cast<std::int64_t>(sizeof(T))) {
      return {reinterpret_cast<const T*>(from), dim};
    }
    load_rows<kStored>(from + begin * rows.row_stride, rows.row_stride, dim, end - begin,
                       buffer + begin * buffer_stride, buffer_stride);
    return {buffer, buffer_stride};
  }

  std::int64_t head_dim_qk_ = 0;
  std::int64_t head_dim_v_ = 0;
  std::int64_t k_stride_ = 0;  // elements between rows of the buffers
  std::int64_t v_stride_ = 0;
  T* q_t_ = nullptr;       // [panel][head_dim_qk][panel rows], scaled
  T* k_buffer_ = nullptr;  // [kTileKeys][k_stride]
  T* v_buffer_ = nullptr;
  Tile<T> k_;
  const T* v_[kTileKeys];
  bool apart_[kTileKeys];
  bool any_apart_ = false;
};

}  // namespace
}  // namespace onchip::cpu::ONCHIP_CPU_ISA
