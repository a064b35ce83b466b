// Attention of a few query rows over cached keys: an online softmax over tiles of keys, of which
// parts are computed apart and folded together. Compiled once per instruction set.
//
// Channels lie on the lanes (row_products.hpp). A few keys at a time go past all rows of all kv
// heads of the task, since the heads of a key lie side by side in a cache: memory is read nearly as
// it lies, each key once. Each read asks for the row that comes so many keys later.
//
// A row's bits depend on its own query, keys and options, and on the parts: tiles start at
// multiples of kTileKeys from key 0, and a key that a row does not see adds exactly 0 to its sums
// and nothing to its output.
#include "cpu/attention_decode_unit.hpp"

#include "cpu/attention_decode_adjust.hpp"
#include "cpu/attention_decode_state.hpp"
#include "cpu/row_products.hpp"
#include "cpu/row_softmax.hpp"
#include "cpu/simd.hpp"

namespace onchip::cpu::ONCHIP_CPU_ISA {
namespace {

constexpr int kTileKeys = 64;
constexpr int kStreamKeys = 8;  // that go past all rows before the next ones

template <typename T>
struct Scratch {
  std::int64_t q_stride;
  std::int64_t s_stride = kTileKeys + kLanes<T>;
  T* q;        // [row][q_stride], scaled, zeros behind the last channel
  T* scores;   // [row][s_stride], then probabilities
  T* o;        // [row][o_stride] of the state: of one tile
  T* adjust;   // [kTileKeys + lanes]: Adjustments'
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

// Rows that are computed at a time: rows [row, row + kRows) of each of kv heads [head, head +
// kHeads). Several heads have a row each, and those lie one behind another in scratch.
template <int kHeadCount, int kRowCount>
struct Block {
  static constexpr int kHeads = kHeadCount;
  static constexpr int kRows = kRowCount;
  static constexpr int kAll = kHeads * kRows;
  std::int64_t head;
  std::int64_t row;
};

// What one row sees of a tile, keys counted from the tile's first: what causal and window leave.
struct Seen {
  int begin;
  int end;
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
        scratch_(task.kv_heads * rows_, task.call.head_dim_qk, task.call.head_dim_v, pieces_),
        adjustments_(task.call, scratch_.adjust),
        // A lone row fills a vector of scores with keys alone.
        stream_keys_(task.kv_heads * rows_ == 1 ? 2 * kStreamKeys : kStreamKeys) {}

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
  using C = Channels<kStored, T>;

  void start() {
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
        clear(state_, at, -kInfinity<T>);
        const std::byte* q =
            call_.q.data + head(h, r) * call_.q.head_stride + position_[r] * call_.q.row_stride;
        load_query(q, at);
      }
    }
  }

  void load_query(const std::byte* from, std::int64_t row) {
    dots_[row] = false;
#if ONCHIP_CPU_LEVEL >= 3
    if constexpr (C::kDots) {
      // The power of two in scale, which is exact; what is left of it, in [1, 2), comes later.
      int exponent = 0;
      factor_ = static_cast<T>(2.0 * __builtin_frexp(call_.scale, &exponent));
      const auto power = static_cast<T>(__builtin_ldexp(1.0, exponent - 1));
      // The read of a key that serves one query waits for memory, not for arithmetic.
      dots_[row] = task_.group > 1 && factor_ != T{0} &&
                   query_pairs(from, call_.head_dim_qk, power, query(row));
      if (dots_[row]) return;
    }
#endif
    const Vec<T> scale = S::broadcast(static_cast<T>(call_.scale));
    for (std::int64_t d = 0; d < call_.head_dim_qk; d += C::kSpan) {
      const int width = static_cast<int>(smaller(C::kSpan, call_.head_dim_qk - d));
      Vec<T> pieces[C::kPieces];
      C::load(from + d * C::kSize, width, pieces);
      unroll<C::kPieces>(
          [&](auto i) { S::store(query(row) + d + i * kLanes<T>, pieces[i] * scale); });
    }
  }

  // Query head of row r of kv head h, from the task's first.
  std::int64_t head(std::int64_t h, std::int64_t r) const { return h * task_.group + head_[r]; }

  T* query(std::int64_t row) const { return scratch_.q + row * scratch_.q_stride; }
  T* scores(std::int64_t row) const { return scratch_.scores + row * scratch_.s_stride; }

  Seen seen(std::int64_t key, std::int64_t r) const {
    const auto relative = [&](std::int64_t at) {
      const std::int64_t end = smaller(key + kTileKeys, task_.key_end);
      return static_cast<int>(larger(0, smaller(end, at) - key));
    };
    return {relative(key_begin_[r]), relative(key_end_[r])};
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

  // Calls f(Block) until all rows had their turn.
  template <typename F>
  ONCHIP_INLINE void for_each_block(F&& f) {
    std::int64_t h = 0;
    if (rows_ == 1) {
      for (; h + 2 <= task_.kv_heads; h += 2) f(Block<2, 1>{h, 0});
    }
    for (; h < task_.kv_heads; ++h) {
      std::int64_t r = 0;
      for (; r + kBlockRows<T> <= rows_; r += kBlockRows<T>) f(Block<1, kBlockRows<T>>{h, r});
      if constexpr (kBlockRows<T> > 2) {
        for (; r + 2 <= rows_; r += 2) f(Block<1, 2>{h, r});
      }
      for (; r < rows_; ++r) f(Block<1, 1>{h, r});
    }
  }

  void attend(const Tile& tile, const Tile& next) {
    // Behind a tile's keys come its values, and then the keys of the next one. The distance is that
    // of the first row of a group: pages shorter than a group make it a guess for others.
    const auto distance = [](const std::byte* from, const std::byte* to) {
      return static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(to) -
                                       reinterpret_cast<std::uintptr_t>(from));
    };
    const auto group = [&](int j, const std::byte* const* rows, std::int64_t head_stride,
                           const std::byte* behind) -> StreamedRows {
      const int end = static_cast<int>(smaller(j + stream_keys_, tile.end));
      const std::byte* later = end < tile.end ? rows[end] : behind;
      return {rows, head_stride, j, end, later == nullptr ? 0 : distance(rows[j], later)};
    };
    for (int j = tile.begin; j < tile.end; j += stream_keys_) {
      StreamedRows keys = group(j, tile.k, task_.k_cache.head_stride, tile.v[tile.begin]);
      const std::int64_t ahead = keys.ahead;
      for_each_block([&](auto block) {
        keys.ahead = block.row == 0 ? ahead : 0;
        score(block, keys);
      });
    }
    for_each_block(
        [&](auto block) { apart_[block.head * rows_ + block.row] = weigh(tile, block); });
    const std::byte* behind = next.begin < next.end ? next.k[next.begin] : nullptr;
    for (int j = tile.begin; j < tile.end; j += stream_keys_) {
      StreamedRows values = group(j, tile.v, task_.v_cache.head_stride, behind);
      const std::int64_t ahead = values.ahead;
      for_each_block([&](auto block) {
        if (apart_[block.head * rows_ + block.row]) return;
        values.ahead = block.row == 0 ? ahead : 0;
        // Of several heads, each has values of its own.
        unroll<block.kHeads>([&](auto h) {
          const std::int64_t row = (block.head + h) * rows_ + block.row;
          const bool ends = values.end == tile.end;
          output_rows<kStored, T, block.kRows>(outputs(scores(row) + j, row, j == tile.begin, ends),
                                               values, block.head + h, call_.head_dim_v);
        });
      });
    }
  }

  template <typename AnyBlock>
  void score(AnyBlock block, const StreamedRows& keys) {
    const std::int64_t first = block.head * rows_ + block.row;
    int dots = 0;
    for (int i = 0; i < AnyBlock::kAll; ++i) dots += dots_[first + i] ? 1 : 0;
    if (dots == 0) {
      score_as<false>(block, first, keys);
    } else if (dots == AnyBlock::kAll) {
      score_as<true>(block, first, keys);
    } else {
      for (int i = 0; i < AnyBlock::kAll; ++i) {
        const Block<1, 1> one{block.head + i / AnyBlock::kRows, block.row + i % AnyBlock::kRows};
        if (dots_[first + i]) {
          score_as<true>(one, first + i, keys);
        } else {
          score_as<false>(one, first + i, keys);
        }
      }
    }
  }

  template <bool kDots, typename AnyBlock>
  void score_as(AnyBlock block, std::int64_t first, const StreamedRows& keys) {
    if constexpr (C::kDots || !kDots) {
      score_rows<kStored, T, AnyBlock::kHeads, AnyBlock::kRows, kDots>(
          {query(first), scratch_.q_stride, call_.head_dim_qk, factor_}, keys, block.head,
          scores(first), scratch_.s_stride);
    }
  }

  // Scores into probabilities for a block of rows. Where one of them does not see the whole tile,
  // the block's outputs are made here, row by row over the keys that it sees alone: what others
  // hold must not meet its probability 0. Returns whether that was so.
  template <typename AnyBlock>
  bool weigh(const Tile& tile, AnyBlock block) {
    const std::int64_t first = block.head * rows_ + block.row;
    bool plain = true;
    for (int r = 0; r < AnyBlock::kRows; ++r)
      plain = plain && is_plain(seen(tile.key, block.row + r));
    if (plain) {
      softmax_of_whole<T, AnyBlock::kAll>(scores(first), scratch_.s_stride, kTileKeys, sums(first));
      return false;
    }
    bool whole = true;
    bool sees_all[AnyBlock::kAll];
    for (int i = 0; i < AnyBlock::kAll; ++i) {
      sees_all[i] =
          weigh_row(tile, block.head + i / AnyBlock::kRows, block.row + i % AnyBlock::kRows);
      whole = whole && sees_all[i];
    }
    if (whole) return false;
    for (int i = 0; i < AnyBlock::kAll; ++i) {
      if (!sees_all[i]) continue;
      output_of_seen(tile, block.head + i / AnyBlock::kRows, first + i, {tile.begin, tile.end},
                     false);
    }
    return true;
  }

  bool is_plain(const Seen& own) const {
    return own.begin == 0 && own.end == kTileKeys && call_.softcap == 0.0 && !adjustments_.any();
  }

  // Returns whether the row sees the whole tile; if not, its outputs are made.
  bool weigh_row(const Tile& tile, std::int64_t h, std::int64_t r) {
    const std::int64_t row = h * rows_ + r;
    const Seen own = seen(tile.key, r);
    int count = own.end > own.begin ? own.end - own.begin : 0;
    const bool adjusted = count > 0 && adjustments_.any();
    if (adjusted) {
      count = adjustments_.fill(tile.key, head(h, r), position_[r], own.begin, own.end);
    }
    if (count == 0) return false;
    if (is_plain(own)) {
      softmax_of_whole<T, 1>(scores(row), 0, kTileKeys, sums(row));
    } else {
      softmax_of_seen<T>(scores(row), tile.begin, tile.end, own.begin, own.end,
                         adjusted ? adjustments_.data() : nullptr, static_cast<T>(call_.softcap),
                         sums(row));
    }
    if (count == tile.end - tile.begin) return true;
    output_of_seen(tile, h, row, own, adjusted);
    return false;
  }

  void output_of_seen(const Tile& tile, std::int64_t h, std::int64_t row, const Seen& own,
                      bool adjusted) {
    const T* p = scores(row);
    const std::byte* rows[kTileKeys];
    int count = 0;
    for (int j = own.begin; j < own.end; ++j) {
      if (adjusted && adjustments_.excludes(j)) continue;
      rows[count] = tile.v[j];
      scratch_.weights[count++] = p[j];
    }
    const StreamedRows values{rows, task_.v_cache.head_stride, 0, count, 0};
    output_rows<kStored, T, 1>(outputs(scratch_.weights, row, true, true), values, h,
                               call_.head_dim_v);
  }

  RowSums<T> sums(std::int64_t row) { return {state_.max + row, state_.sum + row, kept_ + row}; }

  RowOutputs<T> outputs(const T* p, std::int64_t row, bool begins, bool ends) const {
    const std::int64_t at = row * state_.o_stride;
    return {p,           scratch_.s_stride, scratch_.o + at, state_.o + at,
            kept_ + row, state_.o_stride,   begins,          ends};
  }

  const DecodeTask& task_;
  const ForwardTask& call_;
  std::int64_t rows_;  // of each kv head
  State<T> state_;
  Pieces pieces_;
  Scratch<T> scratch_;
  Adjustments<T> adjustments_;
  int stream_keys_;
  std::int64_t position_[kMaxDecodeRows];
  std::int64_t head_[kMaxDecodeRows];  // in its group
  std::int64_t key_begin_[kMaxDecodeRows];
  std::int64_t key_end_[kMaxDecodeRows];
  // Of a tile, by row of all kv heads: what remains of the outputs before; whether a block's
  // outputs (at its first row) are made already.
  T kept_[kMaxDecodeRows];
  bool apart_[kMaxDecodeRows];
  bool dots_[kMaxDecodeRows];  // by row of all kv heads: its query lies in pairs
  T factor_ = T{1};            // of their scores
};

// ---- types --------------------------------------------------------------------------------------

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
  return pieces.bytes();
}

template <typename T>
std::size_t scratch_bytes(const DecodeShape& shape) {
  Pieces pieces(nullptr);
  Scratch<T>(shape.rows, shape.head_dim_qk, shape.head_dim_v, pieces);
  return pieces.bytes();
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
