// Exact attention, forward: O = softmax(S) V over tiles of keys with an online softmax (Milakov &
// Gimelshein 2018; Dao et al. 2022, Algorithm 1). Compiled once per instruction set.
//
// Query rows lie on the lanes of the vectors, keys and channels on registers and loops: S^T = K Q^T
// and O^T = V^T P^T. K and V are then read as they lie in memory, one number (or pair) at a time
// and broadcast; row maxima, sums and masks need no operation across lanes; only Q and O are
// transposed, once a task. A panel is 1 or 2 vectors of rows.
//
// A row's bits depend on its own query, keys and options alone: key tiles start at multiples of
// kTileKeys from key 0, every sum runs over keys or channels in order, and a key that a row does
// not see adds exactly 0 to it. Every kChunkKeys keys begin a state of their own, and the states
// are merged in order, whether one task or several computed them. So how rows and keys are cut into
// panels and tasks does not show.
#include "cpu/attention_rows.hpp"
#include "cpu/attention_unit.hpp"
#include "cpu/number_operands.hpp"
#include "cpu/online_softmax.hpp"
#include "cpu/pair_operands.hpp"
#include "cpu/pieces.hpp"
#include "cpu/score_adjustments.hpp"
#include "cpu/simd.hpp"

namespace onchip::cpu::ONCHIP_CPU_ISA {
namespace {

static_assert(kChunkKeys % kTileKeys == 0);

template <typename T>
std::int64_t padded_rows(std::int64_t rows) {
  return (rows + kPanelRows<T> - 1) / kPanelRows<T> * kPanelRows<T>;
}

// What the online softmax knows about a task's rows after some of their keys.
template <typename T>
struct State {
  T* o_t = nullptr;  // [panel][head_dim_v + tail][kPanelRows], not yet divided
  T* max = nullptr;  // [panel][kPanelRows]
  T* sum = nullptr;
  bool* started = nullptr;  // [panel]: o_t holds something

  void place(std::int64_t rows, std::int64_t head_dim_v, Pieces& pieces) {
    o_t = pieces.take<T>(rows * o_rows(head_dim_v));
    max = pieces.take<T>(rows);
    sum = pieces.take<T>(rows);
    started = pieces.take<bool>(rows / kPanelRows<T>);
  }

  // The last channels are computed kTailRows at a time.
  static std::int64_t o_rows(std::int64_t head_dim_v) { return head_dim_v + kTailRows - 1; }
};

template <typename Operands>
struct Scratch {
  using T = Operands::T;
  Operands operands;
  State<T> states[2];   // the second one where there are several chunks
  T* s_t = nullptr;     // [kTileKeys + tail][panel rows]: scores, then probabilities
  T* adjust = nullptr;  // [kTileKeys][panel rows]: bias - alibi, -inf where excluded
  T* keep = nullptr;    // [kTileKeys][panel rows]: 0 dropped, 1 kept

  std::size_t place(const ForwardShape& shape, std::byte* base) {
    Pieces pieces(base);
    constexpr std::int64_t kRows = kPanelRows<T>;
    const std::int64_t rows = padded_rows<T>(shape.task_rows);
    operands.place(shape, rows, pieces);
    s_t = pieces.take<T>((kTileKeys + kTailRows) * kRows);
    adjust = pieces.take<T>(shape.adjusts_scores ? kTileKeys * kRows : 0);
    keep = pieces.take<T>(shape.dropout ? kTileKeys * kRows : 0);
    states[0].place(rows, shape.head_dim_v, pieces);
    if (shape.seqlen_kv > kChunkKeys) states[1].place(rows, shape.head_dim_v, pieces);
    return pieces.bytes();
  }
};

template <typename T>
struct Panel {
  std::int64_t first = 0;  // row of the task
  int vectors = 0;
  PanelRange range{};
};

template <typename Operands>
class Forward {
 public:
  using T = Operands::T;

  explicit Forward(const ForwardTask& task) : task_(task) {
    const std::int64_t num_rows = task.row_end - task.row_begin;
    num_panels_ = static_cast<int>((num_rows + kRows - 1) / kRows);
    fill_rows(task, std::int64_t{num_panels_} * kRows, rows_);
    for (int p = 0; p < num_panels_; ++p) {
      Panel<T>& panel = panels_[p];
      panel.first = std::int64_t{p} * kRows;
      panel.vectors = num_rows - panel.first <= kCount ? 1 : kPanelVectors;
      panel.range = panel_range(rows_, panel.first, panel.vectors * kCount);
      if (panel.range.any.begin < panel.range.any.end) {
        keys_.begin = smaller(keys_.begin, panel.range.any.begin);
        keys_.end = larger(keys_.end, panel.range.any.end);
      }
    }
  }

  void load(std::byte* memory) {
    const bool adjusts = task_.bias.data != nullptr || task_.mask.data != nullptr ||
                         task_.alibi_slopes.data != nullptr || task_.q_segment_ids.data != nullptr;
    scratch_.place({task_.row_end - task_.row_begin, task_.dtype, task_.head_dim_qk,
                    task_.head_dim_v, task_.seqlen_kv, adjusts, task_.dropout, task_.wide},
                   memory);
    if (!adjusts) scratch_.adjust = nullptr;
    for (int p = 0; p < num_panels_; ++p) {
      scratch_.operands.load_queries(task_, rows_, panels_[p].first, panels_[p].vectors);
    }
  }

  State<T>& state(int which) { return scratch_.states[which]; }

  std::int64_t num_chunks() const {
    return larger(1, (task_.seqlen_kv + kChunkKeys - 1) / kChunkKeys);
  }

  // The keys of one chunk, which other chunks know nothing about; the first one has the sink.
  void attend_chunk(std::int64_t chunk, const State<T>& state) {
    for (int p = 0; p < num_panels_; ++p) {
      state.started[p] = false;
      const std::int64_t first = panels_[p].first;
      for (std::int64_t r = first; r < first + panels_[p].vectors * kCount; ++r) {
        // The sink is a first score without value, at its own maximum.
        T sink = -kInfinity<T>;
        if (chunk == 0 && task_.sink.data != nullptr) {
          sink = load_number<T>(task_.sink.data + rows_.head[r] * task_.sink.head_stride,
                                task_.sink.dtype);
        }
        state.max[r] = sink;
        state.sum[r] = sink == -kInfinity<T> ? T{0} : T{1};
      }
    }
    const std::int64_t first_key = chunk * kChunkKeys;
    const std::int64_t keys_begin = larger(keys_.begin, first_key);
    const std::int64_t keys_end = smaller(keys_.end, first_key + kChunkKeys);
    if (keys_begin >= keys_end) return;
    for (std::int64_t key = keys_begin / kTileKeys * kTileKeys; key < keys_end; key += kTileKeys) {
      scratch_.operands.load_tile(task_, key, static_cast<int>(larger(keys_begin - key, 0)),
                                  static_cast<int>(smaller(keys_end - key, kTileKeys)));
      for (int p = 0; p < num_panels_; ++p) {
        if (panels_[p].vectors == 1) {
          attend_tile<1>(p, key, state);
        } else {
          attend_tile<kPanelVectors>(p, key, state);
        }
      }
    }
  }

  // `total` over some keys and `part` over others: total over all of them.
  void merge(const State<T>& total, const State<T>& part) const {
    for (int p = 0; p < num_panels_; ++p) {
      if (!part.started[p]) continue;
      if (panels_[p].vectors == 1) {
        merge_panel<1>(p, total, part);
      } else {
        merge_panel<kPanelVectors>(p, total, part);
      }
    }
  }

  void store(const State<T>& state) const {
    const std::int64_t num_rows = task_.row_end - task_.row_begin;
    for (int p = 0; p < num_panels_; ++p) {
      const Panel<T>& panel = panels_[p];
      const std::int64_t valid = smaller(num_rows - panel.first, panel.vectors * kCount);
      if (task_.lse.data != nullptr) store_lse(panel, valid, state);
      T* o_t = o_of(state, p);
      if (!state.started[p]) {
        const std::int64_t size = task_.head_dim_v * panel.vectors * kCount;
        for (std::int64_t at = 0; at < size; at += kCount) Simd<T>::store(o_t + at, Vec<T>{});
      }
      T divisor[kRows];
      const auto dropped = static_cast<double>(task_.dropout_threshold) / 65536.0;
      for (int lane = 0; lane < panel.vectors * kCount; ++lane) {
        divisor[lane] = state.sum[panel.first + lane];
        if (task_.dropout) divisor[lane] *= static_cast<T>(1.0 - dropped);
      }
      store_outputs<Operands::kStored, T>(task_, rows_, panel.first, valid, panel.vectors, o_t,
                                          divisor);
    }
  }

 private:
  static constexpr int kCount = kLanes<T>;
  static constexpr int kRows = kPanelRows<T>;
  static_assert(kMaxTaskRows % kRows == 0);

  T* o_of(const State<T>& state, int p) const {
    return state.o_t + panels_[p].first * State<T>::o_rows(task_.head_dim_v);
  }

  // The tile of keys that starts at `key`, for one panel.
  template <int kVectors>
  void attend_tile(int p, std::int64_t key, const State<T>& state) {
    constexpr int kTileRows = kVectors * kCount;
    const Panel<T>& panel = panels_[p];
    PanelTile<T> tile;
    tile.begin = static_cast<int>(larger(panel.range.any.begin - key, 0));
    tile.end = static_cast<int>(smaller(panel.range.any.end - key, kTileKeys));
    if (tile.begin >= tile.end) return;

    scratch_.operands.template scores<kVectors>(task_, rows_, panel.first, tile.begin, tile.end,
                                                scratch_.s_t);
    T key_begin[kTileRows];
    T key_end[kTileRows];
    tile.partial = panel.range.all.begin > key + tile.begin || panel.range.all.end < key + tile.end;
    if (tile.partial) {
      for (int lane = 0; lane < kTileRows; ++lane) {
        // Between 0 and kTileKeys: exact in any T.
        const auto relative = [&](std::int64_t at) {
          return static_cast<T>(larger(0, smaller(kTileKeys, at - key)));
        };
        key_begin[lane] = relative(rows_.key_begin[panel.first + lane]);
        key_end[lane] = relative(rows_.key_end[panel.first + lane]);
      }
      tile.key_begin = key_begin;
      tile.key_end = key_end;
    }
    const PanelKeys keys{panel.first, key, tile.begin, tile.end};
    if (scratch_.adjust != nullptr) {
      fill_adjustments<T, kTileRows>(task_, rows_, keys, scratch_.adjust);
      tile.adjust = scratch_.adjust;
    }
    if (task_.dropout) {
      fill_dropout<T, kTileRows>(task_, rows_, keys, scratch_.keep);
      tile.keep = scratch_.keep;
    }
    tile.softcap = static_cast<T>(task_.softcap);

    const bool* apart = scratch_.operands.apart();
    const bool plain = !tile.partial && tile.adjust == nullptr && tile.keep == nullptr &&
                       tile.softcap == T{0} && (!Operands::kAlwaysApart || apart == nullptr);
    T* max = state.max + panel.first;
    T* sum = state.sum + panel.first;
    T* o_t = o_of(state, p);
    bool& started = state.started[p];
    if (plain) {
      started |= scratch_.operands.template accumulate<kVectors, true>(tile, scratch_.s_t, max, sum,
                                                                       started, o_t);
      return;
    }
    T weights_apart[kTileKeys * kTileRows];
    tile.apart = apart;
    tile.weights_apart = weights_apart;
    const bool any = scratch_.operands.template accumulate<kVectors, false>(tile, scratch_.s_t, max,
                                                                            sum, started, o_t);
    started |= any;
    if (any && apart != nullptr) add_apart<kVectors>(tile, o_t);
  }

  // The value rows that stayed out of the products, for the rows that see them.
  template <int kVectors>
  void add_apart(const PanelTile<T>& tile, T* o_t) const {
    constexpr int kTileRows = kVectors * kCount;
    for (int j = tile.begin; j < tile.end; ++j) {
      if (!tile.apart[j]) continue;
      for (int lane = 0; lane < kTileRows; ++lane) {
        const T p = tile.weights_apart[j * kTileRows + lane];
        if (p < T{0}) continue;
        for (std::int64_t d = 0; d < task_.head_dim_v; ++d) {
          o_t[d * kTileRows + lane] += p * scratch_.operands.value(j, d);
        }
      }
    }
  }

  template <int kVectors>
  void merge_panel(int p, const State<T>& total, const State<T>& part) const {
    using S = Simd<T>;
    constexpr int kTileRows = kVectors * kCount;
    const std::int64_t first = panels_[p].first;
    T* o = o_of(total, p);
    const T* o_part = o_of(part, p);
    unroll<kVectors>([&](auto i) {
      const std::int64_t at = first + i * kCount;
      const Vec<T> max_total = S::load(total.max + at);
      const Vec<T> max_part = S::load(part.max + at);
      const Vec<T> maximum = S::max(max_part, max_total);
      const auto empty = S::equal(maximum, S::broadcast(-kInfinity<T>));
      const Vec<T> shift = S::select(empty, Vec<T>{}, maximum);
      const Vec<T> weight = probability<T>(max_total, shift);
      const Vec<T> weight_part = probability<T>(max_part, shift);
      S::store(total.max + at, maximum);
      S::store(total.sum + at,
               S::fma(S::load(total.sum + at), weight, S::load(part.sum + at) * weight_part));
      for (std::int64_t d = 0; d < task_.head_dim_v; ++d) {
        const std::int64_t row = d * kTileRows + i * kCount;
        Vec<T> x = S::load(o_part + row) * weight_part;
        if (total.started[p]) x = S::fma(S::load(o + row), weight, x);
        S::store(o + row, x);
      }
    });
    total.started[p] = true;
  }

  void store_lse(const Panel<T>& panel, std::int64_t valid, const State<T>& state) const {
    constexpr DType kLse = Operands::kStored == DType::f64 ? DType::f64 : DType::f32;
    for (std::int64_t lane = 0; lane < valid; ++lane) {
      const std::int64_t r = panel.first + lane;
      const auto sum = static_cast<double>(state.sum[r]);
      const double lse =
          sum == 0.0 ? -kInfinity<double> : static_cast<double>(state.max[r]) + __builtin_log(sum);
      store_from_double(task_.lse.data + rows_.head[r] * task_.lse.head_stride +
                            rows_.position[r] * task_.lse.row_stride,
                        kLse, lse);
    }
  }

  const ForwardTask& task_;
  RowTable rows_{};
  Panel<T> panels_[kMaxTaskRows / kRows];
  int num_panels_ = 0;
  KeyRange keys_{INT64_MAX, 0};  // that any row sees
  Scratch<Operands> scratch_;
};

template <typename Operands>
struct OperandsTag {
  using Type = Operands;
};

// f(OperandsTag<..>) of the operands that such inputs are read as.
template <typename F>
void with_operands(DType dtype, bool wide, F&& f) {
  switch (dtype) {
    case DType::f64:
      return f(OperandsTag<NumberOperands<DType::f64, double>>{});
    case DType::f32:
      if (wide) return f(OperandsTag<NumberOperands<DType::f32, double>>{});
      return f(OperandsTag<NumberOperands<DType::f32, float>>{});
    case DType::bf16:
      if (wide) return f(OperandsTag<NumberOperands<DType::bf16, double>>{});
#if ONCHIP_CPU_LEVEL >= 3
      return f(OperandsTag<PairOperands>{});
#else
      return f(OperandsTag<NumberOperands<DType::bf16, float>>{});
#endif
    case DType::f16:
      if (wide) return f(OperandsTag<NumberOperands<DType::f16, double>>{});
      return f(OperandsTag<NumberOperands<DType::f16, float>>{});
    default:
      return;
  }
}

}  // namespace

std::size_t attention_forward_scratch_bytes(const ForwardShape& shape) {
  std::size_t bytes = 0;
  with_operands(shape.dtype, shape.wide, [&](auto tag) {
    bytes = Scratch<typename decltype(tag)::Type>().place(shape, nullptr);
  });
  return bytes;
}

std::size_t attention_forward_part_bytes(const ForwardShape& shape) {
  std::size_t bytes = 0;
  with_operands(shape.dtype, shape.wide, [&](auto tag) {
    using T = decltype(tag)::Type::T;
    Pieces pieces(nullptr);
    State<T>().place(padded_rows<T>(shape.task_rows), shape.head_dim_v, pieces);
    bytes = pieces.bytes();
  });
  return bytes;
}

void attention_forward(const ForwardTask& task, std::byte* scratch) {
  with_operands(task.dtype, task.wide, [&](auto tag) {
    Forward<typename decltype(tag)::Type> forward(task);
    forward.load(scratch);
    forward.attend_chunk(0, forward.state(0));
    for (std::int64_t chunk = 1; chunk < forward.num_chunks(); ++chunk) {
      forward.attend_chunk(chunk, forward.state(1));
      forward.merge(forward.state(0), forward.state(1));
    }
    forward.store(forward.state(0));
  });
}

void attention_forward_part(const ForwardTask& task, std::int64_t chunk, std::byte* part,
                            std::byte* scratch) {
  with_operands(task.dtype, task.wide, [&](auto tag) {
    using Operands = decltype(tag)::Type;
    using T = Operands::T;
    Forward<Operands> forward(task);
    if (chunk >= forward.num_chunks()) return;
    forward.load(scratch);
    Pieces pieces(part);
    State<T> state;
    state.place(padded_rows<T>(task.row_end - task.row_begin), task.head_dim_v, pieces);
    forward.attend_chunk(chunk, state);
  });
}

void attention_forward_join(const ForwardTask& task, std::byte* parts, std::size_t part_bytes) {
  with_operands(task.dtype, task.wide, [&](auto tag) {
    using Operands = decltype(tag)::Type;
    using T = Operands::T;
    const Forward<Operands> forward(task);
    const auto state_of = [&](std::int64_t chunk) {
      Pieces pieces(parts + static_cast<std::size_t>(chunk) * part_bytes);
      State<T> state;
      state.place(padded_rows<T>(task.row_end - task.row_begin), task.head_dim_v, pieces);
      return state;
    };
    const State<T> total = state_of(0);
    for (std::int64_t chunk = 1; chunk < forward.num_chunks(); ++chunk) {
      forward.merge(total, state_of(chunk));
    }
    forward.store(total);
  });
}

}  // namespace onchip::cpu::ONCHIP_CPU_ISA
