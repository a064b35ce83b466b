// Exact attention, backward: gradients by recomputation from the saved o and lse (Dao et al. 2022,
// Algorithm 4; Dao 2023). Compiled once per instruction set.
//
// For a block of query rows and a tile of keys, with rows on the lanes of vectors as in forward:
//   S^T = K Q^T, P^T = exp(S^T - lse), dP^T = V dO^T, dS^T = P^T (dP^T + d_lse - sum(o dO)),
//   dV += P^T dO, dK += dS^T Q, dQ += (dS^T)^T K.
// The first two products take the rows transposed; the other three take all their vector factors as
// they lie and P^T, dS^T as numbers to broadcast, so no score is ever transposed.
//
// S is computed by the same operations in the same order as in forward: what rounding did to lse it
// does to S again, and P keeps its sum of 1 where scores are large.
//
// Every sum has one order. dQ of a row is summed over tiles of keys that start at multiples of the
// tile from key 0, dK and dV of a key over blocks of the row list, in ascending order; the part of
// a tile is a sum of its own in the order of its keys or rows. A pair that is not visible adds
// exactly 0. So neither tasks nor threads nor the way dQ is gathered (in one pass with dK and dV,
// or alone) shows in any bit.
#include "cpu/attention_backward_block.hpp"
#include "cpu/attention_backward_products.hpp"
#include "cpu/attention_backward_scores.hpp"
#include "cpu/attention_rows.hpp"
#include "cpu/attention_unit.hpp"
#include "cpu/score_adjustments.hpp"
#include "cpu/simd.hpp"

namespace onchip::cpu::ONCHIP_CPU_ISA {
namespace {

// Rows [begin, end) of a block, or keys of a tile.
struct Span {
  int begin = 0;
  int end = 0;

  void include(int from, int to) {
    begin = begin == end ? from : static_cast<int>(smaller(begin, from));
    end = static_cast<int>(larger(end, to));
  }
};

template <DType kStored>
class BackwardPass {
 public:
  using T = Arithmetic<kStored>::T;

  BackwardPass(const BackwardTask& task, std::byte* memory)
      : task_(task),
        one_block_(task.row_end - task.row_begin <= task.shape.tile_rows),
        wants_keys_(task.dk.data != nullptr || task.dv.data != nullptr) {
    scratch_.place(task.shape, memory);
  }

  void run() {
    if (task_.row_begin < task_.row_end) prepare_rows();
    for (std::int64_t key = task_.key_begin; key < task_.key_end; key += task_.shape.chunk_keys) {
      first_key_ = key;
      num_keys_ = static_cast<int>(smaller(task_.shape.chunk_keys, task_.key_end - key));
      run_keys();
    }
    if (task_.dq.data != nullptr) finish_rows();
  }

 private:
  void prepare_rows();
  void run_keys();
  void load_keys();
  void run_tile(std::int64_t key, int offset, int count);
  template <int kVectors>
  void compute_scores(int panel, Span keys, std::int64_t key, int offset);
  void clear_around(int panel, Span keys, Span tile);
  void add_to_bias_sums(int offset, Span tile);
  void add_to_keys(int offset, Span tile);
  void add_to_rows(int offset);
  void add_apart(int offset, Span tile);
  template <Factor kFactor>
  void add_product(const Product<T>& x, std::int64_t rows, std::int64_t channels);
  void fetch_next_row();
  void load_sums();
  void store_sums();
  void finish_rows();
  const T* read_whole_row(const std::byte* from, std::int64_t dim);

  const BackwardTask& task_;
  const bool one_block_;  // dq stays in the scratch memory from the first key to the last
  const bool wants_keys_;
  BackwardScratch<T> scratch_;
  RowBlock<T> block_;
  bool block_loaded_ = false;
  std::int64_t next_row_ = 0;   // of the block after this one, to be fetched
  std::int64_t first_key_ = 0;  // of the chunk
  int num_keys_ = 0;
  bool keys_loaded_ = false;
  bool some_non_finite_k_ = false;
  const T* finite_k_ = nullptr;
  bool non_finite_k_[kMaxChunkKeys];
  Span panel_keys_[kMaxPanels<T>];
};

template <DType kStored>
void BackwardPass<kStored>::prepare_rows() {
  if (one_block_) {
    find_rows(task_, task_.row_begin, scratch_, block_);
    clear(scratch_.dq, scratch_.rows * scratch_.k_stride);
    return;
  }
  if (task_.dq.data == nullptr) return;
  for (std::int64_t first = task_.row_begin; first < task_.row_end; first += scratch_.rows) {
    find_rows(task_, first, scratch_, block_);
    for (int r = 0; r < block_.rows; ++r) {
      std::memset(row_to(task_.dq_sums, block_, r), 0,
                  static_cast<std::size_t>(task_.head_dim_qk) * sizeof(T));
    }
  }
}

template <DType kStored>
void BackwardPass<kStored>::run_keys() {
  keys_loaded_ = false;
  if (task_.dk.data != nullptr) clear(scratch_.dk, num_keys_ * scratch_.k_stride);
  if (task_.dv.data != nullptr) clear(scratch_.dv, num_keys_ * scratch_.v_stride);
  for (std::int64_t first = task_.row_begin; first < task_.row_end; first += scratch_.rows) {
    if (!one_block_) {
      find_rows(task_, first, scratch_, block_);
      block_loaded_ = false;
    }
    if (block_.keys.begin >= first_key_ + num_keys_ || block_.keys.end <= first_key_) continue;
    if (!keys_loaded_) load_keys();
    if (!block_loaded_) load_block<kStored>(task_, scratch_, block_);
    block_loaded_ = true;
    next_row_ = first + scratch_.rows;
    const bool gathers = !one_block_ && task_.dq.data != nullptr;
    if (gathers) load_sums();
    for (int offset = 0; offset < num_keys_; offset += static_cast<int>(scratch_.tile_keys)) {
      run_tile(first_key_ + offset, offset,
               static_cast<int>(smaller(scratch_.tile_keys, num_keys_ - offset)));
    }
    if (gathers) store_sums();
  }
  for (int j = 0; j < num_keys_; ++j) {
    const std::int64_t key = first_key_ + j;
    if (task_.dk.data != nullptr) {
      store_row<kStored>(task_.dk.data + key * task_.dk.row_stride,
                         scratch_.dk + j * scratch_.k_stride, task_.head_dim_qk);
    }
    if (task_.dv.data != nullptr) {
      store_row<kStored>(task_.dv.data + key * task_.dv.row_stride,
                         scratch_.dv + j * scratch_.v_stride, task_.head_dim_v);
    }
  }
}

template <DType kStored>
void BackwardPass<kStored>::load_keys() {
  keys_loaded_ = true;
  load_rows<kStored>(task_.k.data + first_key_ * task_.k.row_stride, task_.k.row_stride,
                     task_.head_dim_qk, num_keys_, scratch_.k, scratch_.k_stride);
  load_rows<kStored>(task_.v.data + first_key_ * task_.v.row_stride, task_.v.row_stride,
                     task_.head_dim_v, num_keys_, scratch_.v, scratch_.v_stride);
  some_non_finite_k_ = false;
  for (int j = 0; j < num_keys_; ++j) {
    non_finite_k_[j] = !all_finite(scratch_.k + j * scratch_.k_stride, task_.head_dim_qk);
    some_non_finite_k_ = some_non_finite_k_ || non_finite_k_[j];
  }
  finite_k_ = scratch_.k;
  if (!some_non_finite_k_) return;
  std::memcpy(scratch_.finite_k, scratch_.k,
              static_cast<std::size_t>(num_keys_ * scratch_.k_stride) * sizeof(T));
  for (int j = 0; j < num_keys_; ++j) {
    if (non_finite_k_[j]) clear(scratch_.finite_k + j * scratch_.k_stride, scratch_.k_stride);
  }
  finite_k_ = scratch_.finite_k;
}

template <DType kStored>
template <int kVectors>
void BackwardPass<kStored>::compute_scores(int panel, Span keys, std::int64_t key, int offset) {
  constexpr int kRows = kVectors * kLanes<T>;
  const std::int64_t first = std::int64_t{panel} * kPanelRows<T>;
  const std::int64_t begin = offset + keys.begin;
  const std::int64_t to = keys.begin * scratch_.rows + first;
  // The sums of forward's score_tile, in its order.
  for (std::int64_t d = 0; d < larger(task_.head_dim_qk, 1); d += kSumChannels) {
    const Product<T> part{scratch_.k + begin * scratch_.k_stride + d,
                          scratch_.k_stride,
                          scratch_.q_t + first * task_.head_dim_qk + d * kRows,
                          kRows,
                          scratch_.p_t + to,
                          scratch_.rows,
                          smaller(kSumChannels, task_.head_dim_qk - d)};
    if (d == 0) {
      product<T, Factor::rows, kVectors, false>(part, keys.end - keys.begin);
    } else {
      product<T, Factor::rows, kVectors, true>(part, keys.end - keys.begin);
    }
  }
  product<T, Factor::rows, kVectors, false>(
      {scratch_.v + begin * scratch_.v_stride, scratch_.v_stride,
       scratch_.d_o_t + first * task_.head_dim_v, kRows, scratch_.ds_t + to, scratch_.rows,
       task_.head_dim_v},
      keys.end - keys.begin);

  PanelScores<T> tile;
  tile.begin = keys.begin;
  tile.end = keys.end;
  T key_begin[kRows];
  T key_end[kRows];
  const PanelRange& range = block_.range[panel];
  tile.partial = range.all.begin > key + keys.begin || range.all.end < key + keys.end;
  if (tile.partial) {
    for (int lane = 0; lane < kRows; ++lane) {
      // Between 0 and the length of a tile: exact in any T.
      const auto relative = [&](std::int64_t at) {
        return static_cast<T>(larger(0, smaller(kMaxTileKeys, at - key)));
      };
      key_begin[lane] = relative(block_.table.key_begin[first + lane]);
      key_end[lane] = relative(block_.table.key_end[first + lane]);
    }
    tile.key_begin = key_begin;
    tile.key_end = key_end;
  }
  const PanelKeys panel_keys{first, key, keys.begin, keys.end};
  if (task_.bias.data != nullptr || task_.mask.data != nullptr ||
      task_.alibi_slopes.data != nullptr || task_.q_segment_ids.data != nullptr) {
    fill_adjustments<T, kRows>(task_, block_.table, panel_keys, scratch_.adjust);
    tile.adjust = scratch_.adjust;
  }
  if (task_.dropout) {
    fill_dropout<T, kRows>(task_, block_.table, panel_keys, scratch_.keep);
    tile.keep = scratch_.keep;
    tile.kept_scale =
        static_cast<T>(65536.0 / (65536.0 - static_cast<double>(task_.dropout_threshold)));
  }
  tile.softcap = static_cast<T>(task_.softcap);
  tile.score_factor = kScalesScores<kStored> ? static_cast<T>(task_.scale) : T{1};
  tile.scale = static_cast<T>(task_.scale);
  tile.of_bias = task_.bias_sums != nullptr;
  tile.lse = scratch_.lse + first;
  tile.shift = scratch_.shift + first;
  tile.p_t = scratch_.p_t + first;
  tile.ds_t = scratch_.ds_t + first;
  tile.stride = scratch_.rows;
  if (block_.some_non_finite || some_non_finite_k_) tile.seen = scratch_.seen + first;
  const bool plain = !tile.partial && tile.adjust == nullptr && tile.keep == nullptr &&
                     tile.softcap == T{0} && !tile.of_bias && tile.seen == nullptr;
  if (plain) {
    differentiate_softmax<T, kVectors, true>(tile);
  } else {
    differentiate_softmax<T, kVectors, false>(tile);
  }
}

// Keys that the panel does not reach, among those that other panels do.
template <DType kStored>
void BackwardPass<kStored>::clear_around(int panel, Span keys, Span tile) {
  const int rows = block_.vectors(panel) * kLanes<T>;
  for (int j = tile.begin; j < tile.end; ++j) {
    if (j == keys.begin) j = keys.end;
    if (j >= tile.end) return;
    const std::int64_t at = j * scratch_.rows + panel * kPanelRows<T>;
    clear(scratch_.p_t + at, rows);
    clear(scratch_.ds_t + at, rows);
    if (block_.some_non_finite || some_non_finite_k_) clear(scratch_.seen + at, rows);
  }
}

template <DType kStored>
void BackwardPass<kStored>::run_tile(std::int64_t key, int offset, int count) {
  Span tile;
  for (int p = 0; p < block_.panels; ++p) {
    const KeyRange& range = block_.range[p].any;
    panel_keys_[p] = {static_cast<int>(larger(range.begin - key, 0)),
                      static_cast<int>(smaller(range.end - key, count))};
    if (panel_keys_[p].begin >= panel_keys_[p].end) {
      panel_keys_[p] = {};
    } else {
      tile.include(panel_keys_[p].begin, panel_keys_[p].end);
    }
  }
  if (tile.begin == tile.end) return;
  for (int p = 0; p < block_.panels; ++p) {
    clear_around(p, panel_keys_[p], tile);
    if (panel_keys_[p].begin == panel_keys_[p].end) continue;
    if (block_.vectors(p) == 1) {
      compute_scores<1>(p, panel_keys_[p], key, offset);
    } else {
      compute_scores<kPanelVectors>(p, panel_keys_[p], key, offset);
    }
  }
  if (task_.bias_sums != nullptr) {
    add_to_bias_sums(offset, tile);
    return;
  }
  if (wants_keys_) add_to_keys(offset, tile);
  if (task_.dq.data != nullptr) add_to_rows(offset);
  if (block_.some_non_finite || some_non_finite_k_) add_apart(offset, tile);
}

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

template <typename T>
constexpr DType kSums = sizeof(T) == sizeof(double) ? DType::f64 : DType::f32;

template <DType kStored>
void BackwardPass<kStored>::load_sums() {
  for (int r = 0; r < block_.rows; ++r) {
    load_rows<kSums<T>>(row_of(task_.dq_sums, block_, r), 0, task_.head_dim_qk, 1,
                        scratch_.dq + r * scratch_.k_stride, 0);
  }
}

template <DType kStored>
void BackwardPass<kStored>::store_sums() {
  for (int r = 0; r < block_.rows; ++r) {
    store_row<kSums<T>>(row_to(task_.dq_sums, block_, r), scratch_.dq + r * scratch_.k_stride,
                        task_.head_dim_qk);
  }
}

template <DType kStored>
void BackwardPass<kStored>::finish_rows() {
  if (!one_block_ && task_.dq_sums.data == task_.dq.data) return;
  for (std::int64_t first = task_.row_begin; first < task_.row_end; first += scratch_.rows) {
    if (!one_block_) {
      find_rows(task_, first, scratch_, block_);
      load_sums();
    }
    for (int r = 0; r < block_.rows; ++r) {
      store_row<kStored>(row_to(task_.dq, block_, r), scratch_.dq + r * scratch_.k_stride,
                         task_.head_dim_qk);
    }
  }
}

// shift = d_lse - sum(o dO). The sum runs in the order of dP's: where one key has all the weight, o
// is v, and dP + shift is exactly d_lse.
template <DType kStored>
void find_shifts(const BackwardTask& task) {
  using T = Arithmetic<kStored>::T;
  constexpr int kCount = kLanes<T>;
  constexpr std::int64_t kSize = sizeof(typename Arithmetic<kStored>::Element);
  for (std::int64_t first = task.row_begin; first < task.row_end; first += kCount) {
    const int rows = static_cast<int>(smaller(kCount, task.row_end - first));
    std::int64_t head[kCount];
    std::int64_t position[kCount];
    for (int i = 0; i < kCount; ++i) {
      const std::int64_t row = first + smaller(i, rows - 1);
      head[i] = row / task.seqlen_q;
      position[i] = row - head[i] * task.seqlen_q;
    }
    const auto at = [&](const UnitRows& from, int i) {
      return from.data + head[i] * from.head_stride + position[i] * from.row_stride;
    };
    Vec<T> sum{};
    for (std::int64_t d = 0; d < task.head_dim_v; d += kCount) {
      const int width = static_cast<int>(smaller(kCount, task.head_dim_v - d));
      Vec<T> o[kCount];
      Vec<T> d_o[kCount];
      for (int i = 0; i < kCount; ++i) {
        o[i] = load_vector<kStored>(at(task.o, i) + d * kSize, width);
        d_o[i] = load_vector<kStored>(at(task.d_o, i) + d * kSize, width);
      }
      transpose<T>(o);
      transpose<T>(d_o);
      for (int i = 0; i < width; ++i) sum = Simd<T>::fma(o[i], d_o[i], sum);
    }
    for (int i = 0; i < rows; ++i) {
      const T d_lse = task.d_lse.data == nullptr ? T{0} : load_as<T>(at(task.d_lse, i));
      const T shift = d_lse - sum[i];
      std::memcpy(at(task.shift, i), &shift, sizeof(shift));
    }
  }
}

}  // namespace

std::size_t attention_backward_scratch_bytes(const BackwardShape& shape) {
  if (shape.dtype == DType::f64) return BackwardScratch<double>().place(shape, nullptr);
  return BackwardScratch<float>().place(shape, nullptr);
}

void attention_backward(const BackwardTask& task, std::byte* scratch) {
  switch (task.dtype) {
    case DType::f64:
      BackwardPass<DType::f64>(task, scratch).run();
      return;
    case DType::f32:
      BackwardPass<DType::f32>(task, scratch).run();
      return;
    case DType::bf16:
      BackwardPass<DType::bf16>(task, scratch).run();
      return;
    case DType::f16:
      BackwardPass<DType::f16>(task, scratch).run();
      return;
    default:
      return;
  }
}

void attention_backward_shift(const BackwardTask& task) {
  switch (task.dtype) {
    case DType::f64:
      find_shifts<DType::f64>(task);
      return;
    case DType::f32:
      find_shifts<DType::f32>(task);
      return;
    case DType::bf16:
      find_shifts<DType::bf16>(task);
      return;
    case DType::f16:
      find_shifts<DType::f16>(task);
      return;
    default:
      return;
  }
}

}  // namespace onchip::cpu::ONCHIP_CPU_ISA
