// Exact attention, forward: O = softmax(S) V over tiles of keys with an online softmax (Milakov &
// Gimelshein 2018; Dao et al. 2022, Algorithm 1). Compiled once per instruction set.
//
// Query rows lie on the lanes of the vectors, keys and channels on registers and loops: S^T = K Q^T
// and O^T = V^T P^T. K and V are then read as they lie in memory, one number at a time and broadcast;
// row maxima, sums and masks need no operation across lanes; only Q and O are transposed, once a task.
// A panel is 1 or 2 vectors of rows.
//
// A row's bits depend on its own query, keys and options alone: key tiles start at multiples of
// kTileKeys from key 0, every sum runs over keys or channels in order, and a key that a row does not
// see adds exactly 0 to it. How rows are cut into panels and tasks does not show.
#include "cpu/attention_unit.hpp"
#include "cpu/simd.hpp"

namespace onchip::cpu::ONCHIP_CPU_ISA {
namespace {

constexpr int kTileKeys = 96;      // of the online softmax; also a multiple of dropout's 16
constexpr int kPanelVectors = 2;

// Rows of the register tile: kRegisterRows x kPanelVectors accumulators, kPanelVectors operands and a
// broadcast fill 27 of AVX-512's 32 registers, 15 of 16 elsewhere.
constexpr int kRegisterRows = ONCHIP_CPU_LEVEL == 2 ? 12 : 6;
constexpr int kTailRows = 4;
static_assert(kTileKeys % kRegisterRows == 0 && kRegisterRows % 3 == 0 && kTileKeys % 16 == 0);

template <typename T>
constexpr int kPanelRows = kPanelVectors * kLanes<T>;

template <typename T>
struct Scratch {
  std::int64_t k_stride = 0;  // elements between rows of k_tile
  std::int64_t v_stride = 0;
  T* q_t = nullptr;     // [panel][head_dim_qk][kPanelRows], scaled
  T* o_t = nullptr;     // [panel][head_dim_v + tail][kPanelRows], not yet divided
  T* s_t = nullptr;     // [kTileKeys + tail][panel rows]: scores, then probabilities
  T* adjust = nullptr;  // [kTileKeys][panel rows]: bias - alibi, -inf where excluded
  T* keep = nullptr;    // [kTileKeys][panel rows]: 0 dropped, 1 kept
  T* k_tile = nullptr;  // [kTileKeys][k_stride]
  T* v_tile = nullptr;
  T* max = nullptr;     // [panel][kPanelRows]
  T* sum = nullptr;

  // Lays the buffers out from `base` and returns their size.
  std::size_t place(const ForwardShape& shape, std::byte* base) {
    std::size_t offset = 0;
    const auto take = [&](std::int64_t count) {
      T* piece = base == nullptr ? nullptr : reinterpret_cast<T*>(base + offset);
      const std::size_t bytes = static_cast<std::size_t>(count) * sizeof(T);
      offset += (bytes + kScratchAlignment - 1) / kScratchAlignment * kScratchAlignment;
      return piece;
    };
    constexpr std::int64_t kRows = kPanelRows<T>;
    const std::int64_t rows = (shape.task_rows + kRows - 1) / kRows * kRows;
    k_stride = padded(shape.head_dim_qk);
    v_stride = padded(shape.head_dim_v);
    q_t = take(rows * shape.head_dim_qk);
    o_t = take(rows * o_rows(shape.head_dim_v));
    s_t = take((kTileKeys + kTailRows) * kRows);
    adjust = take(shape.adjusts_scores ? kTileKeys * kRows : 0);
    keep = take(shape.dropout ? kTileKeys * kRows : 0);
    k_tile = take(kTileKeys * k_stride);
    v_tile = take(kTileKeys * v_stride);
    max = take(rows);
    sum = take(rows);
    return offset;
  }

  // An odd number of cache lines a row: the same column of all rows spreads over the cache's sets.
  static std::int64_t padded(std::int64_t dim) {
    constexpr std::int64_t kLine = 64 / sizeof(T);
    return ((dim + kLine - 1) / kLine | 1) * kLine;
  }
  // The last channels are computed kTailRows at a time.
  static std::int64_t o_rows(std::int64_t head_dim_v) { return head_dim_v + kTailRows - 1; }
};

// Position and limits of each row of a task. Rows past the last one repeat it, so that they see what
// it sees and nothing more.
struct RowTable {
  std::int64_t head[kMaxTaskRows];  // in the group
  std::int64_t position[kMaxTaskRows];
  std::int64_t key_begin[kMaxTaskRows];  // what causal and window leave
  std::int64_t key_end[kMaxTaskRows];
};

std::int64_t smaller(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
std::int64_t larger(std::int64_t a, std::int64_t b) { return a < b ? b : a; }

void fill_rows(const ForwardTask& task, std::int64_t count, RowTable& rows) {
  for (std::int64_t r = 0; r < count; ++r) {
    const std::int64_t row = smaller(task.row_begin + r, task.row_end - 1);
    const std::int64_t head = row / task.seqlen_q;
    const std::int64_t i = row - head * task.seqlen_q;
    const std::int64_t diagonal = i + task.diagonal_offset;
    std::int64_t begin = 0;
    std::int64_t end = task.seqlen_kv;
    if (task.window_left >= 0) begin = larger(begin, diagonal - task.window_left);
    if (task.window_right >= 0) end = smaller(end, diagonal + task.window_right + 1);
    rows.head[r] = head;
    rows.position[r] = i;
    rows.key_begin[r] = begin;
    rows.key_end[r] = larger(begin, end);
  }
}

struct KeyRange {
  std::int64_t begin;
  std::int64_t end;
};

// The keys that any of these rows sees, and those that all of them see.
struct PanelRange {
  KeyRange any;
  KeyRange all;
};

PanelRange panel_range(const RowTable& rows, std::int64_t first, int count) {
  constexpr std::int64_t kFar = INT64_MAX;
  PanelRange range{{kFar, 0}, {0, kFar}};
  for (std::int64_t r = first; r < first + count; ++r) {
    range.all.begin = larger(range.all.begin, rows.key_begin[r]);
    range.all.end = smaller(range.all.end, rows.key_end[r]);
    if (rows.key_begin[r] == rows.key_end[r]) continue;
    range.any.begin = smaller(range.any.begin, rows.key_begin[r]);
    range.any.end = larger(range.any.end, rows.key_end[r]);
  }
  if (range.any.end == 0) range.any.begin = 0;
  return range;
}

// ---- loading and storing -------------------------------------------------------------------------

template <DType kStored, typename T>
void load_rows(const std::byte* from, std::int64_t row_stride, std::int64_t dim, std::int64_t count,
               T* to, std::int64_t to_stride) {
  constexpr int kCount = kLanes<T>;
  constexpr std::int64_t kSize = sizeof(typename Arithmetic<kStored>::Element);
  for (std::int64_t row = 0; row < count; ++row) {
    const std::byte* source = from + row * row_stride;
    T* target = to + row * to_stride;
    for (std::int64_t d = 0; d < dim; d += kCount) {
      // The tile's rows are padded to whole vectors.
      const int width = static_cast<int>(smaller(kCount, dim - d));
      Simd<T>::store(target + d, load_vector<kStored>(source + d * kSize, width));
    }
  }
}

// q_t[d][lane] = scale * q[row of lane][d]
template <DType kStored, typename T>
void load_queries(const ForwardTask& task, const RowTable& rows, std::int64_t first, int vectors,
                  T* q_t) {
  using S = Simd<T>;
  constexpr int kCount = kLanes<T>;
  constexpr std::int64_t kSize = sizeof(typename Arithmetic<kStored>::Element);
  const Vec<T> scale = S::broadcast(static_cast<T>(task.scale));
  const int panel_rows = vectors * kCount;
  for (int lane = 0; lane < panel_rows; lane += kCount) {
    const std::byte* source[kCount];
    for (int i = 0; i < kCount; ++i) {
      const std::int64_t r = first + lane + i;
      source[i] = task.q.data + rows.head[r] * task.q.head_stride +
                  rows.position[r] * task.q.row_stride;
    }
    for (std::int64_t d = 0; d < task.head_dim_qk; d += kCount) {
      const int width = static_cast<int>(smaller(kCount, task.head_dim_qk - d));
      Vec<T> square[kCount];
      for (int i = 0; i < kCount; ++i) square[i] = load_vector<kStored>(source[i] + d * kSize, width);
      transpose<T>(square);
      for (int i = 0; i < width; ++i) {
        S::store(q_t + (d + i) * panel_rows + lane, square[i] * scale);
      }
    }
  }
}

// o[row of lane][d] = o_t[d][lane] / divisor[lane]
template <DType kStored, typename T>
void store_outputs(const ForwardTask& task, const RowTable& rows, std::int64_t first,
                   std::int64_t valid, int vectors, const T* o_t, const T* divisor) {
  using S = Simd<T>;
  constexpr int kCount = kLanes<T>;
  constexpr std::int64_t kSize = sizeof(typename Arithmetic<kStored>::Element);
  const int panel_rows = vectors * kCount;
  for (int lane = 0; lane < panel_rows; lane += kCount) {
    const int filled = static_cast<int>(smaller(kCount, valid - lane));
    std::byte* target[kCount];
    for (int i = 0; i < filled; ++i) {
      const std::int64_t r = first + lane + i;
      target[i] = task.o.data + rows.head[r] * task.o.head_stride +
                  rows.position[r] * task.o.row_stride;
    }
    const Vec<T> by = S::load(divisor + lane);
    for (std::int64_t d = 0; d < task.head_dim_v; d += kCount) {
      const int width = static_cast<int>(smaller(kCount, task.head_dim_v - d));
      Vec<T> square[kCount];
      for (int i = 0; i < kCount; ++i) {
        // Past the last channel only lanes that are not stored. + 0 turns -0, which only depends on
        // what masked keys hold, into 0.
        const std::int64_t channel = d + (i < width ? i : width - 1);
        square[i] = S::load(o_t + channel * panel_rows + lane) / by + Vec<T>{};
      }
      transpose<T>(square);
      for (int i = 0; i < filled; ++i) {
        store_vector<kStored>(target[i] + d * kSize, square[i], width);
      }
    }
  }
}

// ---- products ------------------------------------------------------------------------------------

// s_t[j][lane] = sum_d k[j][d] q_t[d][lane] for kRegisterRows keys.
template <typename T, int kVectors>
[[gnu::noinline]] void score_tile(const T* q_t, std::int64_t head_dim, const T* k, std::int64_t k_stride, T* s_t) {
  using S = Simd<T>;
  constexpr int kRows = kVectors * kLanes<T>;
  Vec<T> sum[kRegisterRows][kVectors] = {};
  // One address for three rows: with it, its next and next but one are addressing modes.
  const T* row[kRegisterRows / 3];
  unroll<kRegisterRows / 3>([&](auto i) { row[i] = k + 3 * i * k_stride; });
  for (std::int64_t d = 0; d < head_dim; ++d) {
    Vec<T> q[kVectors];
    unroll<kVectors>([&](auto v) { q[v] = S::load(q_t + v * kLanes<T>); });
    unroll<kRegisterRows>([&](auto j) {
      const Vec<T> key = S::broadcast(row[j / 3][j % 3 * k_stride]);
      unroll<kVectors>([&](auto v) { sum[j][v] = S::fma(key, q[v], sum[j][v]); });
    });
    unroll<kRegisterRows / 3>([&](auto i) { ++row[i]; });
    q_t += kRows;
  }
  unroll<kRegisterRows>([&](auto j) {
    unroll<kVectors>([&](auto v) { S::store(s_t + j * kRows + v * kLanes<T>, sum[j][v]); });
  });
}

// The last keys of a range: kTailRows of them, of which only the first `count` exist. The rows of s_t
// past them are written but never read.
template <typename T, int kVectors>
[[gnu::noinline]] void score_tail(const T* q_t, std::int64_t head_dim, const T* k, std::int64_t k_stride, int count,
                T* s_t) {
  using S = Simd<T>;
  constexpr int kRows = kVectors * kLanes<T>;
  Vec<T> sum[kTailRows][kVectors] = {};
  const T* row[kTailRows];
  unroll<kTailRows>([&](auto j) { row[j] = k + (j < count ? j : count - 1) * k_stride; });
  for (std::int64_t d = 0; d < head_dim; ++d) {
    Vec<T> q[kVectors];
    unroll<kVectors>([&](auto v) { q[v] = S::load(q_t + d * kRows + v * kLanes<T>); });
    unroll<kTailRows>([&](auto j) {
      const Vec<T> key = S::broadcast(row[j][d]);
      unroll<kVectors>([&](auto v) { sum[j][v] = S::fma(key, q[v], sum[j][v]); });
    });
  }
  unroll<kTailRows>([&](auto j) {
    unroll<kVectors>([&](auto v) { S::store(s_t + j * kRows + v * kLanes<T>, sum[j][v]); });
  });
}

// A tile of K or V as the products read it.
template <typename T>
struct Tile {
  const T* data = nullptr;
  std::int64_t stride = 0;
};

template <typename T, int kVectors>
void scores(const T* q_t, std::int64_t head_dim, const Tile<T>& k, int begin, int end, T* s_t) {
  constexpr int kRows = kVectors * kLanes<T>;
  int j = begin;
  for (; j + kRegisterRows <= end; j += kRegisterRows) {
    score_tile<T, kVectors>(q_t, head_dim, k.data + j * k.stride, k.stride, s_t + j * kRows);
  }
  for (; j < end; j += kTailRows) {
    const int count = static_cast<int>(smaller(kTailRows, end - j));
    score_tail<T, kVectors>(q_t, head_dim, k.data + j * k.stride, k.stride, count, s_t + j * kRows);
  }
}

// What becomes of the output that earlier tiles left.
template <typename T, int kVectors>
struct Rescale {
  bool first = true;  // there is none yet: o_t is not read
  Vec<T> alpha[kVectors];
};

// o_t[d][lane] = o_t[d][lane] alpha[lane] + sum_j v[j][d] p_t[j][lane] for kChannels channels, of
// which only the first `count` exist; the others repeat the last one. The tile's own sum is made
// apart, so that rounding errors grow with the number of tiles, not of keys.
template <typename T, int kVectors, int kChannels, bool kWhole>
[[gnu::noinline]] void output_tile(const T* p_t, int keys, const T* const* v, std::int64_t channel, int count,
                 const Rescale<T, kVectors>& rescale, T* o_t) {
  using S = Simd<T>;
  constexpr int kRows = kVectors * kLanes<T>;
  Vec<T> sum[kChannels][kVectors] = {};
  std::int64_t offset[kChannels];
  unroll<kChannels>([&](auto d) { offset[d] = kWhole || d < count ? int{d} : count - 1; });
  for (int j = 0; j < keys; ++j) {
    const T* row = v[j] + channel;
    Vec<T> p[kVectors];
    unroll<kVectors>([&](auto i) { p[i] = S::load(p_t + i * kLanes<T>); });
    unroll<kChannels>([&](auto d) {
      const Vec<T> value = S::broadcast(row[kWhole ? std::int64_t{d} : offset[d]]);
      unroll<kVectors>([&](auto i) { sum[d][i] = S::fma(value, p[i], sum[d][i]); });
    });
    p_t += kRows;
  }
  T* o = o_t + channel * kRows;
  if (!rescale.first) {
    unroll<kChannels>([&](auto d) {
      unroll<kVectors>([&](auto i) {
        const Vec<T> before = S::load(o + d * kRows + i * kLanes<T>);
        sum[d][i] = S::fma(before, rescale.alpha[i], sum[d][i]);
      });
    });
  }
  unroll<kChannels>([&](auto d) {
    unroll<kVectors>([&](auto i) { S::store(o + d * kRows + i * kLanes<T>, sum[d][i]); });
  });
}

template <typename T, int kVectors>
void outputs(const T* p_t, int keys, const T* const* v, std::int64_t head_dim_v,
             const Rescale<T, kVectors>& rescale, T* o_t) {
  std::int64_t d = 0;
  for (; d + kRegisterRows <= head_dim_v; d += kRegisterRows) {
    output_tile<T, kVectors, kRegisterRows, true>(p_t, keys, v, d, kRegisterRows, rescale, o_t);
  }
  for (; d + kTailRows <= head_dim_v; d += kTailRows) {
    output_tile<T, kVectors, kTailRows, true>(p_t, keys, v, d, kTailRows, rescale, o_t);
  }
  if (d < head_dim_v) {
    output_tile<T, kVectors, kTailRows, false>(p_t, keys, v, d, static_cast<int>(head_dim_v - d),
                                               rescale, o_t);
  }
}

// ---- bias, mask, ALiBi, segment ids --------------------------------------------------------------

template <typename Stored>
Stored load_as(const std::byte* from) {
  Stored x;
  std::memcpy(&x, from, sizeof(x));
  return x;
}

// to[j * stride] = bias[j] for one row.
template <typename T>
void load_bias(const std::byte* from, DType dtype, std::int64_t column_stride, int count, T* to,
               int stride) {
  switch (dtype) {
    case DType::f32:
      for (int j = 0; j < count; ++j) {
        to[j * stride] = static_cast<T>(load_as<float>(from + j * column_stride));
      }
      return;
    case DType::f64:
      for (int j = 0; j < count; ++j) {
        to[j * stride] = static_cast<T>(load_as<double>(from + j * column_stride));
      }
      return;
    default:
      for (int j = 0; j < count; ++j) {
        to[j * stride] = static_cast<T>(load_as_double(from + j * column_stride, dtype));
      }
      return;
  }
}

// Rows of `adjust` for keys [begin, end) of the tile that starts at key `tile`.
template <typename T>
void fill_adjustments(const ForwardTask& task, const RowTable& rows, std::int64_t first, int lanes,
                      std::int64_t tile, int begin, int end, T* adjust) {
  const std::int64_t j0 = tile + begin;
  const int count = end - begin;
  for (int lane = 0; lane < lanes; ++lane) {
    const std::int64_t head = rows.head[first + lane];
    const std::int64_t i = rows.position[first + lane];
    T* to = adjust + begin * lanes + lane;
    if (task.bias.data != nullptr) {
      load_bias(task.bias.data + head * task.bias.head_stride + i * task.bias.row_stride +
                    j0 * task.bias.column_stride,
                task.bias.dtype, task.bias.column_stride, count, to, lanes);
    } else {
      for (int j = 0; j < count; ++j) to[j * lanes] = T{0};
    }
    if (task.alibi_slopes.data != nullptr) {
      const T slope = static_cast<T>(load_as_double(
          task.alibi_slopes.data + head * task.alibi_slopes.head_stride, task.alibi_slopes.dtype));
      const std::int64_t diagonal = i + task.diagonal_offset - j0;
      for (int j = 0; j < count; ++j) {
        const std::int64_t distance = diagonal < j ? j - diagonal : diagonal - j;
        to[j * lanes] -= slope * static_cast<T>(distance);
      }
    }
    if (task.mask.data != nullptr) {
      const std::byte* mask = task.mask.data + head * task.mask.head_stride +
                              i * task.mask.row_stride + j0 * task.mask.column_stride;
      for (int j = 0; j < count; ++j) {
        if (mask[j * task.mask.column_stride] == std::byte{0}) to[j * lanes] = -kInfinity<T>;
      }
    }
    if (task.q_segment_ids.data != nullptr) {
      const auto id =
          load_as<std::int32_t>(task.q_segment_ids.data + i * task.q_segment_ids.row_stride);
      const std::byte* ids = task.kv_segment_ids.data + j0 * task.kv_segment_ids.row_stride;
      for (int j = 0; j < count; ++j) {
        if (load_as<std::int32_t>(ids + j * task.kv_segment_ids.row_stride) != id) {
          to[j * lanes] = -kInfinity<T>;
        }
      }
    }
  }
}

// ---- dropout -------------------------------------------------------------------------------------

// Rows of `keep` for keys [begin, end), whole groups of 16, of the tile that starts at key `tile`: the
// blocks of core/philox.hpp, one lane a query row.
template <typename T, int kRows>
void fill_dropout(const ForwardTask& task, const RowTable& rows, std::int64_t first,
                  std::int64_t tile, int begin, int end, T* keep) {
  std::uint32_t stream[kRows];
  std::uint32_t row[kRows];
  bool upper[kRows];  // in the second half of a group of 16 rows: the block's last two words
  for (int lane = 0; lane < kRows; ++lane) {
    const std::int64_t i = rows.position[first + lane];
    stream[lane] = task.dropout_stream + static_cast<std::uint32_t>(rows.head[first + lane]);
    row[lane] = static_cast<std::uint32_t>(8 * (i / 16) + i % 8);
    upper[lane] = i / 8 % 2 != 0;
  }
  for (int group = begin / 16 * 16; group < end; group += 16) {
    for (int pair = 0; pair < 4; ++pair) {
      const auto column = static_cast<std::uint32_t>(4 * ((tile + group) / 16) + pair);
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
        const std::uint32_t low = upper[lane] ? c2[lane] : c0[lane];    // keys j, j + 1
        const std::uint32_t high = upper[lane] ? c3[lane] : c1[lane];   // keys j + 8, j + 9
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

// ---- softmax -------------------------------------------------------------------------------------

// One panel's view of one tile.
template <typename T>
struct PanelTile {
  int begin = 0;  // keys of the tile that some row may see
  int end = 0;
  bool partial = false;           // some row sees only part of them
  const T* key_begin = nullptr;   // [lane]: what it sees, relative to the tile; used if partial
  const T* key_end = nullptr;
  const T* adjust = nullptr;      // NULL: none
  const T* keep = nullptr;        // NULL: no dropout
  T softcap = T{0};               // 0: none
};

// Scores in s_t become probabilities relative to the new maximum. Keys that no row sees are left out:
// the others move up, and so do their rows' addresses, from v to seen_v. Returns how many they are.
template <typename T, int kVectors, bool kPlain>
[[gnu::noinline]] int softmax_tile(const PanelTile<T>& tile, T* s_t, T* running_max, T* running_sum,
                 const T* const* v, const T** seen_v, Vec<T> (&alpha)[kVectors]) {
  using S = Simd<T>;
  constexpr int kCount = kLanes<T>;
  constexpr int kRows = kVectors * kCount;
  bool seen[kTileKeys];

  Vec<T> before[kVectors];
  Vec<T> maximum[kVectors];
  unroll<kVectors>([&](auto i) { before[i] = S::load(running_max + i * kCount); });
  unroll<kVectors>([&](auto i) { maximum[i] = before[i]; });
  for (int j = tile.begin; j < tile.end; ++j) {
    T* row = s_t + j * kRows;
    bool any = false;
    unroll<kVectors>([&](auto i) {
      Vec<T> x = S::load(row + i * kCount);
      if constexpr (!kPlain) {
        auto visible = S::all_true();
        if (tile.softcap != T{0}) {
          const Vec<T> cap = S::broadcast(tile.softcap);
          x = cap * tanh<T>(x / cap);
        }
        if (tile.adjust != nullptr) {
          const Vec<T> adjust = S::load(tile.adjust + j * kRows + i * kCount);
          visible = S::complement(S::equal(adjust, S::broadcast(-kInfinity<T>)));
          x = x + adjust;
        }
        if (tile.partial) {
          const Vec<T> key = S::broadcast(static_cast<T>(j));
          visible = S::both(visible, S::less_equal(S::load(tile.key_begin + i * kCount), key));
          visible = S::both(visible, S::less(key, S::load(tile.key_end + i * kCount)));
        }
        x = S::select(visible, x, S::broadcast(-kInfinity<T>));
        any = any || S::any(visible);
        S::store(row + i * kCount, x);
      }
      // A NaN is passed over here: its own probability will be NaN.
      maximum[i] = S::max(x, maximum[i]);
    });
    if constexpr (!kPlain) seen[j] = any;
  }

  // Where no score is above -inf yet, subtract 0 instead: all probabilities are then exactly 0.
  Vec<T> shift[kVectors];
  Vec<T> sum[kVectors] = {};
  const Vec<T> log2e = S::broadcast(kLog2E<T>);
  unroll<kVectors>([&](auto i) {
    const auto empty = S::equal(maximum[i], S::broadcast(-kInfinity<T>));
    shift[i] = S::select(empty, Vec<T>{}, maximum[i]);
    alpha[i] = exp2<T>((before[i] - shift[i]) * log2e);
    S::store(running_max + i * kCount, maximum[i]);
  });

  // The difference comes before the factor log2(e): a score near the largest finite number, which an
  // additive mask makes, would overflow.
  int count = 0;
  for (int j = tile.begin; j < tile.end; ++j) {
    if constexpr (!kPlain) {
      if (!seen[j]) continue;
      seen_v[count] = v[j];
    }
    const T* from = s_t + j * kRows;
    T* to = s_t + (tile.begin + count) * kRows;
    unroll<kVectors>([&](auto i) {
      Vec<T> p = exp2<T>((S::load(from + i * kCount) - shift[i]) * log2e);
      sum[i] = sum[i] + p;
      if constexpr (!kPlain) {
        if (tile.keep != nullptr) p = p * S::load(tile.keep + j * kRows + i * kCount);
      }
      S::store(to + i * kCount, p);
    });
    ++count;
  }
  unroll<kVectors>([&](auto i) {
    T* at = running_sum + i * kCount;
    S::store(at, S::fma(S::load(at), alpha[i], sum[i]));
  });
  return count;
}

// ---- a task --------------------------------------------------------------------------------------

template <typename T>
struct Panel {
  std::int64_t first = 0;  // row of the task
  int vectors = 0;
  bool started = false;    // o_t holds something
  PanelRange range{};
  T* q_t = nullptr;
  T* o_t = nullptr;
  T* max = nullptr;
  T* sum = nullptr;
};

// The tile of keys that starts at `key`, for one panel.
template <typename T, int kVectors>
void attend(const ForwardTask& task, const RowTable& rows, Panel<T>& panel, std::int64_t key,
            const Tile<T>& k, const T* const* v, const Scratch<T>& scratch) {
  constexpr int kRows = kVectors * kLanes<T>;
  PanelTile<T> tile;
  tile.begin = static_cast<int>(larger(panel.range.any.begin - key, 0));
  tile.end = static_cast<int>(smaller(panel.range.any.end - key, kTileKeys));
  if (tile.begin >= tile.end) return;

  scores<T, kVectors>(panel.q_t, task.head_dim_qk, k, tile.begin, tile.end, scratch.s_t);

  T key_begin[kRows];
  T key_end[kRows];
  tile.partial =
      panel.range.all.begin > key + tile.begin || panel.range.all.end < key + tile.end;
  if (tile.partial) {
    for (int lane = 0; lane < kRows; ++lane) {
      // Between 0 and kTileKeys: exact in any T.
      const auto relative = [&](std::int64_t at) {
        return static_cast<T>(larger(0, smaller(kTileKeys, at - key)));
      };
      key_begin[lane] = relative(rows.key_begin[panel.first + lane]);
      key_end[lane] = relative(rows.key_end[panel.first + lane]);
    }
    tile.key_begin = key_begin;
    tile.key_end = key_end;
  }
  if (scratch.adjust != nullptr) {
    fill_adjustments(task, rows, panel.first, kRows, key, tile.begin, tile.end, scratch.adjust);
    tile.adjust = scratch.adjust;
  }
  if (task.dropout) {
    fill_dropout<T, kRows>(task, rows, panel.first, key, tile.begin, tile.end, scratch.keep);
    tile.keep = scratch.keep;
  }
  tile.softcap = static_cast<T>(task.softcap);

  Rescale<T, kVectors> rescale;
  rescale.first = !panel.started;
  const T* seen_v[kTileKeys];
  const bool plain =
      !tile.partial && tile.adjust == nullptr && tile.keep == nullptr && tile.softcap == T{0};
  const T* p_t = scratch.s_t + tile.begin * kRows;
  if (plain) {
    const int count = softmax_tile<T, kVectors, true>(tile, scratch.s_t, panel.max, panel.sum, v,
                                                      nullptr, rescale.alpha);
    outputs<T, kVectors>(p_t, count, v + tile.begin, task.head_dim_v, rescale, panel.o_t);
    panel.started = true;
  } else {
    const int count = softmax_tile<T, kVectors, false>(tile, scratch.s_t, panel.max, panel.sum, v,
                                                       seen_v, rescale.alpha);
    if (count > 0) {
      outputs<T, kVectors>(p_t, count, seen_v, task.head_dim_v, rescale, panel.o_t);
      panel.started = true;
    }
  }
}

// The used rows of a tile, in place where they lie densely in the type of the arithmetic, else copied.
template <DType kStored, typename T>
Tile<T> tile_of(const UnitRows& rows, std::int64_t dim, std::int64_t key, int begin, int end,
                T* buffer, std::int64_t buffer_stride) {
  const std::byte* from = rows.data + key * rows.row_stride;
  constexpr bool kSameType = kStored == DType::f32 || kStored == DType::f64;
  if (kSameType && rows.row_stride == dim * static_cast<std::int64_t>(sizeof(T))) {
    return {reinterpret_cast<const T*>(from), dim};
  }
  load_rows<kStored>(from + begin * rows.row_stride, rows.row_stride, dim, end - begin,
                     buffer + begin * buffer_stride, buffer_stride);
  return {buffer, buffer_stride};
}

template <typename T>
void store_lse(const ForwardTask& task, const RowTable& rows, const Panel<T>& panel,
               std::int64_t valid) {
  for (std::int64_t lane = 0; lane < valid; ++lane) {
    const auto sum = static_cast<double>(panel.sum[lane]);
    const T lse = sum == 0.0 ? -kInfinity<T>
                             : static_cast<T>(static_cast<double>(panel.max[lane]) +
                                              __builtin_log(sum));
    const std::int64_t r = panel.first + lane;
    std::memcpy(task.lse.data + rows.head[r] * task.lse.head_stride +
                    rows.position[r] * task.lse.row_stride,
                &lse, sizeof(lse));
  }
}

template <DType kStored>
void forward(const ForwardTask& task, std::byte* memory) {
  using T = typename Arithmetic<kStored>::T;
  constexpr int kCount = kLanes<T>;
  constexpr int kRows = kPanelRows<T>;
  static_assert(kMaxTaskRows % kRows == 0);
  const std::int64_t num_rows = task.row_end - task.row_begin;
  const bool adjusts = task.bias.data != nullptr || task.mask.data != nullptr ||
                       task.alibi_slopes.data != nullptr || task.q_segment_ids.data != nullptr;
  Scratch<T> scratch;
  scratch.place({num_rows, task.dtype, task.head_dim_qk, task.head_dim_v, adjusts, task.dropout},
                memory);
  if (!adjusts) scratch.adjust = nullptr;

  RowTable rows;
  Panel<T> panels[kMaxTaskRows / kRows];
  const auto num_panels = static_cast<int>((num_rows + kRows - 1) / kRows);
  fill_rows(task, std::int64_t{num_panels} * kRows, rows);

  KeyRange keys{INT64_MAX, 0};
  const std::int64_t o_rows = Scratch<T>::o_rows(task.head_dim_v);
  for (int p = 0; p < num_panels; ++p) {
    Panel<T>& panel = panels[p];
    panel.first = std::int64_t{p} * kRows;
    panel.vectors = num_rows - panel.first <= kCount ? 1 : kPanelVectors;
    panel.range = panel_range(rows, panel.first, panel.vectors * kCount);
    panel.q_t = scratch.q_t + panel.first * task.head_dim_qk;
    panel.o_t = scratch.o_t + panel.first * o_rows;
    panel.max = scratch.max + panel.first;
    panel.sum = scratch.sum + panel.first;
    if (panel.range.any.begin < panel.range.any.end) {
      keys.begin = smaller(keys.begin, panel.range.any.begin);
      keys.end = larger(keys.end, panel.range.any.end);
    }

    load_queries<kStored, T>(task, rows, panel.first, panel.vectors, panel.q_t);
    for (int lane = 0; lane < panel.vectors * kCount; ++lane) {
      // The sink is a first score without value, at its own maximum.
      T sink = -kInfinity<T>;
      if (task.sink.data != nullptr) {
        const std::int64_t head = rows.head[panel.first + lane];
        sink = static_cast<T>(
            load_as_double(task.sink.data + head * task.sink.head_stride, task.sink.dtype));
      }
      panel.max[lane] = sink;
      panel.sum[lane] = sink == -kInfinity<T> ? T{0} : T{1};
    }
  }

  for (std::int64_t key = keys.begin / kTileKeys * kTileKeys; key < keys.end; key += kTileKeys) {
    const auto begin = static_cast<int>(larger(keys.begin - key, 0));
    const auto end = static_cast<int>(smaller(keys.end - key, kTileKeys));
    const Tile<T> k = tile_of<kStored>(task.k, task.head_dim_qk, key, begin, end, scratch.k_tile,
                                       scratch.k_stride);
    const Tile<T> v = tile_of<kStored>(task.v, task.head_dim_v, key, begin, end, scratch.v_tile,
                                       scratch.v_stride);
    const T* v_rows[kTileKeys];
    for (int j = begin; j < end; ++j) v_rows[j] = v.data + j * v.stride;
    for (int p = 0; p < num_panels; ++p) {
      if (panels[p].vectors == 1) {
        attend<T, 1>(task, rows, panels[p], key, k, v_rows, scratch);
      } else {
        attend<T, kPanelVectors>(task, rows, panels[p], key, k, v_rows, scratch);
      }
    }
  }

  for (int p = 0; p < num_panels; ++p) {
    const Panel<T>& panel = panels[p];
    const std::int64_t valid = smaller(num_rows - panel.first, panel.vectors * kCount);
    if (task.lse.data != nullptr) store_lse(task, rows, panel, valid);
    if (!panel.started) {
      for (std::int64_t d = 0; d < o_rows * panel.vectors * kCount; d += kCount) {
        Simd<T>::store(panel.o_t + d, Vec<T>{});
      }
    }
    T divisor[kRows];
    const auto dropped = static_cast<double>(task.dropout_threshold) / 65536.0;
    for (int lane = 0; lane < panel.vectors * kCount; ++lane) {
      // A row without keys and without sink: 0 / 1.
      divisor[lane] = panel.sum[lane] == T{0} ? T{1} : panel.sum[lane];
      if (task.dropout) divisor[lane] *= static_cast<T>(1.0 - dropped);
    }
    store_outputs<kStored, T>(task, rows, panel.first, valid, panel.vectors, panel.o_t, divisor);
  }
}

}  // namespace

std::size_t attention_forward_scratch_bytes(const ForwardShape& shape) {
  if (shape.dtype == DType::f64) return Scratch<double>().place(shape, nullptr);
  return Scratch<float>().place(shape, nullptr);
}

void attention_forward(const ForwardTask& task, std::byte* scratch) {
  switch (task.dtype) {
    case DType::f64:
      return forward<DType::f64>(task, scratch);
    case DType::f32:
      return forward<DType::f32>(task, scratch);
    case DType::bf16:
      return forward<DType::bf16>(task, scratch);
    case DType::f16:
      return forward<DType::f16>(task, scratch);
    default:
      return;
  }
}

}  // namespace onchip::cpu::ONCHIP_CPU_ISA
