// Everything that is added to the scores of a tile or hides some of them, and the dropout mask,
// laid out as the scores are: one row of lanes a key.
#pragma once

#include "cpu/attention_rows.hpp"
#include "cpu/attention_unit.hpp"
#include "cpu/simd.hpp"

namespace onchip::cpu::ONCHIP_CPU_ISA {
namespace {

// One panel of query rows, one tile of keys.
struct PanelKeys {
  std::int64_t first_row = 0;  // of the task
  std::int64_t first_key = 0;  // of the tile
  int begin = 0;               // keys of the tile that some row may see
  int end = 0;
};

template <typename Stored>
Stored load_as(const std::byte* from) {
  Stored x;
  std::memcpy(&x, from, sizeof(x));
  return x;
}

// adjust[j][lane] = bias[lane][j] where columns lie side by side, in squares that are transposed.
template <DType kBias, typename T, int kRows>
void load_bias_squares(const std::byte* const (&bias)[kRows], int count, T* adjust) {
  constexpr int kCount = kLanes<T>;
  constexpr std::int64_t kSize = sizeof(typename Arithmetic<kBias>::Element);
  for (int lane = 0; lane < kRows; lane += kCount) {
    for (int j = 0; j < count; j += kCount) {
      const int width = static_cast<int>(smaller(kCount, count - j));
      Vec<T> square[kCount];
      for (int i = 0; i < kCount; ++i) {
        square[i] = load_vector<kBias>(bias[lane + i] + j * kSize, width);
      }
      transpose<T>(square);
      for (int i = 0; i < width; ++i) Simd<T>::store(adjust + (j + i) * kRows + lane, square[i]);
    }
  }
}

template <typename T, int kRows>
void load_bias(const ForwardTask& task, const RowTable& rows, const PanelKeys& keys, T* adjust) {
  const UnitScores& scores = task.bias;
  const int count = keys.end - keys.begin;
  const std::byte* bias[kRows];
  for (int lane = 0; lane < kRows; ++lane) {
    const std::int64_t r = keys.first_row + lane;
    bias[lane] = scores.data + rows.head[r] * scores.head_stride +
                 rows.position[r] * scores.row_stride +
                 (keys.first_key + keys.begin) * scores.column_stride;
  }
  if (scores.dense_columns) {
    if constexpr (sizeof(T) == sizeof(double)) {
      if (scores.dtype == DType::f64) {
        load_bias_squares<DType::f64, T, kRows>(bias, count, adjust);
        return;
      }
    } else {
      switch (scores.dtype) {
        case DType::f32:
          load_bias_squares<DType::f32, T, kRows>(bias, count, adjust);
          return;
        case DType::bf16:
          load_bias_squares<DType::bf16, T, kRows>(bias, count, adjust);
          return;
        case DType::f16:
          load_bias_squares<DType::f16, T, kRows>(bias, count, adjust);
          return;
        default:
          break;
      }
    }
  }
  const int columns = scores.column_stride == 0 ? 1 : count;
  for (int lane = 0; lane < kRows; ++lane) {
    for (int j = 0; j < columns; ++j) {
      adjust[j * kRows + lane] =
          load_number<T>(bias[lane] + j * scores.column_stride, scores.dtype);
    }
  }
  for (int j = columns; j < count; ++j) {
    std::memcpy(adjust + j * kRows, adjust, kRows * sizeof(T));
  }
}

// Subtracts slope |i + offset - j|.
template <typename T, int kRows>
void subtract_alibi(const ForwardTask& task, const RowTable& rows, const PanelKeys& keys,
                    T* adjust) {
  using S = Simd<T>;
  T slope[kRows];
  T diagonal[kRows];
  for (int lane = 0; lane < kRows; ++lane) {
    const std::int64_t r = keys.first_row + lane;
    slope[lane] =
        load_number<T>(task.alibi_slopes.data + rows.head[r] * task.alibi_slopes.head_stride,
                       task.alibi_slopes.dtype);
    diagonal[lane] =
        static_cast<T>(rows.position[r] + task.diagonal_offset - keys.first_key - keys.begin);
  }
  for (int j = 0; j < keys.end - keys.begin; ++j) {
    for (int lane = 0; lane < kRows; lane += kLanes<T>) {
      const Vec<T> distance = S::load(diagonal + lane) - S::broadcast(static_cast<T>(j));
      T* at = adjust + j * kRows + lane;
      S::store(at, S::load(at) - S::load(slope + lane) * S::max(distance, -distance));
    }
  }
}

template <typename T, int kRows>
void exclude_masked(const ForwardTask& task, const RowTable& rows, const PanelKeys& keys,
                    T* adjust) {
  const UnitScores& scores = task.mask;
  const bool same_for_all = scores.head_stride == 0 && scores.row_stride == 0;
  for (int lane = 0; lane < kRows; ++lane) {
    const std::int64_t r = keys.first_row + lane;
    const std::byte* mask = scores.data + rows.head[r] * scores.head_stride +
                            rows.position[r] * scores.row_stride +
                            (keys.first_key + keys.begin) * scores.column_stride;
    for (int j = 0; j < keys.end - keys.begin; ++j) {
      if (mask[j * scores.column_stride] != std::byte{0}) continue;
      for (int i = lane; i < (same_for_all ? kRows : lane + 1); ++i) {
        adjust[j * kRows + i] = -kInfinity<T>;
      }
    }
    if (same_for_all) return;
  }
}

template <typename T, int kRows>
void exclude_other_segments(const ForwardTask& task, const RowTable& rows, const PanelKeys& keys,
                            T* adjust) {
  std::int32_t q_id[kRows];
  for (int lane = 0; lane < kRows; ++lane) {
    q_id[lane] =
        load_as<std::int32_t>(task.q_segment_ids.data +
                              rows.position[keys.first_row + lane] * task.q_segment_ids.row_stride);
  }
  for (int j = 0; j < keys.end - keys.begin; ++j) {
    const auto id =
        load_as<std::int32_t>(task.kv_segment_ids.data +
                              (keys.first_key + keys.begin + j) * task.kv_segment_ids.row_stride);
    T* at = adjust + j * kRows;
    for (int lane = 0; lane < kRows; ++lane) at[lane] = q_id[lane] == id ? at[lane] : -kInfinity<T>;
  }
}

// adjust[j][lane], j from keys.begin: bias - alibi, -inf where the pair is excluded.
template <typename T, int kRows>
void fill_adjustments(const ForwardTask& task, const RowTable& rows, const PanelKeys& keys,
                      T* adjust) {
  T* from = adjust + keys.begin * kRows;
  if (task.bias.data != nullptr) {
    load_bias<T, kRows>(task, rows, keys, from);
  } else {
    for (int at = 0; at < (keys.end - keys.begin) * kRows; at += kLanes<T>) {
      Simd<T>::store(from + at, Vec<T>{});
    }
  }
  if (task.alibi_slopes.data != nullptr) subtract_alibi<T, kRows>(task, rows, keys, from);
  if (task.mask.data != nullptr) exclude_masked<T, kRows>(task, rows, keys, from);
  if (task.q_segment_ids.data != nullptr) exclude_other_segments<T, kRows>(task, rows, keys, from);
}

// keep[j][lane] = 1, or 0 where the pair is dropped, for whole groups of 16 keys around the used
// ones: the blocks of core/philox.hpp, one lane a query row. Tiles start at multiples of 16.
template <typename T, int kRows>
void fill_dropout(const ForwardTask& task, const RowTable& rows, const PanelKeys& keys, T* keep) {
  std::uint32_t stream[kRows];
  std::uint32_t row[kRows];
  bool upper[kRows];  // in the second half of a group of 16 rows: the block's last two words
  for (int lane = 0; lane < kRows; ++lane) {
    const std::int64_t i = rows.position[keys.first_row + lane];
    stream[lane] =
        task.dropout_stream + static_cast<std::uint32_t>(rows.head[keys.first_row + lane]);
    row[lane] = static_cast<std::uint32_t>(8 * (i / 16) + i % 8);
    upper[lane] = i / 8 % 2 != 0;
  }
  for (int group = keys.begin / 16 * 16; group < keys.end; group += 16) {
    for (int pair = 0; pair < 4; ++pair) {
      const auto column = static_cast<std::uint32_t>(4 * ((keys.first_key + group) / 16) + pair);
      std::uint32_t c0[kRows], c1[kRows], c2[kRows], c3[kRows];
      for (int lane = 0; lane < kRows; ++lane) {
        c0[lane] = task.dropout_offset;
        c1[lane] = stream[lane];
        c2[lane] = row[lane];
        c3[lane] = column;
      }
      std::uint32_t key0 = task.dropout_key[0];
      std::uint32_t key1 = task.dropout_key[1];
      for (int round = 0; round < 10; ++round) {
        for (int lane = 0; lane < kRows; ++lane) {
          const std::uint64_t p0 = std::uint64_t{0xD2511F53u} * c0[lane];
          const std::uint64_t p1 = std::uint64_t{0xCD9E8D57u} * c2[lane];
          c0[lane] = static_cast<std::uint32_t>(p1 >> 32) ^ c1[lane] ^ key0;
          c1[lane] = static_cast<std::uint32_t>(p1);
          c2[lane] = static_cast<std::uint32_t>(p0 >> 32) ^ c3[lane] ^ key1;
          c3[lane] = static_cast<std::uint32_t>(p0);
        }
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
      }
      for (int lane = 0; lane < kRows; ++lane) {
        const std::uint32_t low = upper[lane] ? c2[lane] : c0[lane];   // keys j, j + 1
        const std::uint32_t high = upper[lane] ? c3[lane] : c1[lane];  // keys j + 8, j + 9
        const auto kept = [&](std::uint32_t field) {
          return (field & 0xffffu) >= task.dropout_threshold ? T{1} : T{0};
        };
        T* to = keep + (group + 2 * pair) * kRows + lane;
        to[0] = kept(low);
        to[kRows] = kept(low >> 16);
        to[8 * kRows] = kept(high);
        to[9 * kRows] = kept(high >> 16);
      }
    }
  }
}

}  // namespace
}  // namespace onchip::cpu::ONCHIP_CPU_ISA
