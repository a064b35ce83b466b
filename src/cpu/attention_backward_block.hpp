// What attention backward holds while it works on one block of query rows and one chunk of keys.
#pragma once

#include "cpu/attention_backward_products.hpp"
#include "cpu/attention_rows.hpp"
#include "cpu/attention_unit.hpp"
#include "cpu/score_adjustments.hpp"
#include "cpu/simd.hpp"

namespace onchip::cpu::ONCHIP_CPU_ISA {
namespace {

template <typename T>
constexpr int kPanelRows = kPanelVectors * kLanes<T>;
template <typename T>
constexpr int kMaxPanels = kMaxBlockRows / kPanelRows<T>;

// Whether the scale is applied to scores and not to Q: as forward does it, so that scores round
// alike. It multiplies pairs of bf16 as they are.
template <DType kStored>
constexpr bool kScalesScores = kStored == DType::bf16 && ONCHIP_CPU_LEVEL >= 3;

template <typename T>
struct BackwardScratch {
  std::int64_t rows = 0;       // of a block: the stride of p_t, ds_t and seen
  std::int64_t tile_keys = 0;  // of a tile of scores
  std::int64_t k_stride = 0;   // elements between rows of what has head_dim_qk channels
  std::int64_t v_stride = 0;   // and of what has head_dim_v
  T* q_t = nullptr;            // [panel][head_dim_qk][panel rows]; scaled unless kScalesScores
  T* d_o_t = nullptr;          // [panel][head_dim_v][panel rows]
  // Rows of channels. A weight of 0 does not silence a NaN: in the vector factors of the products
  // rows that hold an inf or NaN are 0, and BackwardPass::add_apart adds them for the pairs that
  // are visible.
  T* q = nullptr;          // [rows], non-finite ones 0
  T* d_o = nullptr;        // [rows], non-finite ones 0
  T* dq = nullptr;         // [rows]
  T* k = nullptr;          // [chunk_keys]
  T* v = nullptr;          // [chunk_keys]
  T* finite_k = nullptr;   // [chunk_keys], non-finite ones 0; written only if there are any
  T* dk = nullptr;         // [chunk_keys]
  T* dv = nullptr;         // [chunk_keys]
  T* whole_row = nullptr;  // one row as it is in memory
  // Rows of lanes, one a key.
  T* p_t = nullptr;     // [tile_keys][rows]: scores, then probabilities after dropout
  T* ds_t = nullptr;    // [tile_keys][rows]: dP, then dS
  T* seen = nullptr;    // [tile_keys][rows]: 1 where visible; written only beside non-finite rows
  T* adjust = nullptr;  // [tile_keys][panel rows]: bias - alibi, -inf where excluded
  T* keep = nullptr;    // [tile_keys][panel rows]: 0 dropped, 1 kept
  T* lse = nullptr;     // [rows]
  T* shift = nullptr;   // [rows]: d_lse - sum(o dO)

  // Lays the buffers out from `base` and returns their size.
  std::size_t place(const BackwardShape& shape, std::byte* base) {
    std::size_t offset = 0;
    const auto take = [&](std::int64_t count, std::int64_t width) {
      T* piece = base == nullptr ? nullptr : reinterpret_cast<T*>(base + offset);
      const std::size_t bytes = static_cast<std::size_t>(count * width) * sizeof(T);
      offset += (bytes + kScratchAlignment - 1) / kScratchAlignment * kScratchAlignment;
      return piece;
    };
    rows = shape.tile_rows;
    tile_keys = smaller(shape.chunk_keys, kMaxTileKeys);
    k_stride = padded(shape.head_dim_qk);
    v_stride = padded(shape.head_dim_v);
    q_t = take(rows, shape.head_dim_qk);
    d_o_t = take(rows, shape.head_dim_v);
    q = take(rows, k_stride);
    d_o = take(rows, v_stride);
    dq = take(rows, k_stride);
    k = take(shape.chunk_keys, k_stride);
    v = take(shape.chunk_keys, v_stride);
    finite_k = take(shape.chunk_keys, k_stride);
    dk = take(shape.chunk_keys, k_stride);
    dv = take(shape.chunk_keys, v_stride);
    whole_row = take(1, larger(k_stride, v_stride));
    p_t = take(tile_keys, rows);
    ds_t = take(tile_keys, rows);
    seen = take(tile_keys, rows);
    adjust = take(shape.adjusts_scores ? tile_keys : 0, kPanelRows<T>);
    keep = take(shape.dropout ? tile_keys : 0, kPanelRows<T>);
    lse = take(rows, 1);
    shift = take(rows, 1);
    return offset;
  }

  // An odd number of cache lines a row: the same column of all rows spreads over the cache's sets.
  static std::int64_t padded(std::int64_t dim) {
    constexpr std::int64_t kLine = 64 / sizeof(T);
    return ((dim + kLine - 1) / kLine | 1) * kLine;
  }
};

// A block of query rows. Rows past its last one, and rows whose lse is -inf, see no key.
template <typename T>
struct RowBlock {
  std::int64_t first = 0;  // row of the list
  int rows = 0;
  int panels = 0;
  RowTable table;  // from `first`
  PanelRange range[kMaxPanels<T>];
  KeyRange keys{};               // that any row sees
  bool some_non_finite = false;  // one of the next two holds for some row
  bool non_finite_q[kMaxBlockRows];
  bool non_finite_d_o[kMaxBlockRows];

  int vectors(int panel) const {
    return rows - panel * kPanelRows<T> <= kLanes<T> ? 1 : kPanelVectors;
  }
};

template <typename T>
const std::byte* row_of(const UnitRows& rows, const RowBlock<T>& block, int row) {
  return rows.data + block.table.head[row] * rows.head_stride +
         block.table.position[row] * rows.row_stride;
}
template <typename T>
std::byte* row_to(const UnitRows& rows, const RowBlock<T>& block, int row) {
  return rows.data + block.table.head[row] * rows.head_stride +
         block.table.position[row] * rows.row_stride;
}

// Positions, limits and statistics of the rows from `first`; no channel is read yet.
template <typename T>
void find_rows(const BackwardTask& task, std::int64_t first, const BackwardScratch<T>& scratch,
               RowBlock<T>& block) {
  ForwardTask part = task;
  part.row_begin = first;
  part.row_end = smaller(first + scratch.rows, task.row_end);
  block.first = first;
  block.rows = static_cast<int>(part.row_end - first);
  block.panels = (block.rows + kPanelRows<T> - 1) / kPanelRows<T>;
  const int padded = block.panels * kPanelRows<T>;
  fill_rows(part, padded, block.table);
  for (int r = 0; r < padded; ++r) {
    scratch.lse[r] = load_as<T>(row_of(task.lse, block, r));
    scratch.shift[r] = task.shift.data == nullptr ? T{0} : load_as<T>(row_of(task.shift, block, r));
    if (r >= block.rows || scratch.lse[r] == -kInfinity<T>) {
      block.table.key_end[r] = block.table.key_begin[r];
    }
  }
  block.keys = {INT64_MAX, 0};
  for (int p = 0; p < block.panels; ++p) {
    PanelRange& range = block.range[p];
    range = panel_range(block.table, std::int64_t{p} * kPanelRows<T>, block.vectors(p) * kLanes<T>);
    if (range.any.begin == range.any.end) continue;
    block.keys.begin = smaller(block.keys.begin, range.any.begin);
    block.keys.end = larger(block.keys.end, range.any.end);
  }
}

// Rows of the block as they lie, and transposed with a factor: in this order, because reading whole
// rows one after the other is what the processor can foresee.
template <DType kStored, typename T>
void load_block(const UnitRows& from, const RowBlock<T>& block, std::int64_t dim, T factor,
                T* transposed, T* natural, std::int64_t stride) {
  using S = Simd<T>;
  constexpr int kCount = kLanes<T>;
  for (int r = 0; r < block.rows; ++r) {
    load_rows<kStored>(row_of(from, block, r), 0, dim, 1, natural + r * stride, stride);
  }
  for (int p = 0; p < block.panels; ++p) {
    const int first = p * kPanelRows<T>;
    const int panel_rows = block.vectors(p) * kCount;
    T* panel = transposed + first * dim;
    for (int lane = 0; lane < panel_rows; lane += kCount) {
      const T* rows = natural + (first + lane) * stride;
      for (std::int64_t d = 0; d < dim; d += kCount) {
        Vec<T> square[kCount];
        unroll<kCount>([&](auto i) { square[i] = S::load(rows + i * stride + d); });
        transpose<T>(square);
        const int width = static_cast<int>(smaller(kCount, dim - d));
        for (int i = 0; i < width; ++i) {
          S::store(panel + (d + i) * panel_rows + lane, square[i] * S::broadcast(factor));
        }
      }
    }
  }
}

template <typename T>
void clear(T* row, std::int64_t count) {
  std::memset(row, 0, static_cast<std::size_t>(count) * sizeof(T));
}

// Rows that hold an inf or NaN become 0; says which, and whether there are any.
template <typename T>
bool clear_non_finite(T* rows, std::int64_t stride, std::int64_t dim, int count, bool* cleared) {
  bool any = false;
  for (int r = 0; r < count; ++r) {
    cleared[r] = !all_finite(rows + r * stride, dim);
    if (cleared[r]) clear(rows + r * stride, stride);
    any = any || cleared[r];
  }
  return any;
}

template <DType kStored, typename T>
void load_block(const BackwardTask& task, const BackwardScratch<T>& scratch, RowBlock<T>& block) {
  const T factor = kScalesScores<kStored> ? T{1} : static_cast<T>(task.scale);
  load_block<kStored>(task.q, block, task.head_dim_qk, factor, scratch.q_t, scratch.q,
                      scratch.k_stride);
  load_block<kStored>(task.d_o, block, task.head_dim_v, T{1}, scratch.d_o_t, scratch.d_o,
                      scratch.v_stride);
  const bool q = clear_non_finite(scratch.q, scratch.k_stride, task.head_dim_qk, block.rows,
                                  block.non_finite_q);
  const bool d_o = clear_non_finite(scratch.d_o, scratch.v_stride, task.head_dim_v, block.rows,
                                    block.non_finite_d_o);
  block.some_non_finite = q || d_o;
}

// to[row][d] = from[d] in the stored type. + 0 turns -0, which only depends on what masked rows
// hold, into 0.
template <DType kStored, typename T>
void store_row(std::byte* to, const T* from, std::int64_t dim) {
  constexpr std::int64_t kSize = sizeof(typename Arithmetic<kStored>::Element);
  for (std::int64_t d = 0; d < dim; d += kLanes<T>) {
    const int width = static_cast<int>(smaller(kLanes<T>, dim - d));
    store_vector<kStored>(to + d * kSize, Simd<T>::load(from + d) + Vec<T>{}, width);
  }
}

}  // namespace
}  // namespace onchip::cpu::ONCHIP_CPU_ISA
