// Q, K and V of a bf16 task as pairs of numbers, for the instruction that multiplies pairs of bf16
// and adds both products to an fp32 sum. Scores pair channels, as Q and K lie in memory; outputs
// pair keys, for which V is interleaved once a task and P is rounded to bf16.
//
// The instruction takes subnormal numbers as 0 and makes none. Where that could show, fp32
// arithmetic steps in, for each score or value row by itself, so that nothing else changes:
// - a score of a query or key with subnormal channels is computed in fp32;
// - a value row with numbers so small that their products with small weights would vanish stays out
//   of the products and is added in fp32, as rows with inf or NaN are.
#pragma once

#include "cpu/attention_rows.hpp"
#include "cpu/attention_unit.hpp"
#include "cpu/online_softmax.hpp"
#include "cpu/pieces.hpp"
#include "cpu/simd.hpp"
#include "cpu/tile_products.hpp"

#if ONCHIP_CPU_LEVEL >= 3

namespace onchip::cpu::ONCHIP_CPU_ISA {
namespace {

constexpr std::int64_t kBf16Bytes = 2;
constexpr std::uint16_t kBf16Normal = 1u << 7;  // 2^-126
constexpr std::uint16_t kBf16Small = 37u << 7;  // 2^-90
constexpr std::uint16_t kBf16Inf = 255u << 7;

// The first `count` numbers, at most kFloatLanes; the others are 0 and their memory is not touched.
ONCHIP_INLINE Halves load_halves(const std::byte* from, std::int64_t count) {
  Halves x{};
  if (count >= kFloatLanes) {
    std::memcpy(&x, from, sizeof(x));
  } else {
    std::memcpy(&x, from, static_cast<std::size_t>(count * kBf16Bytes));
  }
  return x;
}

// Whether some number of a row is not 0 but below `smallest`, or if kSpecial is inf or NaN.
template <bool kSpecial>
bool has_difficult(const std::byte* row, std::int64_t dim, std::uint16_t smallest) {
  Halves found{};
  for (std::int64_t d = 0; d < dim; d += kFloatLanes) {
    const Halves magnitude = load_halves(row + d * kBf16Bytes, dim - d) & 0x7fff;
    // 0 - 1 is the largest number.
    found |= (Halves)((magnitude - 1) < static_cast<std::uint16_t>(smallest - 1));
    if (kSpecial) found |= (Halves)(magnitude >= kBf16Inf);
  }
  unsigned any = 0;
  for (int lane = 0; lane < kFloatLanes; ++lane) any |= found[lane];
  return any != 0;
}

// s_t[j][lane] = factor sum_d k[j][d] q[d][lane] for kKeys keys, of which only the first `count`
// exist, channels in pairs: q_t[pair][lane], k[j][pair].
template <int kVectors, int kKeys>
[[gnu::noinline]] void score_pairs(const std::uint32_t* q_t, std::int64_t pairs, const std::byte* k,
                                   std::int64_t k_stride, int count, float factor, float* s_t) {
  constexpr int kRows = kVectors * kFloatLanes;
  constexpr std::int64_t kPairBytes = 2 * kBf16Bytes;
  Vec<float> sum[kKeys][kVectors] = {};
  // One address for three rows: with it, its next and next but one are addressing modes.
  constexpr int kStep = kKeys % 3 == 0 ? 3 : 1;
  const std::byte* row[kKeys / kStep];
  unroll<kKeys / kStep>([&](auto i) {
    const int key = kStep * i;
    row[i] = k + (key < count ? key : count - 1) * k_stride;
  });
  for (std::int64_t pair = 0; pair < pairs; ++pair) {
    Words q[kVectors];
    unroll<kVectors>([&](auto v) { std::memcpy(&q[v], q_t + v * kFloatLanes, sizeof(q[v])); });
    unroll<kKeys>([&](auto j) {
      std::uint32_t key;
      std::memcpy(&key, row[j / kStep] + j % kStep * k_stride, sizeof(key));
      const Words keys = key - Words{};
      unroll<kVectors>([&](auto v) { sum[j][v] = dot_pairs(sum[j][v], keys, q[v]); });
    });
    unroll<kKeys / kStep>([&](auto i) { row[i] += kPairBytes; });
    q_t += kRows;
  }
  const Vec<float> by = Simd<float>::broadcast(factor);
  unroll<kKeys>([&](auto j) {
    unroll<kVectors>(
        [&](auto v) { Simd<float>::store(s_t + j * kRows + v * kFloatLanes, sum[j][v] * by); });
  });
}

// o_t[d][lane] = o_t[d][lane] alpha[lane] + sum_j v[j][d] p[j][lane] for kChannels channels, of
// which only the first `count` exist, keys in pairs: p_t[pair][lane], v[pair][d].
template <int kVectors, int kChannels>
[[gnu::noinline]] void output_pairs(const float* p_t, int pairs, const std::uint32_t* v,
                                    std::int64_t v_stride, int count,
                                    const Rescale<float, kVectors>& rescale, float* o_t) {
  using S = Simd<float>;
  constexpr int kRows = kVectors * kFloatLanes;
  Vec<float> sum[kChannels][kVectors] = {};
  for (int pair = 0; pair < pairs; ++pair) {
    Words p[kVectors];
    unroll<kVectors>([&](auto i) { p[i] = (Words)S::load(p_t + i * kFloatLanes); });
    // v has room for whole vectors of channels.
    unroll<kChannels>([&](auto d) {
      const Words value = v[d] - Words{};
      unroll<kVectors>([&](auto i) { sum[d][i] = dot_pairs(sum[d][i], value, p[i]); });
    });
    v += v_stride;
    p_t += kRows;
  }
  unroll<kChannels>([&](auto d) {
    if (d >= count) return;
    unroll<kVectors>([&](auto i) {
      float* at = o_t + d * kRows + i * kFloatLanes;
      if (!rescale.first) sum[d][i] = S::fma(S::load(at), rescale.alpha[i], sum[d][i]);
      S::store(at, sum[d][i]);
    });
  });
}

class PairOperands {
 public:
  using T = float;
  static constexpr DType kStored = DType::bf16;

  void place(const ForwardShape& shape, std::int64_t rows, Pieces& pieces) {
    head_dim_qk_ = shape.head_dim_qk;
    head_dim_v_ = shape.head_dim_v;
    pairs_ = (shape.head_dim_qk + 1) / 2;
    k_buffer_stride_ = kPairBytes * padded(pairs_);
    v_stride_ = padded(shape.head_dim_v);
    q_t_ = pieces.take<std::uint32_t>(rows * pairs_);
    small_q_ = pieces.take<bool>(rows);
    k_buffer_ = pieces.take<std::byte>(kTileKeys * k_buffer_stride_);
    v_ = pieces.take<std::uint32_t>(kTileKeys / 2 * v_stride_);
  }

  // Q times the power of two in scale, which is exact and keeps scores in range as scale itself
  // would; what is left of scale, in [1, 2), multiplies the scores.
  void load_queries(const ForwardTask& task, const RowTable& rows, std::int64_t first,
                    int vectors) {
    using S = Simd<float>;
    int exponent = 0;
    factor_ = static_cast<float>(2.0 * __builtin_frexp(task.scale, &exponent));
    const Vec<float> power = S::broadcast(static_cast<float>(__builtin_ldexp(1.0, exponent - 1)));
    const Vec<float> normal = S::broadcast(__FLT_MIN__);
    const int panel_rows = vectors * kFloatLanes;
    std::uint32_t* q_t = q_t_ + first * pairs_;
    for (int lane = 0; lane < panel_rows; lane += kFloatLanes) {
      const std::byte* source[kFloatLanes];
      for (int i = 0; i < kFloatLanes; ++i) {
        source[i] = query(task, rows, first + lane + i);
        small_q_[first + lane + i] = false;
      }
      for (std::int64_t pair = 0; pair < pairs_; pair += kFloatLanes) {
        Vec<float> square[kFloatLanes];
        for (int i = 0; i < kFloatLanes; ++i) {
          const std::int64_t channels = smaller(2 * kFloatLanes, head_dim_qk_ - 2 * pair);
          Words words{};
          std::memcpy(&words, source[i] + pair * kPairBytes,
                      static_cast<std::size_t>(channels * kBf16Bytes));
          const auto low = (Vec<float>)(words << 16);
          const auto high = (Vec<float>)(words & 0xffff0000u);
          const auto vanishes = [&](Vec<float> x) {
            const Vec<float> y = x * power;
            return S::both(S::less(S::max(y, -y), normal),
                           S::complement(S::equal(x, Vec<float>{})));
          };
          if (S::any(S::either(vanishes(low), vanishes(high)))) small_q_[first + lane + i] = true;
          square[i] = (Vec<float>)to_pairs(low * power, high * power);
        }
        transpose<float>(square);
        const std::int64_t count = smaller(kFloatLanes, pairs_ - pair);
        for (std::int64_t i = 0; i < count; ++i) {
          std::memcpy(q_t + (pair + i) * panel_rows + lane, &square[i], sizeof(square[i]));
        }
      }
      for (int i = 0; i < kFloatLanes; ++i) any_small_q_ |= small_q_[first + lane + i];
    }
  }

  void load_tile(const ForwardTask& task, std::int64_t key, int begin, int end) {
    load_keys(task.k, key, begin, end);
    load_values(task.v, key, begin, end);
  }

  const bool* apart() const { return any_apart_ ? apart_ : nullptr; }
  static constexpr bool kAlwaysApart = true;

  template <int kVectors>
  void scores(const ForwardTask& task, const RowTable& rows, std::int64_t first, int begin, int end,
              float* s_t) const {
    constexpr int kRows = kVectors * kFloatLanes;
    const std::uint32_t* q_t = q_t_ + first * pairs_;
    int j = begin;
    for (; j + kRegisterRows <= end; j += kRegisterRows) {
      score_pairs<kVectors, kRegisterRows>(q_t, pairs_, k_ + j * k_stride_, k_stride_,
                                           kRegisterRows, factor_, s_t + j * kRows);
    }
    for (; j < end; j += kTailRows) {
      const int count = static_cast<int>(smaller(kTailRows, end - j));
      score_pairs<kVectors, kTailRows>(q_t, pairs_, k_ + j * k_stride_, k_stride_, count, factor_,
                                       s_t + j * kRows);
    }
    if (!any_small_q_ && !any_small_k_) return;
    for (j = begin; j < end; ++j) {
      for (int lane = 0; lane < kRows; ++lane) {
        if (!small_k_[j] && !small_q_[first + lane]) continue;
        s_t[j * kRows + lane] =
            score(query(task, rows, first + lane), k_ + j * k_stride_, task.scale);
      }
    }
  }

  template <int kVectors, bool kPlain>
  bool accumulate(const PanelTile<float>& tile, float* s_t, float* running_max, float* running_sum,
                  bool started, float* o_t) {
    constexpr int kRows = kVectors * kFloatLanes;
    Rescale<float, kVectors> rescale;
    rescale.first = !started;
    if (!softmax_pairs<kVectors, kPlain>(tile, s_t, running_max, running_sum, rescale.alpha)) {
      return false;
    }
    const int first = tile.begin / 2;
    const int pairs = (tile.end + 1) / 2 - first;
    const float* p_t = s_t + first * kRows;
    const std::uint32_t* v = v_ + first * v_stride_;
    std::int64_t d = 0;
    for (; d + kRegisterRows <= head_dim_v_; d += kRegisterRows) {
      output_pairs<kVectors, kRegisterRows>(p_t, pairs, v + d, v_stride_, kRegisterRows, rescale,
                                            o_t + d * kRows);
    }
    for (; d < head_dim_v_; d += kTailRows) {
      const int count = static_cast<int>(smaller(kTailRows, head_dim_v_ - d));
      output_pairs<kVectors, kTailRows>(p_t, pairs, v + d, v_stride_, count, rescale,
                                        o_t + d * kRows);
    }
    return true;
  }

  float value(int key, std::int64_t channel) const {
    return number(v_rows_ + key * v_row_stride_ + channel * kBf16Bytes);
  }

 private:
  static constexpr std::int64_t kPairBytes = 2 * kBf16Bytes;

  // An odd number of cache lines a row, in words.
  static std::int64_t padded(std::int64_t words) { return ((words + 15) / 16 | 1) * 16; }

  static float number(const std::byte* from) {
    std::uint16_t bits;
    std::memcpy(&bits, from, sizeof(bits));
    return __builtin_bit_cast(float, static_cast<std::uint32_t>(bits) << 16);
  }

  static const std::byte* query(const ForwardTask& task, const RowTable& rows, std::int64_t row) {
    return task.q.data + rows.head[row] * task.q.head_stride +
           rows.position[row] * task.q.row_stride;
  }

  // scale q . k in fp32.
  float score(const std::byte* q, const std::byte* k, double scale) const {
    using S = Simd<float>;
    const Vec<float> by = S::broadcast(static_cast<float>(scale));
    Vec<float> sums{};
    for (std::int64_t d = 0; d < head_dim_qk_; d += kFloatLanes) {
      const Vec<float> q_d = from_bf16(load_halves(q + d * kBf16Bytes, head_dim_qk_ - d));
      const Vec<float> k_d = from_bf16(load_halves(k + d * kBf16Bytes, head_dim_qk_ - d));
      sums = S::fma(q_d * by, k_d, sums);
    }
    float sum = 0.0f;
    for (int lane = 0; lane < kFloatLanes; ++lane) sum += sums[lane];
    return sum;
  }

  // In place where rows lie densely in whole pairs, else copied.
  void load_keys(const UnitRows& rows, std::int64_t key, int begin, int end) {
    const std::byte* from = rows.data + key * rows.row_stride;
    const std::int64_t row_bytes = head_dim_qk_ * kBf16Bytes;
    any_small_k_ = false;
    for (int j = begin; j < end; ++j) {
      small_k_[j] = has_difficult<false>(from + j * rows.row_stride, head_dim_qk_, kBf16Normal);
      any_small_k_ = any_small_k_ || small_k_[j];
    }
    if (rows.row_stride == row_bytes && head_dim_qk_ % 2 == 0) {
      k_ = from;
      k_stride_ = row_bytes;
      return;
    }
    for (int j = begin; j < end; ++j) {
      std::byte* to = k_buffer_ + j * k_buffer_stride_;
      std::memcpy(to, from + j * rows.row_stride, static_cast<std::size_t>(row_bytes));
      if (head_dim_qk_ % 2 != 0) std::memset(to + row_bytes, 0, kBf16Bytes);
    }
    k_ = k_buffer_;
    k_stride_ = k_buffer_stride_;
  }

  // Rows set apart, and the other key of a pair that the range cuts, become 0.
  void load_values(const UnitRows& rows, std::int64_t key, int begin, int end) {
    v_rows_ = rows.data + key * rows.row_stride;
    v_row_stride_ = rows.row_stride;
    any_apart_ = false;
    for (int j = begin; j < end; ++j) {
      apart_[j] = has_difficult<true>(v_rows_ + j * v_row_stride_, head_dim_v_, kBf16Small);
      any_apart_ = any_apart_ || apart_[j];
    }
    for (int pair = begin / 2; 2 * pair < end; ++pair) {
      const int low = 2 * pair;
      const bool has_low = low >= begin && !apart_[low];
      const bool has_high = low + 1 < end && !apart_[low + 1];
      const std::byte* row = v_rows_ + low * v_row_stride_;
      std::uint32_t* to = v_ + pair * v_stride_;
      for (std::int64_t d = 0; d < head_dim_v_; d += kFloatLanes) {
        const std::int64_t at = d * kBf16Bytes;
        Halves a{};
        Halves b{};
        if (has_low) a = load_halves(row + at, head_dim_v_ - d);
        if (has_high) b = load_halves(row + v_row_stride_ + at, head_dim_v_ - d);
        const Words words =
            __builtin_convertvector(a, Words) | (__builtin_convertvector(b, Words) << 16);
        std::memcpy(to + d, &words, sizeof(words));
      }
    }
  }

  std::int64_t head_dim_qk_ = 0;
  std::int64_t head_dim_v_ = 0;
  std::int64_t pairs_ = 0;            // of channels of Q and K
  std::int64_t k_buffer_stride_ = 0;  // bytes
  std::int64_t v_stride_ = 0;         // words
  std::uint32_t* q_t_ = nullptr;      // [panel][pairs][panel rows], times a power of two
  bool* small_q_ = nullptr;           // [row]
  std::byte* k_buffer_ = nullptr;     // [kTileKeys][k_buffer_stride]
  std::uint32_t* v_ = nullptr;        // [kTileKeys / 2][v_stride]: keys 2 i (low half) and 2 i + 1
  const std::byte* k_ = nullptr;
  std::int64_t k_stride_ = 0;  // bytes
  const std::byte* v_rows_ = nullptr;
  std::int64_t v_row_stride_ = 0;
  float factor_ = 1.0f;
  bool small_k_[kTileKeys];
  bool apart_[kTileKeys];
  bool any_small_q_ = false;
  bool any_small_k_ = false;
  bool any_apart_ = false;
};

}  // namespace
}  // namespace onchip::cpu::ONCHIP_CPU_ISA

#endif
