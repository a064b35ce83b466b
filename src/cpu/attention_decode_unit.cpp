// Attention of a few query rows over cached keys: an online softmax over tiles of keys, of which
// parts are computed apart and folded together. Compiled once per instruction set.
//
// Channels lie on the lanes (row_products.hpp). A few keys at a time go past all rows of all kv
// heads of the task, since the heads of a key lie side by side in a cache: memory is read nearly as
// it lies, each key once. Each read asks for the row that comes kStreamKeys keys later: a kv head's
// rows are too far apart for the hardware to foresee them.
//
// A row's bits depend on its own query, keys and options, and on the parts: tiles start at
// multiples of kTileKeys from key 0, and a key that a row does not see adds exactly 0 to its sums
// and nothing to its output.
#include "cpu/attention_decode_unit.hpp"
#include "cpu/row_products.hpp"
#include "cpu/simd.hpp"

namespace onchip::cpu::ONCHIP_CPU_ISA {
namespace {

constexpr int kTileKeys = 64;
constexpr int kStreamKeys = 16;  // that go past all rows before the next ones

std::int64_t smaller(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
std::int64_t larger(std::int64_t a, std::int64_t b) { return a < b ? b : a; }

template <typename T>
std::int64_t padded(std::int64_t dim) {
  return (dim + kLanes<T> - 1) / kLanes<T> * kLanes<T>;
}

class Pieces {
 public:
  explicit Pieces(std::byte* base) : base_(base) {}

  template <typename T>
  T* take(std::int64_t count) {
    T* piece = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + size_);
    const std::size_t bytes = static_cast<std::size_t>(count) * sizeof(T);
    size_ += (bytes + kScratchAlignment - 1) / kScratchAlignment * kScratchAlignment;
    return piece;
  }
  std::size_t size() const { return size_; }

 private:
  std::byte* base_;
  std::size_t size_ = 0;
};

// Of row r of a task's kv head h: index h rows + r.
template <typename T>
struct State {
  T* max;
  T* sum;
  T* o;  // [row][o_stride], not yet divided
  std::int64_t o_stride;

  State(std::int64_t rows, std::int64_t dim_v, Pieces& pieces)
      : max(pieces.take<T>(rows)), sum(pieces.take<T>(rows)), o_stride(padded<T>(dim_v)) {
    o = pieces.take<T>(rows * o_stride);
  }
};

std::int64_t rows_of(const DecodeTask& task) { return task.call.row_end - task.call.row_begin; }

template <typename T>
State<T> state_of(const DecodeTask& task, const std::byte* memory) {
  Pieces pieces(const_cast<std::byte*>(memory));
  return State<T>(task.kv_heads * rows_of(task), task.call.head_dim_v, pieces);
}

template <typename T>
T exp_of(T x) {
  return exp2<T>(Simd<T>::broadcast(x) * Simd<T>::broadcast(kLog2E<T>))[0];
}

// ---- one part -----------------------------------------------------------------------------------

template <typename T>
struct Scratch {
  std::int64_t q_stride;
  std::int64_t s_stride = kTileKeys + kLanes<T>;
  T* q;        // [row][q_stride], scaled, zeros behind the last channel
  T* scores;   // [row][s_stride], then probabilities
  T* o;        // [row][o_stride] of the state: of one tile
  T* adjust;   // [kTileKeys + lanes]: bias - alibi, -inf where excluded
  T* weights;  // [kTileKeys]: probabilities of the keys that a row sees

  Scratch(std::int64_t rows, std::int64_t dim_qk, std::int64_t dim_v, Pieces& pieces)
      : q_stride(padded<T>(dim_qk)) {
    q = pieces.take<T>(rows * q_stride);
    scores = pieces.take<T>(rows * s_stride);
    o = pieces.take<T>(rows * padded<T>(dim_v));
    adjust = pieces.take<T>(kTileKeys + kLanes<T>);
    weights = pieces.take<T>(kTileKeys);
  }
};

// What one row sees of a tile; keys count from the tile's first.
struct Seen {
  int begin;  // what causal and window leave
  int end;
  bool adjusted;
};

template <DType kStored, typename T>
class Part {
 public:
  Part(const DecodeTask& task, std::byte* state, std::byte* scratch)
      : task_(task),
        call_(task.call),
        rows_(rows_of(task)),
        state_(state_of<T>(task, state)),
        pieces_(scratch),
        scratch_(task.kv_heads * rows_, task.call.head_dim_qk, task.call.head_dim_v, pieces_) {}

  void run() {
    start();
    Tile tiles[2];
    int at = 0;
    std::int64_t key = find_tile(task_.key_begin, tiles[0]);
    while (tiles[at].begin < tiles[at].end) {
      key = find_tile(key, tiles[1 - at]);
      attend(tiles[at], tiles[1 - at]);
      at = 1 - at;
    }
  }

 private:
  // Some keys, with the addresses of their rows in both caches, first kv head.
  struct Tile {
    std::int64_t key;  // of which begin and end count
    int begin;         // what some row may see
    int end;
    const std::byte* k[kTileKeys];
    const std::byte* v[kTileKeys];
  };

  using S = Simd<T>;
  static constexpr int kCount = kLanes<T>;
  static constexpr std::int64_t kSize = sizeof(typename Arithmetic<kStored>::Element);

  void start() {
    const Vec<T> scale = S::broadcast(static_cast<T>(call_.scale));
    for (std::int64_t r = 0; r < rows_; ++r) {
      const std::int64_t row = call_.row_begin + r;
      position_[r] = row % call_.seqlen_q;
      head_[r] = row / call_.seqlen_q;
      const std::int64_t diagonal = position_[r] + call_.diagonal_offset;
      key_begin_[r] = 0;
      key_end_[r] = call_.seqlen_kv;
      if (call_.window_left >= 0) {
        key_begin_[r] = larger(key_begin_[r], diagonal - call_.window_left);
      }
      if (call_.window_right >= 0) {
        key_end_[r] = smaller(key_end_[r], diagonal + call_.window_right + 1);
      }
    }
    for (std::int64_t h = 0; h < task_.kv_heads; ++h) {
      for (std::int64_t r = 0; r < rows_; ++r) {
        const std::int64_t at = h * rows_ + r;
        state_.max[at] = -kInfinity<T>;
        state_.sum[at] = T{0};
        for (std::int64_t d = 0; d < state_.o_stride; d += kCount) {
          S::store(state_.o + at * state_.o_stride + d, Vec<T>{});
        }
        const std::byte* q =
            call_.q.data + head(h, r) * call_.q.head_stride + position_[r] * call_.q.row_stride;
        for (std::int64_t d = 0; d < call_.head_dim_qk; d += kCount) {
          const int width = static_cast<int>(smaller(kCount, call_.head_dim_qk - d));
          S::store(scratch_.q + at * scratch_.q_stride + d,
                   load_numbers<kStored, T>(q + d * kSize, width) * scale);
        }
      }
    }
  }

  // Query head of row r of kv head h, from the task's first.
  std::int64_t head(std::int64_t h, std::int64_t r) const { return h * task_.group + head_[r]; }

  Seen seen(std::int64_t key, std::int64_t r) const {
    const auto relative = [&](std::int64_t at) {
      const std::int64_t end = smaller(key + kTileKeys, task_.key_end);
      return static_cast<int>(larger(0, smaller(end, at) - key));
    };
    return {relative(key_begin_[r]), relative(key_end_[r]), false};
  }

  // The first tile from `key` on of which some row sees a key; none: begin == end. Returns where to
  // look for the one behind it.
  std::int64_t find_tile(std::int64_t key, Tile& tile) const {
    tile.begin = tile.end = 0;
    for (; key < task_.key_end && tile.begin == tile.end; key += kTileKeys) {
      tile.key = key;
      tile.begin = kTileKeys;
      for (std::int64_t r = 0; r < rows_; ++r) {
        const Seen own = seen(key, r);
        if (own.begin >= own.end) continue;
        tile.begin = static_cast<int>(smaller(tile.begin, own.begin));
        tile.end = static_cast<int>(larger(tile.end, own.end));
      }
      tile.begin = static_cast<int>(smaller(tile.begin, tile.end));
    }
    find_rows(tile);
    return key;
  }

  void find_rows(Tile& tile) const {
    for (int j = tile.begin; j < tile.end;) {
      const std::int64_t first = tile.key + j;
      std::int64_t block = 0;
      std::int64_t row = first;
      std::int64_t count = tile.end - j;
      if (task_.pages != nullptr) {
        std::int32_t page;
        std::memcpy(&page, task_.pages + first / task_.block_rows * std::int64_t{sizeof(page)},
                    sizeof(page));
        block = page;
        row = first % task_.block_rows;
        count = smaller(count, task_.block_rows - row);
      }
      const std::byte* k = at(task_.k_cache, block, row);
      const std::byte* v = at(task_.v_cache, block, row);
      for (std::int64_t i = 0; i < count; ++i, ++j) {
        tile.k[j] = k + i * task_.k_cache.row_stride;
        tile.v[j] = v + i * task_.v_cache.row_stride;
      }
    }
  }

  static const std::byte* at(const UnitCache& cache, std::int64_t block, std::int64_t row) {
    return cache.data + block * cache.block_stride + row * cache.row_stride;
  }

  // Calls f(Index<rows>, kv head, first row of the head) for blocks of rows that share reads.
  template <typename F>
  ONCHIP_INLINE void for_each_block(F&& f) {
    for (std::int64_t h = 0; h < task_.kv_heads; ++h) {
      std::int64_t r = 0;
      for (; r + kBlockRows<T> <= rows_; r += kBlockRows<T>) f(Index<kBlockRows<T>>{}, h, r);
      if constexpr (kBlockRows<T> > 2) {
        for (; r + 2 <= rows_; r += 2) f(Index<2>{}, h, r);
      }
      for (; r < rows_; ++r) f(Index<1>{}, h, r);
    }
  }

  void attend(const Tile& tile, const Tile& next) {
    // Behind a tile's keys come its values, and then the keys of the next one. The distance is that
    // of the first row of a group: pages shorter than a group make it a guess for others.
    const auto distance = [](const std::byte* from, const std::byte* to) {
      return static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(to) -
                                       reinterpret_cast<std::uintptr_t>(from));
    };
    for (int j = tile.begin; j < tile.end; j += kStreamKeys) {
      const int end = static_cast<int>(smaller(j + kStreamKeys, tile.end));
      const std::int64_t ahead =
          distance(tile.k[j], end < tile.end ? tile.k[end] : tile.v[tile.begin]);
      for_each_block([&](auto block, std::int64_t h, std::int64_t r) {
        const std::int64_t row = h * rows_ + r;
        score_rows<kStored, T, block>(scratch_.q + row * scratch_.q_stride, scratch_.q_stride,
                                      call_.head_dim_qk, tile.k, h * task_.k_cache.head_stride, j,
                                      end, r == 0 ? ahead : 0, scores(row), scratch_.s_stride);
      });
    }
    for (std::int64_t at = 0; at < task_.kv_heads * rows_ * state_.o_stride; at += kCount) {
      S::store(scratch_.o + at, Vec<T>{});
    }
    for_each_block([&](auto block, std::int64_t h, std::int64_t r) {
      apart_[h * rows_ + r] = weigh(tile, h, r, block);
    });
    for (int j = tile.begin; j < tile.end; j += kStreamKeys) {
      const int count = static_cast<int>(smaller(kStreamKeys, tile.end - j));
      std::int64_t ahead = 0;
      if (j + count < tile.end) {
        ahead = distance(tile.v[j], tile.v[j + count]);
      } else if (next.begin < next.end) {
        ahead = distance(tile.v[j], next.k[next.begin]);
      }
      for_each_block([&](auto block, std::int64_t h, std::int64_t r) {
        const std::int64_t row = h * rows_ + r;
        if (apart_[row]) return;
        output_rows<kStored, T, block>(scores(row) + j, scratch_.s_stride, count, tile.v + j,
                                       h * task_.v_cache.head_stride, call_.head_dim_v,
                                       r == 0 ? ahead : 0, scratch_.o + row * state_.o_stride,
                                       state_.o_stride);
      });
    }
    // A tile's own sum is made apart, so that rounding errors grow with the number of tiles, not of
    // keys.
    for (std::int64_t row = 0; row < task_.kv_heads * rows_; ++row) {
      const Vec<T> kept = S::broadcast(alpha_[row]);
      for (std::int64_t d = 0; d < state_.o_stride; d += kCount) {
        T* o = state_.o + row * state_.o_stride + d;
        S::store(o, S::fma(S::load(o), kept, S::load(scratch_.o + row * state_.o_stride + d)));
      }
    }
  }

  T* scores(std::int64_t row) const { return scratch_.scores + row * scratch_.s_stride; }

  // Scores into probabilities for a block of rows. Where one of them does not see the whole tile,
  // the block's outputs are made here, row by row over the keys that it sees alone: what others
  // hold must not meet its probability 0. Returns whether that was so.
  bool weigh(const Tile& tile, std::int64_t h, std::int64_t r, int block) {
    const int keys = tile.end - tile.begin;
    int whole = 0;
    for (int i = 0; i < block; ++i) {
      const std::int64_t row = h * rows_ + r + i;
      Seen own = seen(tile.key, r + i);
      int count = own.end > own.begin ? own.end - own.begin : 0;
      if (count > 0 && adjusts()) {
        own.adjusted = true;
        count = fill_adjustments(tile.key, h, r + i, own);
      }
      alpha_[row] = count > 0 ? softmax(own, tile.begin, tile.end, row) : T{1};
      sees_all_[i] = count == keys;
      whole += sees_all_[i] ? 1 : 0;
      if (count > 0 && count < keys) output_of_seen(tile, h, row, own);
    }
    if (whole == block) return false;
    for (int i = 0; i < block; ++i) {
      if (sees_all_[i]) {
        output_of_seen(tile, h, h * rows_ + r + i, {tile.begin, tile.end, false});
      }
    }
    return true;
  }

  void output_of_seen(const Tile& tile, std::int64_t h, std::int64_t row, const Seen& own) {
    const T* p = scores(row);
    const std::byte* rows[kTileKeys];
    int count = 0;
    for (int j = own.begin; j < own.end; ++j) {
      if (own.adjusted && scratch_.adjust[j] == -kInfinity<T>) continue;
      rows[count] = tile.v[j];
      scratch_.weights[count++] = p[j];
    }
    output_rows<kStored, T, 1>(scratch_.weights, 0, count, rows, h * task_.v_cache.head_stride,
                               call_.head_dim_v, 0, scratch_.o + row * state_.o_stride,
                               state_.o_stride);
  }

  // ---- scores into probabilities ------------------------------------------------------------

  // s[j] becomes the probability of key j relative to the row's new maximum, 0 for keys it does not
  // see. Returns the factor of what there was before.
  T softmax(const Seen& own, int begin, int end, std::int64_t row) {
    T* s = scores(row);
    static constexpr auto kIota = [] {
      struct {
        T at[kCount];
      } iota{};
      for (int i = 0; i < kCount; ++i) iota.at[i] = static_cast<T>(i);
      return iota;
    }();
    const Vec<T> lane = S::load(kIota.at);
    const Vec<T> low = S::broadcast(static_cast<T>(own.begin));
    const Vec<T> high = S::broadcast(static_cast<T>(own.end));
    const Vec<T> minus_infinity = S::broadcast(-kInfinity<T>);
    const Vec<T> cap = S::broadcast(static_cast<T>(call_.softcap));
    const int first = begin / kCount * kCount;
    Vec<T> largest = minus_infinity;
    for (int j = first; j < end; j += kCount) {
      Vec<T> x = S::load(s + j);
      if (call_.softcap != 0.0) x = cap * tanh<T>(x / cap);
      const Vec<T> key = S::broadcast(static_cast<T>(j)) + lane;
      auto visible = S::both(S::less_equal(low, key), S::less(key, high));
      if (own.adjusted) {
        const Vec<T> adjust = S::load(scratch_.adjust + j);
        visible = S::both(visible, S::complement(S::equal(adjust, minus_infinity)));
        x = x + adjust;
      }
      x = S::select(visible, x, minus_infinity);
      S::store(s + j, x);
      // A NaN is passed over here: its own probability will be NaN.
      largest = S::max(x, largest);
    }
    const T before = state_.max[row];
    T lanes[kCount];
    S::store(lanes, largest);
    for (int half = kCount / 2; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) {
        lanes[i] = lanes[i + half] > lanes[i] ? lanes[i + half] : lanes[i];
      }
    }
    const T maximum = lanes[0] > before ? lanes[0] : before;
    // Where no score is above -inf yet, subtract 0 instead: all probabilities are then exactly 0.
    const T shift = maximum == -kInfinity<T> ? T{0} : maximum;
    const Vec<T> by = S::broadcast(shift);
    const Vec<T> log2e = S::broadcast(kLog2E<T>);
    Vec<T> sums = {};
    for (int j = first; j < end; j += kCount) {
      const Vec<T> p = exp2<T>((S::load(s + j) - by) * log2e);
      sums = sums + p;
      S::store(s + j, p);
    }
    S::store(lanes, sums);
    for (int half = kCount / 2; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    }
    const T alpha = exp_of<T>(before - shift);
    state_.max[row] = maximum;
    state_.sum[row] = state_.sum[row] * alpha + lanes[0];
    return alpha;
  }

  // ---- bias, mask, ALiBi, segments ----------------------------------------------------------

  bool adjusts() const {
    return call_.bias.data != nullptr || call_.mask.data != nullptr ||
           call_.alibi_slopes.data != nullptr || call_.q_segment_ids.data != nullptr;
  }

  // adjust[j] of the keys that the row sees: bias - alibi, -inf where one of them excludes it.
  // Returns how many are left.
  int fill_adjustments(std::int64_t key, std::int64_t h, std::int64_t r, const Seen& own) {
    T* adjust = scratch_.adjust;
    const std::int64_t i = position_[r];
    for (int j = own.begin; j < own.end; ++j) adjust[j] = T{0};
    if (call_.bias.data != nullptr) {
      load_bias(at(call_.bias, h, r) + key * call_.bias.column_stride, own, adjust);
    }
    if (call_.alibi_slopes.data != nullptr) {
      const UnitHeadScalars& slopes = call_.alibi_slopes;
      const T slope = load_number<T>(slopes.data + head(h, r) * slopes.head_stride, slopes.dtype);
      const T diagonal = static_cast<T>(i + call_.diagonal_offset - key);
      for (int j = own.begin; j < own.end; ++j) {
        const T distance = diagonal - static_cast<T>(j);
        adjust[j] -= slope * (distance < T{0} ? -distance : distance);
      }
    }
    if (call_.mask.data != nullptr) {
      const std::byte* mask = at(call_.mask, h, r) + key * call_.mask.column_stride;
      for (int j = own.begin; j < own.end; ++j) {
        if (mask[j * call_.mask.column_stride] == std::byte{0}) adjust[j] = -kInfinity<T>;
      }
    }
    if (call_.q_segment_ids.data != nullptr) {
      const std::int32_t q_id = segment(call_.q_segment_ids, i);
      for (int j = own.begin; j < own.end; ++j) {
        if (segment(call_.kv_segment_ids, key + j) != q_id) adjust[j] = -kInfinity<T>;
      }
    }
    int count = 0;
    for (int j = own.begin; j < own.end; ++j) count += adjust[j] != -kInfinity<T> ? 1 : 0;
    return count;
  }

  const std::byte* at(const UnitScores& scores, std::int64_t h, std::int64_t r) const {
    return scores.data + head(h, r) * scores.head_stride + position_[r] * scores.row_stride;
  }

  static std::int32_t segment(const UnitSegments& ids, std::int64_t at) {
    std::int32_t id;
    std::memcpy(&id, ids.data + at * ids.row_stride, sizeof(id));
    return id;
  }

  void load_bias(const std::byte* bias, const Seen& own, T* adjust) {
    const UnitScores& scores = call_.bias;
    if (scores.dense_columns) {
      switch (scores.dtype) {
        case DType::f32:
          return load_dense_bias<DType::f32>(bias, own, adjust);
        case DType::bf16:
          return load_dense_bias<DType::bf16>(bias, own, adjust);
        case DType::f16:
          return load_dense_bias<DType::f16>(bias, own, adjust);
        default:
          break;
      }
    }
    for (int j = own.begin; j < own.end; ++j) {
      adjust[j] = load_number<T>(bias + j * scores.column_stride, scores.dtype);
    }
  }

  template <DType kBias>
  void load_dense_bias(const std::byte* bias, const Seen& own, T* adjust) {
    constexpr std::int64_t kBiasSize = sizeof(typename Arithmetic<kBias>::Element);
    for (int j = own.begin; j < own.end; j += kCount) {
      const int width = static_cast<int>(smaller(kCount, own.end - j));
      S::store(adjust + j, load_numbers<kBias, T>(bias + j * kBiasSize, width));
    }
  }

  const DecodeTask& task_;
  const ForwardTask& call_;
  std::int64_t rows_;  // of each kv head
  State<T> state_;
  Pieces pieces_;
  Scratch<T> scratch_;
  std::int64_t position_[kMaxDecodeRows];
  std::int64_t head_[kMaxDecodeRows];  // in its group
  std::int64_t key_begin_[kMaxDecodeRows];
  std::int64_t key_end_[kMaxDecodeRows];
  // Of a tile, by row of all kv heads: what remains of the outputs before; whether a block's
  // outputs (at its first row) are made already; by row of a block.
  T alpha_[kMaxDecodeRows];
  bool apart_[kMaxDecodeRows];
  bool sees_all_[4];
};

// ---- states -------------------------------------------------------------------------------------

template <typename T>
void start(const DecodeTask& task, std::byte* memory) {
  const State<T> state = state_of<T>(task, memory);
  const std::int64_t rows = rows_of(task);
  for (std::int64_t at = 0; at < task.kv_heads * rows; ++at) {
    // The sink is a first score without value, at its own maximum.
    T sink = -kInfinity<T>;
    if (task.call.sink.data != nullptr) {
      const std::int64_t head =
          at / rows * task.group + (task.call.row_begin + at % rows) / task.call.seqlen_q;
      sink = load_number<T>(task.call.sink.data + head * task.call.sink.head_stride,
                            task.call.sink.dtype);
    }
    state.max[at] = sink;
    state.sum[at] = sink == -kInfinity<T> ? T{0} : T{1};
    for (std::int64_t d = 0; d < state.o_stride; d += kLanes<T>) {
      Simd<T>::store(state.o + at * state.o_stride + d, Vec<T>{});
    }
  }
}

template <typename T>
void fold(const DecodeTask& task, std::byte* memory, const std::byte* part_memory) {
  using S = Simd<T>;
  const State<T> state = state_of<T>(task, memory);
  const State<T> part = state_of<T>(task, part_memory);
  for (std::int64_t at = 0; at < task.kv_heads * rows_of(task); ++at) {
    // A part of which the row saw nothing.
    if (part.max[at] == -kInfinity<T> && part.sum[at] == T{0}) continue;
    const T maximum = part.max[at] > state.max[at] ? part.max[at] : state.max[at];
    const T shift = maximum == -kInfinity<T> ? T{0} : maximum;
    const T kept = exp_of<T>(state.max[at] - shift);
    const T added = exp_of<T>(part.max[at] - shift);
    state.max[at] = maximum;
    state.sum[at] = state.sum[at] * kept + part.sum[at] * added;
    for (std::int64_t d = 0; d < state.o_stride; d += kLanes<T>) {
      T* o = state.o + at * state.o_stride + d;
      S::store(o, S::fma(S::load(o), S::broadcast(kept),
                         S::load(part.o + at * part.o_stride + d) * S::broadcast(added)));
    }
  }
}

template <DType kStored, typename T>
void store(const DecodeTask& task, const std::byte* memory) {
  using S = Simd<T>;
  constexpr std::int64_t kSize = sizeof(typename Arithmetic<kStored>::Element);
  using Lse = Arithmetic<kStored>::T;
  const ForwardTask& call = task.call;
  const State<T> state = state_of<T>(task, memory);
  const std::int64_t rows = rows_of(task);
  for (std::int64_t at = 0; at < task.kv_heads * rows; ++at) {
    const std::int64_t row = call.row_begin + at % rows;
    const std::int64_t head = at / rows * task.group + row / call.seqlen_q;
    const std::int64_t i = row % call.seqlen_q;
    const T sum = state.sum[at];
    if (call.lse.data != nullptr) {
      const auto wide_sum = static_cast<double>(sum);
      const Lse lse =
          wide_sum == 0.0
              ? -kInfinity<Lse>
              : static_cast<Lse>(static_cast<double>(state.max[at]) + __builtin_log(wide_sum));
      std::memcpy(call.lse.data + head * call.lse.head_stride + i * call.lse.row_stride, &lse,
                  sizeof(lse));
    }
    // A row without keys and without sink: 0 / 1.
    const Vec<T> by = S::broadcast(sum == T{0} ? T{1} : sum);
    std::byte* o = call.o.data + head * call.o.head_stride + i * call.o.row_stride;
    for (std::int64_t d = 0; d < call.head_dim_v; d += kLanes<T>) {
      const int width = static_cast<int>(smaller(kLanes<T>, call.head_dim_v - d));
      // + 0 turns -0 into 0.
      store_numbers<kStored, T>(o + d * kSize,
                                S::load(state.o + at * state.o_stride + d) / by + Vec<T>{}, width);
    }
  }
}

// f.template operator()<kStored, T>() for the stored type and the arithmetic of a call.
template <typename F>
void with_types(DType dtype, bool wide, F&& f) {
  switch (dtype) {
    case DType::f64:
      return f.template operator()<DType::f64, double>();
    case DType::f32:
      return wide ? f.template operator()<DType::f32, double>()
                  : f.template operator()<DType::f32, float>();
    case DType::bf16:
      return wide ? f.template operator()<DType::bf16, double>()
                  : f.template operator()<DType::bf16, float>();
    case DType::f16:
      return wide ? f.template operator()<DType::f16, double>()
                  : f.template operator()<DType::f16, float>();
    default:
      return;
  }
}

bool in_double(DType dtype, bool wide) { return wide || dtype == DType::f64; }

template <typename T>
std::size_t state_bytes(const DecodeShape& shape) {
  Pieces pieces(nullptr);
  State<T>(shape.rows, shape.head_dim_v, pieces);
  return pieces.size();
}

template <typename T>
std::size_t scratch_bytes(const DecodeShape& shape) {
  Pieces pieces(nullptr);
  Scratch<T>(shape.rows, shape.head_dim_qk, shape.head_dim_v, pieces);
  return pieces.size();
}

}  // namespace

std::size_t attention_decode_state_bytes(const DecodeShape& shape) {
  return in_double(shape.dtype, shape.wide) ? state_bytes<double>(shape)
                                            : state_bytes<float>(shape);
}

std::size_t attention_decode_scratch_bytes(const DecodeShape& shape) {
  return in_double(shape.dtype, shape.wide) ? scratch_bytes<double>(shape)
                                            : scratch_bytes<float>(shape);
}

void attention_decode_part(const DecodeTask& task, std::byte* state, std::byte* scratch) {
  with_types(task.call.dtype, task.wide,
             [&]<DType kStored, typename T> { Part<kStored, T>(task, state, scratch).run(); });
}

void attention_decode_start(const DecodeTask& task, std::byte* state) {
  if (in_double(task.call.dtype, task.wide)) {
    start<double>(task, state);
  } else {
    start<float>(task, state);
  }
}

void attention_decode_fold(const DecodeTask& task, std::byte* state, const std::byte* part) {
  if (in_double(task.call.dtype, task.wide)) {
    fold<double>(task, state, part);
  } else {
    fold<float>(task, state, part);
  }
}

void attention_decode_store(const DecodeTask& task, const std::byte* state) {
  with_types(task.call.dtype, task.wide,
             [&]<DType kStored, typename T> { store<kStored, T>(task, state); });
}

}  // namespace onchip::cpu::ONCHIP_CPU_ISA
