// The two matrix products of attention for a few query rows: channels lie on the lanes of the
// vectors, so that one row fills them as well as many, and keys are read as they lie in memory.
#pragma once

#include "cpu/simd.hpp"

namespace onchip::cpu::ONCHIP_CPU_ISA {
namespace {

// How the channels of a row lie in vectors: kSpan neighbours fill kPieces of them. Of bf16 the even
// ones fill one vector and the odd ones another, since that takes one instruction each.
template <DType kStored, typename T>
struct Channels {
  using S = Simd<T>;
  static constexpr bool kPairs = kStored == DType::bf16 && sizeof(T) == sizeof(float);
  static constexpr int kPieces = kPairs ? 2 : 1;
  static constexpr int kSpan = kPieces * kLanes<T>;
  static constexpr std::int64_t kSize = sizeof(typename Arithmetic<kStored>::Element);
  // Whether scores may be sums of dot products of pairs, see query_pairs.
  static constexpr bool kDots = kPairs && ONCHIP_CPU_LEVEL >= 3;

  // The first `count` channels, at least one; the others are 0 and their memory is not touched.
  static ONCHIP_INLINE Words load_words(const std::byte* from, int count) {
    Words words{};
    if (count == kSpan) {
      std::memcpy(&words, from, sizeof(words));
    } else {
      std::memcpy(&words, from, static_cast<std::size_t>(count * kSize));
    }
    return words;
  }

  // The same.
  static ONCHIP_INLINE void load(const std::byte* from, int count, Vec<T>* pieces) {
    if constexpr (kPairs) {
      const Words words = load_words(from, count);
      pieces[0] = (Vec<T>)(words << 16);
      pieces[1] = (Vec<T>)(words & 0xffff0000u);
    } else {
      pieces[0] = load_numbers<kStored, T>(from, count);
    }
  }

  static ONCHIP_INLINE void store(std::byte* to, const Vec<T>* pieces, int count) {
    if constexpr (kPairs) {
      const Words words = widened(to_bf16(pieces[0])) | widened(to_bf16(pieces[1])) << 16;
      std::memcpy(to, &words, static_cast<std::size_t>(count * kSize));
    } else {
      store_numbers<kStored, T>(to, pieces[0], count);
    }
  }
};

#if ONCHIP_CPU_LEVEL >= 3

// A query of bf16 in pairs, times a power of two, zeros behind its last channel. Returns whether
// its scores can be sums of dot products: the instruction takes subnormal numbers as 0, so the
// query must have none, and be so small that those of keys could not show.
inline bool query_pairs(const std::byte* from, std::int64_t dim, float power, float* to) {
  using S = Simd<float>;
  using C = Channels<DType::bf16, float>;
  const Vec<float> by = S::broadcast(power);
  const Vec<float> smallest = S::broadcast(__FLT_MIN__);
  const Vec<float> largest = S::broadcast(0x1p80f);
  auto fits = S::all_true();
  for (std::int64_t d = 0; d < dim; d += C::kSpan, to += kFloatLanes) {
    Vec<float> x[2];
    C::load(from + d * C::kSize,
            static_cast<int>(dim - d < C::kSpan ? dim - d : std::int64_t{C::kSpan}), x);
    unroll<2>([&](auto i) {
      const auto is_zero = S::equal(x[i], Vec<float>{});
      x[i] = x[i] * by;
      const Vec<float> magnitude = S::max(x[i], -x[i]);
      fits = S::both(fits, S::either(is_zero, S::both(S::less_equal(smallest, magnitude),
                                                      S::less(magnitude, largest))));
    });
    S::store(to, (Vec<float>)to_pairs(x[0], x[1]));
  }
  return !S::any(S::complement(fits));
}

#endif

// Rows that are computed at a time: of one kv head, which share one read of a key in registers, or
// of as many heads.
template <typename T>
constexpr int kBlockRows = kLanes<T> < 4 ? kLanes<T> : 4;

constexpr int kOutputVectors = ONCHIP_CPU_LEVEL >= 2 ? 16 : 8;  // accumulators of an output block
constexpr int kMostVectors = 8;                                 // of one row

// Asks memory for the 64 bytes around from + distance, wherever that is, into the outer private
// cache: the inner one would lose them before they are used.
ONCHIP_INLINE void prefetch(const std::byte* from, std::int64_t distance) {
  __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<std::uintptr_t>(from) +
                                                   static_cast<std::uintptr_t>(distance)),
                     0, 2);
  // NOTE(codegen): gcc 12 takes a function that only prefetches for one without effect and drops
  // its calls.
  asm volatile("");  // NOLINT(portability-no-assembler)
}

// Lane i of the result is the sum of the lanes of x[i]; the order of its additions is that of every
// other lane. x is used up.
template <typename T, int kCount = kLanes<T>>
ONCHIP_INLINE Vec<T> add_lanes(Vec<T>* x) {
  if constexpr (kCount == 1) {
    return x[0];
  } else {
    using Lanes = MakeIndexList<kLanes<T>>::Type;
    unroll<kCount / 2>([&](auto i) {
      x[i] = interleave_low<T>(x[i], x[i + kCount / 2], Lanes{}) +
             interleave_high<T>(x[i], x[i + kCount / 2], Lanes{});
    });
    return add_lanes<T, kCount / 2>(x);
  }
}

// Keys [begin, end) of a tile, or their values: where each lies, first kv head.
struct StreamedRows {
  const std::byte* const* rows;
  std::int64_t head_stride;
  int begin;
  int end;
  // What lies so many bytes behind each is brought from memory meanwhile (0: nothing is), a little
  // at a time: what a core can have open is not much, and a burst would hold up the arithmetic.
  std::int64_t ahead;
};

// Queries: a row lies as in Channels, scaled, padded with zeros to whole spans; if kDots in pairs,
// and `factor` is what is left to scale.
template <typename T>
struct QueryRows {
  const T* rows;
  std::int64_t stride;
  std::int64_t dim;
  T factor;
};

// s[r][j] = sum_d q[r][d] k[j][d] for kRows rows of each of kHeads kv heads from `head` on. Up to
// kLanes<T> - 1 numbers behind s[r][end - 1] are written too.
template <DType kStored, typename T, int kHeads, int kRows, bool kDots>
[[gnu::noinline]] void score_rows(const QueryRows<T>& q, const StreamedRows& k, std::int64_t head,
                                  T* s, std::int64_t s_stride) {
  using S = Simd<T>;
  using C = Channels<kStored, T>;
  constexpr int kCount = kLanes<T>;
  constexpr int kAll = kHeads * kRows;
  constexpr int kKeys = kCount / kAll;
  for (int j = k.begin; j < k.end; j += kKeys) {
    const std::byte* row[kKeys];
    unroll<kKeys>(
        [&](auto i) { row[i] = k.rows[j + i < k.end ? j + i : k.end - 1] + head * k.head_stride; });
    Vec<T> sum[kCount] = {};
    // Head by head, so that a key is read as it lies.
    unroll<kHeads>([&](auto h) __attribute__((always_inline)) {
      const auto step = [&](std::int64_t d, int count) __attribute__((always_inline)) {
        const std::int64_t at = h * k.head_stride + d * C::kSize;
        if (k.ahead != 0 && d * C::kSize % 64 == 0) {
          unroll<kKeys>([&](auto i) { prefetch(row[i] + at, k.ahead); });
        }
        constexpr int kQueryPieces = kDots ? 1 : C::kPieces;
        Vec<T> query[kRows][kQueryPieces];
        unroll<kRows>([&](auto r) __attribute__((always_inline)) {
          const T* from = q.rows + (h * kRows + r) * q.stride + d / C::kPieces * kQueryPieces;
          unroll<kQueryPieces>([&](auto c) { query[r][c] = S::load(from + c * kCount); });
        });
        unroll<kKeys>([&](auto i) __attribute__((always_inline)) {
#if ONCHIP_CPU_LEVEL >= 3
          if constexpr (kDots) {
            const Words key = C::load_words(row[i] + at, count);
            unroll<kRows>([&](auto r) __attribute__((always_inline)) {
              Vec<T>& x = sum[(h * kRows + r) * kKeys + i];
              x = dot_pairs(x, (Words)query[r][0], key);
            });
          }
#endif
          if constexpr (!kDots) {
            Vec<T> key[C::kPieces];
            C::load(row[i] + at, count, key);
            unroll<kRows>([&](auto r) __attribute__((always_inline)) {
              Vec<T>& x = sum[(h * kRows + r) * kKeys + i];
              unroll<C::kPieces>([&](auto c) { x = S::fma(query[r][c], key[c], x); });
            });
          }
        });
      };
      std::int64_t d = 0;
      for (; d + C::kSpan <= q.dim; d += C::kSpan) step(d, C::kSpan);
      if (d < q.dim) step(d, static_cast<int>(q.dim - d));
    });
    Vec<T> total = add_lanes<T>(sum);
    if constexpr (kDots) total = total * S::broadcast(q.factor);
    T scores[kCount];
    S::store(scores, total);
    unroll<kAll>(
        [&](auto r) { std::memcpy(s + r * s_stride + j, scores + r * kKeys, kKeys * sizeof(T)); });
  }
}

// What a tile's keys give to the outputs of rows, [r][o_stride] each.
template <typename T>
struct RowOutputs {
  const T* p;  // of the first of these keys
  std::int64_t p_stride;
  T* tile;        // the sums of the tile so far
  T* total;       // of all tiles
  const T* kept;  // [r]: what remains of `total` before the tile is added
  std::int64_t o_stride;
  bool begins;  // with these keys the tile begins
  bool ends;
};

// tile[r][d] += sum_j p[r][j] v[j][d], key after key, for kSpans spans of channels from d on, of
// the last of which the first `count` channels exist; at the tile's end, total = kept total + tile.
template <DType kStored, typename T, int kRows, int kSpans>
[[gnu::noinline]] void output_block(const RowOutputs<T>& o, const StreamedRows& v,
                                    std::int64_t head, std::int64_t d, int count) {
  using S = Simd<T>;
  using C = Channels<kStored, T>;
  constexpr int kCount = kLanes<T>;
  constexpr int kVectors = kSpans * C::kPieces;
  constexpr std::int64_t kBytes = C::kSpan * C::kSize;
  const std::int64_t offset = head * v.head_stride + d * C::kSize;
  Vec<T> sum[kRows][kVectors];
  if (o.begins) {
    unroll<kRows>([&](auto r) { unroll<kVectors>([&](auto c) { sum[r][c] = Vec<T>{}; }); });
  } else {
    unroll<kRows>([&](auto r) __attribute__((always_inline)) {
      unroll<kVectors>(
          [&](auto c) { sum[r][c] = S::load(o.tile + r * o.o_stride + d + c * kCount); });
    });
  }
  const T* p = o.p;
  for (int j = v.begin; j < v.end; ++j, ++p) {
    const std::byte* row = v.rows[j] + offset;
    if (v.ahead != 0) {
      unroll<(kSpans * kBytes + 63) / 64>([&](auto i) { prefetch(row + i * 64, v.ahead); });
    }
    Vec<T> value[kVectors];
    unroll<kSpans>([&](auto c) __attribute__((always_inline)) {
      C::load(row + c * kBytes, c + 1 < kSpans ? C::kSpan : count, value + c * C::kPieces);
    });
    unroll<kRows>([&](auto r) __attribute__((always_inline)) {
      const Vec<T> weight = S::broadcast(p[r * o.p_stride]);
      unroll<kVectors>([&](auto c) { sum[r][c] = S::fma(weight, value[c], sum[r][c]); });
    });
  }
  unroll<kRows>([&](auto r) __attribute__((always_inline)) {
    const std::int64_t at = r * o.o_stride + d;
    if (o.ends) {
      const Vec<T> kept = S::broadcast(o.kept[r]);
      unroll<kVectors>([&](auto c) {
        T* total = o.total + at + c * kCount;
        S::store(total, S::fma(S::load(total), kept, sum[r][c]));
      });
    } else {
      unroll<kVectors>([&](auto c) { S::store(o.tile + at + c * kCount, sum[r][c]); });
    }
  });
}

template <DType kStored, typename T, int kRows>
void output_rows(const RowOutputs<T>& o, const StreamedRows& v, std::int64_t head,
                 std::int64_t dim) {
  using C = Channels<kStored, T>;
  constexpr int kVectors =
      kOutputVectors / kRows < kMostVectors ? kOutputVectors / kRows : kMostVectors;
  constexpr int kSpans = kVectors / C::kPieces;
  std::int64_t d = 0;
  for (; d + kSpans * C::kSpan <= dim; d += kSpans * C::kSpan) {
    output_block<kStored, T, kRows, kSpans>(o, v, head, d, C::kSpan);
  }
  for (; d < dim; d += C::kSpan) {
    const int count = static_cast<int>(dim - d < C::kSpan ? dim - d : std::int64_t{C::kSpan});
    output_block<kStored, T, kRows, 1>(o, v, head, d, count);
  }
}

}  // namespace
}  // namespace onchip::cpu::ONCHIP_CPU_ISA
