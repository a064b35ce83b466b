// Exact attention, forward: O = softmax(S) V over tiles of keys with an online softmax (Milakov &
// Gimelshein 2018; Dao et al. 2022, Algorithm 1). Compiled once per instruction set.
//
// Query rows lie on the lanes of the vectors, keys and channels on registers and loops: S^T = K Q^T
// and O^T = V^T P^T. K and V are then read as they lie in memory, one number at a time and
// broadcast; row maxima, sums and masks need no operation across lanes; only Q and O are
// transposed, once a task. A panel is 1 or 2 vectors of rows.
//
// A row's bits depend on its own query, keys and options alone: key tiles start at multiples of
// kTileKeys from key 0, every sum runs over keys or channels in order, and a key that a row does
// not see adds exactly 0 to it. How rows are cut into panels and tasks does not show.
#include "cpu/attention_rows.hpp"
#include "cpu/attention_unit.hpp"
#include "cpu/score_adjustments.hpp"
#include "cpu/simd.hpp"
#include "cpu/tile_products.hpp"

namespace onchip::cpu::ONCHIP_CPU_ISA {
namespace {

constexpr int kTileKeys = 96;  // of the online softmax
static_assert(kTileKeys % kRegisterRows == 0 && kRegisterRows % 3 == 0);
static_assert(kTileKeys % 16 == 0);  // dropout's groups

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
  T* max = nullptr;  // [panel][kPanelRows]
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

// ---- softmax ------------------------------------------------------------------------------------

// One panel's view of one tile.
template <typename T>
struct PanelTile {
  int begin = 0;  // keys of the tile that some row may see
  int end = 0;
  bool partial = false;          // some row sees only part of them
  const T* key_begin = nullptr;  // [lane]: what it sees, relative to the tile; used if partial
  const T* key_end = nullptr;
  const T* adjust = nullptr;  // NULL: none
  const T* keep = nullptr;    // NULL: no dropout
  T softcap = T{0};           // 0: none
  // [key], NULL: none: its value row holds an inf or NaN. It must not meet the probabilities 0 of
  // rows that do not see it, so it stays out of the products; softmax_tile leaves the probabilities
  // of those that do in apart[key][lane], and -1 for the others.
  const bool* non_finite_v = nullptr;
  T* apart = nullptr;
};

// Scores in s_t become probabilities relative to the new maximum. Keys that no row sees, and those
// with non-finite values, are left out: the others move up, and so do their rows' addresses, from v
// to seen_v. Returns how many they are.
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
        if (tile.non_finite_v != nullptr) {
          const Vec<T> mark = S::select(visible, Vec<T>{}, S::broadcast(T{-1}));
          S::store(tile.apart + j * kRows + i * kCount, mark);
        }
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

  // The difference comes before the factor log2(e): a score near the largest finite number, which
  // an additive mask makes, would overflow.
  int count = 0;
  for (int j = tile.begin; j < tile.end; ++j) {
    if constexpr (!kPlain) {
      if (!seen[j]) continue;
      if (tile.non_finite_v == nullptr || !tile.non_finite_v[j]) seen_v[count] = v[j];
    }
    const T* from = s_t + j * kRows;
    T* to = s_t + (tile.begin + count) * kRows;
    unroll<kVectors>([&](auto i) {
      Vec<T> p = exp2<T>((S::load(from + i * kCount) - shift[i]) * log2e);
      sum[i] = sum[i] + p;
      if constexpr (!kPlain) {
        if (tile.keep != nullptr) p = p * S::load(tile.keep + j * kRows + i * kCount);
      }
      if constexpr (!kPlain) {
        if (tile.non_finite_v != nullptr && tile.non_finite_v[j]) {
          T* apart = tile.apart + j * kRows + i * kCount;
          S::store(apart, S::select(S::less(S::load(apart), Vec<T>{}), S::load(apart), p));
          return;
        }
      }
      S::store(to + i * kCount, p);
    });
    if constexpr (!kPlain) {
      if (tile.non_finite_v != nullptr && tile.non_finite_v[j]) continue;
    }
    ++count;
  }
  unroll<kVectors>([&](auto i) {
    T* at = running_sum + i * kCount;
    S::store(at, S::fma(S::load(at), alpha[i], sum[i]));
  });
  return count;
}

template <typename T>
bool all_finite(const T* row, std::int64_t dim) {
  using S = Simd<T>;
  Vec<T> zeros{};
  std::int64_t d = 0;
  for (; d + kLanes<T> <= dim; d += kLanes<T>) zeros = zeros + S::load(row + d) * Vec<T>{};
  T rest = T{0};
  for (; d < dim; ++d) rest += row[d] * T{0};
  return rest == T{0} && !S::any(S::complement(S::equal(zeros, Vec<T>{})));
}

// The value rows that stayed out of the products, added for the rows that see them.
template <typename T, int kVectors>
void add_apart(const PanelTile<T>& tile, const T* const* v, std::int64_t head_dim_v, T* o_t) {
  constexpr int kRows = kVectors * kLanes<T>;
  for (int j = tile.begin; j < tile.end; ++j) {
    if (!tile.non_finite_v[j]) continue;
    for (int lane = 0; lane < kRows; ++lane) {
      const T p = tile.apart[j * kRows + lane];
      if (p < T{0}) continue;
      for (std::int64_t d = 0; d < head_dim_v; ++d) o_t[d * kRows + lane] += p * v[j][d];
    }
  }
}

// ---- a task -------------------------------------------------------------------------------------

template <typename T>
struct Panel {
  std::int64_t first = 0;  // row of the task
  int vectors = 0;
  bool started = false;  // o_t holds something
  PanelRange range{};
  T* q_t = nullptr;
  T* o_t = nullptr;
  T* max = nullptr;
  T* sum = nullptr;
};

// The tile of keys that starts at `key`, for one panel.
template <typename T, int kVectors>
void attend(const ForwardTask& task, const RowTable& rows, Panel<T>& panel, std::int64_t key,
            const Tile<T>& k, const T* const* v, const bool* non_finite_v,
            const Scratch<T>& scratch) {
  constexpr int kRows = kVectors * kLanes<T>;
  PanelTile<T> tile;
  tile.begin = static_cast<int>(larger(panel.range.any.begin - key, 0));
  tile.end = static_cast<int>(smaller(panel.range.any.end - key, kTileKeys));
  if (tile.begin >= tile.end) return;

  scores<T, kVectors>(panel.q_t, task.head_dim_qk, k, tile.begin, tile.end, scratch.s_t);

  T key_begin[kRows];
  T key_end[kRows];
  tile.partial = panel.range.all.begin > key + tile.begin || panel.range.all.end < key + tile.end;
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
  const PanelKeys keys{panel.first, key, tile.begin, tile.end};
  if (scratch.adjust != nullptr) {
    fill_adjustments<T, kRows>(task, rows, keys, scratch.adjust);
    tile.adjust = scratch.adjust;
  }
  if (task.dropout) {
    fill_dropout<T, kRows>(task, rows, keys, scratch.keep);
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
    T apart[kTileKeys * kRows];
    tile.non_finite_v = non_finite_v;
    tile.apart = apart;
    const int count = softmax_tile<T, kVectors, false>(tile, scratch.s_t, panel.max, panel.sum, v,
                                                       seen_v, rescale.alpha);
    if (count > 0 || non_finite_v != nullptr) {
      outputs<T, kVectors>(p_t, count, seen_v, task.head_dim_v, rescale, panel.o_t);
      panel.started = true;
    }
    if (non_finite_v != nullptr) add_apart<T, kVectors>(tile, v, task.head_dim_v, panel.o_t);
  }
}

// The used rows of a tile, in place where they lie densely in the type of the arithmetic, else
// copied.
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
    const T lse = sum == 0.0
                      ? -kInfinity<T>
                      : static_cast<T>(static_cast<double>(panel.max[lane]) + __builtin_log(sum));
    const std::int64_t r = panel.first + lane;
    std::memcpy(task.lse.data + rows.head[r] * task.lse.head_stride +
                    rows.position[r] * task.lse.row_stride,
                &lse, sizeof(lse));
  }
}

template <DType kStored>
void forward(const ForwardTask& task, std::byte* memory) {
  using T = Arithmetic<kStored>::T;
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

  RowTable rows{};
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
        sink = load_number<T>(task.sink.data + head * task.sink.head_stride, task.sink.dtype);
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
    bool non_finite_v[kTileKeys];
    bool all_v_finite = true;
    for (int j = begin; j < end; ++j) {
      v_rows[j] = v.data + j * v.stride;
      non_finite_v[j] = !all_finite(v_rows[j], task.head_dim_v);
      all_v_finite = all_v_finite && !non_finite_v[j];
    }
    const bool* apart = all_v_finite ? nullptr : non_finite_v;
    for (int p = 0; p < num_panels; ++p) {
      if (panels[p].vectors == 1) {
        attend<T, 1>(task, rows, panels[p], key, k, v_rows, apart, scratch);
      } else {
        attend<T, kPanelVectors>(task, rows, panels[p], key, k, v_rows, apart, scratch);
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
      forward<DType::f64>(task, scratch);
      return;
    case DType::f32:
      forward<DType::f32>(task, scratch);
      return;
    case DType::bf16:
      forward<DType::bf16>(task, scratch);
      return;
    case DType::f16:
      forward<DType::f16>(task, scratch);
      return;
    default:
      return;
  }
}

}  // namespace onchip::cpu::ONCHIP_CPU_ISA
