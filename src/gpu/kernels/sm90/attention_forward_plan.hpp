// Exact attention forward on sm90: what the host and the device must agree on. Constant expressions
// only; no header, since NVRTC reads this file too.
//
// The host's part, in order: attention_forward_reject -> attention_forward_spec ->
// attention_forward_split -> attention_forward_params (then set its pointers) -> four tensor maps
// by attention_forward_map -> launch kAttentionForwardEntry with grid attention_forward_grid, block
// attention_forward_threads, dynamic shared memory attention_forward_smem().total and the arguments
// (q map, k map, v map, o map, params), each map by value, 64-byte aligned. Workspace:
// attention_forward_counter_bytes and attention_forward_parts_bytes, whatever they hold. No other
// launch before or after. Where there is no element of o, nothing is launched.
#pragma once

namespace onchip::sm90 {

// A kernel is compiled for one spec: -DONCHIP_ATTENTION_FORWARD_SPEC=<fields, comma separated>.
struct AttentionForwardSpec {
  bool bf16;        // else fp16
  int head_dim_qk;  // 64 or 128; a smaller one runs with zero columns that TMA fills in
  int head_dim_v;   // likewise
  bool causal;
  bool varlen;     // lengths of the sequences lie in device memory
  int warpgroups;  // that multiply; each owns 64 query rows of the tile
  int tile_n;      // keys of a block
  bool q_in_registers;
  bool turn_taking;  // warpgroups issue their products one after the other
  bool debug_waits;  // waits are bounded; a late one writes a WaitFailure and traps

  static constexpr int kFields = 10;
  constexpr int field(int i) const {
    const int fields[kFields] = {int{bf16},        head_dim_qk,     head_dim_v, int{causal},
                                 int{varlen},      warpgroups,      tile_n,     int{q_in_registers},
                                 int{turn_taking}, int{debug_waits}};
    return fields[i];
  }
  constexpr bool operator==(const AttentionForwardSpec&) const = default;
  constexpr int tile_m() const { return 64 * warpgroups; }
};

inline constexpr char kAttentionForwardEntry[] = "onchip_attention_forward";
inline constexpr char kAttentionForwardMacro[] = "ONCHIP_ATTENTION_FORWARD_SPEC";
inline constexpr char kAttentionForwardFile[] = "gpu/kernels/sm90/attention_forward.cuh";

// Three warpgroups at head_dim 64, where the special-function unit is as busy as the tensor cores;
// two at 128, where scores, probabilities and output fill 160 of 240 registers.
constexpr AttentionForwardSpec attention_forward_spec(bool bf16, int head_dim_qk, int head_dim_v,
                                                      bool causal, bool varlen) {
  const int dqk = head_dim_qk <= 64 ? 64 : 128;
  const int dv = head_dim_v <= 64 ? 64 : 128;
  const bool small = dqk == 64 && dv == 64;
  return {bf16, dqk, dv, causal, varlen, small ? 3 : 2, 128, !small, small, false};
}

// Every spec that is built ahead of time and whose resources are kept as a snapshot.
inline constexpr int kAttentionForwardSpecCount = 16;
constexpr AttentionForwardSpec attention_forward_registered(int i) {
  const int dim = (i & 8) != 0 ? 64 : 128;
  return attention_forward_spec((i & 1) == 0, dim, dim, (i & 2) != 0, (i & 4) != 0);
}

// ---- shared memory

inline constexpr int kAttentionForwardStages = 2;  // of K, of V
inline constexpr int kAttentionForwardQSlots = 2;  // O leaves through the slot that held its Q
inline constexpr int kAttentionForwardTileSlots = 2;

// One tile of work, written by the schedule role, read by the others. Rows count from the start of
// the sequence; coordinates are those of the tensor maps. 128 bytes: slots are found by a shift.
struct alignas(64) AttentionForwardTile {
  int blocks;     // of keys, at least 1; 0: no more tiles
  int kv_limit;   // keys that any query of the sequence sees
  int diagonal;   // keys that the tile's first row sees, if causal; may be negative
  int live_rows;  // rows of the tile inside the used length
  int slot_rows;  // rows of the tile inside the sequence's slot
  int head;
  int kv_head;
  int batch;  // coordinate; 0 when packed
  int q_row;
  int q_end;
  int o_row;
  int o_end;
  int kv_row;  // of key 0
  int kv_end;
  long long lse;  // offset of the tile's first row in lse, in elements
  // Of a part of a tile's keys, to which kv_limit and kv_row are then moved:
  int parts;  // of the tile; 0: all keys are here
  int slot;
  int first_slot;  // of the tile's parts
  int split_tile;  // among those that are split
};

// Byte offsets from a 1024-byte boundary, which the 128-byte swizzle needs. Matrices are stored as
// chunks of 64 columns, [chunk][row][64], 16-bit, 128-byte swizzle.
struct AttentionForwardSmem {
  int q, q_slot_bytes;  // [slot][warpgroup][chunk][64 rows][64]: Q, then O
  int k, k_stage_bytes;
  int v, v_stage_bytes;
  int zeros;     // 64 x 64 zeros, the source of O rows without keys
  int barriers;  // 8 bytes each, order of AttentionForwardBarrier, two of a kind
  int tiles;
  int total;
};

enum class AttentionForwardBarrier : int {  // true after the wait:
  q_full,                                   // Q of the tile is in its slot
  q_empty,                                  // the slot is free: O, staged there, has been read
  k_full,
  k_empty,
  v_full,
  v_empty,
  tile_full,    // the slot describes the next tile
  tile_empty,   // nobody reads the slot any more
  tile_wanted,  // the load role will soon need the tile after the slot's
  count,
};

constexpr AttentionForwardSmem attention_forward_smem(const AttentionForwardSpec& spec) {
  AttentionForwardSmem s{};
  const int widest = spec.head_dim_qk > spec.head_dim_v ? spec.head_dim_qk : spec.head_dim_v;
  s.q_slot_bytes = spec.tile_m() * widest * 2;
  s.k_stage_bytes = spec.tile_n * spec.head_dim_qk * 2;
  s.v_stage_bytes = spec.tile_n * spec.head_dim_v * 2;
  s.q = 0;
  s.k = s.q + kAttentionForwardQSlots * s.q_slot_bytes;
  s.v = s.k + kAttentionForwardStages * s.k_stage_bytes;
  s.zeros = s.v + kAttentionForwardStages * s.v_stage_bytes;
  s.barriers = s.zeros + 64 * 64 * 2;
  const int barriers_end = s.barriers + 2 * 8 * static_cast<int>(AttentionForwardBarrier::count);
  s.tiles = (barriers_end + 63) / 64 * 64;
  s.total = s.tiles + kAttentionForwardTileSlots * static_cast<int>(sizeof(AttentionForwardTile));
  return s;
}

// ---- launch

constexpr int attention_forward_threads(const AttentionForwardSpec& spec) {
  return 128 * (spec.warpgroups + 1);
}

// setmaxnreg of the producer's and of the multiplying warpgroups: together what the launch
// allocated, 168 registers x 384 threads or 128 x 512.
constexpr int attention_forward_producer_registers(const AttentionForwardSpec& spec) {
  return spec.warpgroups == 3 ? 32 : 24;
}
constexpr int attention_forward_mma_registers(const AttentionForwardSpec& spec) {
  return spec.warpgroups == 3 ? 160 : 240;
}

// Sizes of a call. Packed: batch is the number of sequences, seqlen_q and seqlen_kv are the totals.
struct AttentionForwardShape {
  int batch;
  int seqlen_q, seqlen_kv;
  int num_heads_q, num_heads_kv;
  int head_dim_qk, head_dim_v;
  bool packed;
  bool top_left;
};

// Where a debug_waits kernel reports. In host memory that the device maps (a trap ends the context,
// device memory with it).
struct AttentionForwardWaitFailure {
  int seen;  // 1 once the rest is written
  int block, thread;
  int role;     // 0 load, 1 schedule, 2 + i: warpgroup i
  int barrier;  // AttentionForwardBarrier
  int stage, parity;
};

constexpr int attention_forward_ceil_div(int a, int b) { return a / b + int{a % b != 0}; }

// The tiles of a last wave that would leave multiprocessors idle are shared out by keys: their key
// blocks in a row, every thread block takes an equal share of it, the end of one tile and the
// beginning of the next. A row's bits then depend on the number of tiles.
struct AttentionForwardSplit {
  int tiles;        // the launch's last; 0: none is split
  int tile_blocks;  // key blocks of each
  int share_blocks;
  int shares;
};

// Whether a spec's tiles may be split. Causal launches end with short tiles anyway, lengths in
// device memory say nothing to the host, and where both head dims are 64 nothing is gained.
constexpr bool attention_forward_splits(const AttentionForwardSpec& spec) {
  return !spec.causal && !spec.varlen && spec.warpgroups == 2;
}

// What parts cost beside their key blocks, in key blocks: a second end of a tile, fp32 outputs
// written, read and added up.
inline constexpr int kAttentionForwardSplitCost = 8;
inline constexpr int kAttentionForwardMinShare = 4;

// A part of a tile: what share `position / share_blocks` has of the tile that `position` lies in.
struct AttentionForwardPart {
  int split_tile;
  int begin, blocks;  // of the tile's key blocks
  int parts;          // of the tile
  int slot, first_slot;
};

// `rest`: blocks of the share from `position` on. Both a share and a tile further are one slot
// further, so every part has its own.
constexpr AttentionForwardPart attention_forward_part(const AttentionForwardSplit& split,
                                                      int position, int rest) {
  AttentionForwardPart part{};
  part.split_tile = position / split.tile_blocks;
  const int first = part.split_tile * split.tile_blocks;
  const int first_share = first / split.share_blocks;
  part.begin = position - first;
  part.blocks = split.tile_blocks - part.begin < rest ? split.tile_blocks - part.begin : rest;
  part.parts = (first + split.tile_blocks - 1) / split.share_blocks - first_share + 1;
  part.first_slot = first_share + part.split_tile;
  part.slot = position / split.share_blocks + part.split_tile;
  return part;
}

struct AttentionForwardParams {
  // Pointers, set by the caller; each may be null.
  float* lse;                  // natural log; [batch, head, row], rows contiguous
  long long lse_batch_stride;  // in elements; 0 when packed
  long long lse_head_stride;
  const void* cu_seqlens_q;  // varlen, packed: batch + 1 entries
  const void* cu_seqlens_kv;
  const void* seqlens_q;  // varlen: batch entries; null: the whole slot
  const void* seqlens_kv;
  void* counter;  // kAttentionForwardCounterBytes of anything; null where the plan says 0 bytes
  void* parts;    // attention_forward_parts_bytes of anything, 16-byte aligned
  unsigned long long* longest_block;  // maximum over blocks of their cycles is put here
  AttentionForwardWaitFailure* wait_failure;
  // Widths of the four arrays above, in their order.
  bool cu_seqlens_q_int64, cu_seqlens_kv_int64, seqlens_q_int64, seqlens_kv_int64;
  unsigned long long launch;  // with workspace: a number made up for this launch, even
  // Set by attention_forward_params.
  bool top_left;
  bool packed;
  unsigned q_sign;   // xor of Q's fragments: a negative scale turns Q around
  float scale_log2;  // |scale| log2 e
  int num_seqs;
  int seqlen_q, seqlen_kv;
  int num_heads_q, heads_per_kv_head;
  int tiles_per_head, late_tiles, heads_per_section, num_tiles;  // not packed
  AttentionForwardSplit split;
};

// Bytes of K and V that a wave of tiles should share in the 50 MB L2. 16 MiB and 64 MiB are slower
// by 2 % and 7 %.
inline constexpr long long kAttentionForwardL2Bytes = 32ll << 20;

constexpr AttentionForwardParams attention_forward_params(const AttentionForwardSpec& spec,
                                                          const AttentionForwardShape& shape,
                                                          const AttentionForwardSplit& split,
                                                          double scale) {
  AttentionForwardParams p{};
  p.split = split;
  p.top_left = shape.top_left;
  p.packed = shape.packed;
  p.q_sign = scale < 0 ? 0x80008000u : 0u;
  constexpr double kLog2E = 1.4426950408889634074;  // NOLINT(modernize-use-std-numbers): no headers
  p.scale_log2 = static_cast<float>((scale < 0 ? -scale : scale) * kLog2E);
  // With 0 a masked score would become -inf * 0. The smallest number leaves every score at 0.
  if (p.scale_log2 == 0.0f) p.scale_log2 = 1.4e-45f;
  p.num_seqs = shape.batch;
  p.seqlen_q = shape.seqlen_q;
  p.seqlen_kv = shape.seqlen_kv;
  p.num_heads_q = shape.num_heads_q;
  p.heads_per_kv_head = shape.num_heads_q / shape.num_heads_kv;
  p.tiles_per_head = attention_forward_ceil_div(shape.seqlen_q, spec.tile_m());
  const int heads = shape.packed ? 0 : shape.batch * shape.num_heads_q;
  p.num_tiles = p.tiles_per_head * heads;
  // Causal tiles run longest first, so many heads are in flight at once: a section holds as many as
  // the L2 does. Full tiles run head by head.
  p.heads_per_section = 1;
  if (spec.causal) {
    const long long kv_bytes = 2ll * shape.seqlen_kv * (spec.head_dim_qk + spec.head_dim_v);
    long long kv_heads = 1;
    while (kv_heads * 2 * kv_bytes <= kAttentionForwardL2Bytes &&
           kv_heads * 2 * p.heads_per_kv_head <= heads) {
      kv_heads *= 2;
    }
    p.heads_per_section = static_cast<int>(kv_heads) * p.heads_per_kv_head;
    // The quarter with the fewest keys, of all heads, ends the launch: 6 % of the work, and the
    // last tiles that blocks wait for are as short as the whole batch allows.
    p.late_tiles = p.tiles_per_head / 4;
  }
  return p;
}

// At least as many as there are tiles: slots may end inside a tile, and the rows before the first
// and after the last sequence count as slots.
constexpr long long attention_forward_tiles_bound(const AttentionForwardSpec& spec,
                                                  const AttentionForwardShape& shape) {
  const long long tiles = attention_forward_ceil_div(shape.seqlen_q, spec.tile_m());
  return (shape.packed ? tiles + shape.batch + 2 : tiles * shape.batch) * shape.num_heads_q;
}

// None where the last wave is (nearly) full, tiles are short, or `batch_invariant` forbids it.
constexpr AttentionForwardSplit attention_forward_split(const AttentionForwardSpec& spec,
                                                        const AttentionForwardShape& shape,
                                                        int multiprocessors, bool batch_invariant) {
  if (!attention_forward_splits(spec) || batch_invariant) return {};
  const auto tiles = static_cast<int>(attention_forward_tiles_bound(spec, shape) % multiprocessors);
  const int blocks = attention_forward_ceil_div(shape.seqlen_kv, spec.tile_n);
  const long long all_blocks = static_cast<long long>(tiles) * blocks;
  // Sums of positions and a share stay below 2^31.
  if (all_blocks == 0 || all_blocks >= 1ll << 29) return {};
  const int fair = attention_forward_ceil_div(static_cast<int>(all_blocks), multiprocessors);
  const int share = fair < kAttentionForwardMinShare ? kAttentionForwardMinShare : fair;
  if (share + kAttentionForwardSplitCost > blocks) return {};
  return {tiles, blocks, share, attention_forward_ceil_div(static_cast<int>(all_blocks), share)};
}

// Pieces of work that blocks take: whole tiles, then shares.
constexpr long long attention_forward_pieces_bound(const AttentionForwardSpec& spec,
                                                   const AttentionForwardShape& shape,
                                                   const AttentionForwardSplit& split) {
  return attention_forward_tiles_bound(spec, shape) - split.tiles + split.shares;
}

// Of workspace, 16-byte aligned, with which the blocks share out pieces: none where the grid has a
// block for every piece.
inline constexpr int kAttentionForwardCounterBytes = 16;
constexpr int attention_forward_counter_bytes(const AttentionForwardSpec& spec,
                                              const AttentionForwardShape& shape,
                                              const AttentionForwardSplit& split, int grid) {
  const bool more = attention_forward_pieces_bound(spec, shape, split) > grid;
  return more ? kAttentionForwardCounterBytes : 0;
}

// For the parts of split tiles: fp32 outputs, maxima and sums of a slot, warpgroup by warpgroup;
// before them 8 bytes for every warpgroup of every split tile.
constexpr int attention_forward_slab_bytes(const AttentionForwardSpec& spec) {
  return 128 * 16 * (spec.head_dim_v / 8 + 1);
}
constexpr int attention_forward_arrival_bytes(const AttentionForwardSpec& spec,
                                              const AttentionForwardSplit& split) {
  return attention_forward_ceil_div(8 * split.tiles * spec.warpgroups, 16) * 16;
}
constexpr long long attention_forward_parts_bytes(const AttentionForwardSpec& spec,
                                                  const AttentionForwardSplit& split) {
  if (split.tiles == 0) return 0;
  const long long slots = split.shares + split.tiles - 1;
  return attention_forward_arrival_bytes(spec, split) +
         slots * spec.warpgroups * attention_forward_slab_bytes(spec);
}

constexpr int attention_forward_grid(const AttentionForwardSpec& spec,
                                     const AttentionForwardShape& shape,
                                     const AttentionForwardSplit& split, int multiprocessors) {
  if (shape.seqlen_q == 0) return 0;
  const long long pieces = attention_forward_pieces_bound(spec, shape, split);
  return pieces < multiprocessors ? static_cast<int>(pieces) : multiprocessors;
}

// ---- tensor maps

// q, k, v or o in device memory, [batch, rows, heads, head_dim] of 16-bit elements, strides in
// bytes. Packed: batch 1, its stride is not looked at.
struct AttentionForwardTensor {
  unsigned long long address;
  long long batch_stride, row_stride, head_stride;
  int batch, rows, heads, head_dim;
};

// Keys that some query of a sequence sees; the rest must have no influence at all.
constexpr int attention_forward_seen_keys(const AttentionForwardSpec& spec,
                                          const AttentionForwardShape& shape) {
  const bool cut = spec.causal && shape.top_left && shape.seqlen_q < shape.seqlen_kv;
  return cut ? shape.seqlen_q : shape.seqlen_kv;
}

enum class AttentionForwardOperand { q, k, v, o };

// cuTensorMapEncodeTiled(map, FLOAT16 or BFLOAT16, 5, address, dims, strides, box, {1, 1, 1, 1, 1},
// INTERLEAVE_NONE, SWIZZLE_128B, L2_PROMOTION_L2_256B, FLOAT_OOB_FILL_NONE).
// Axes: column, row, head, batch, end. Row r of a sequence that begins at row b of the tensor and
// of which n rows may be seen has row coordinate rows - n + r and, with varlen, end coordinate b +
// n over an address moved back by `rows` rows: the sum addresses row b + r, and the row axis ends
// exactly behind the sequence's last row. So loads fill rows past it with zeros and stores drop
// them, whatever the tensor holds there. Without varlen: row r, end 0.
struct AttentionForwardMap {
  unsigned long long address;
  unsigned long long dims[5];
  unsigned long long strides[4];  // of axes 1 to 4, bytes
  unsigned box[5];
};

constexpr AttentionForwardMap attention_forward_map(const AttentionForwardSpec& spec,
                                                    const AttentionForwardShape& shape,
                                                    AttentionForwardOperand operand,
                                                    const AttentionForwardTensor& t) {
  const bool kv = operand == AttentionForwardOperand::k || operand == AttentionForwardOperand::v;
  const unsigned box_rows = kv ? static_cast<unsigned>(spec.tile_n) : 64u;
  // Keys that no query sees stay outside the map: see attention_forward_seen_keys.
  const int rows = kv && !spec.varlen ? attention_forward_seen_keys(spec, shape) : t.rows;
  const auto extent = [](int n) { return static_cast<unsigned long long>(n > 0 ? n : 1); };
  // The stride of an axis of extent 1 is never used, but must be legal.
  const auto stride = [](int n, long long bytes) {
    return static_cast<unsigned long long>(n > 1 ? bytes : 16);
  };
  AttentionForwardMap m{};
  m.address = t.address;
  if (rows == 0) m.address = 16;  // no key: the map is never read through
  m.dims[0] = extent(t.head_dim);
  m.dims[1] = extent(rows);
  m.dims[2] = extent(t.heads);
  m.dims[3] = extent(t.batch);
  m.dims[4] = 1;
  m.strides[0] = stride(t.rows, t.row_stride);
  m.strides[1] = stride(t.heads, t.head_stride);
  m.strides[2] = stride(t.batch, t.batch_stride);
  m.strides[3] = 16;
  if (spec.varlen && t.rows > 0) {
    m.address -= static_cast<unsigned long long>(t.rows) * m.strides[0];
    m.dims[4] = extent(t.rows) + 1;
    m.strides[3] = m.strides[0];
  }
  m.box[0] = 64;
  m.box[1] = box_rows;
  m.box[2] = m.box[3] = m.box[4] = 1;
  return m;
}

// ---- what is refused; null: accepted

// Sums of two positions and a tile stay below 2^31.
inline constexpr int kAttentionForwardMaxRows = (1 << 30) - 1024;

constexpr const char* attention_forward_reject_tensor(const AttentionForwardTensor& t) {
  if (t.rows == 0 || t.heads == 0 || t.batch == 0) return nullptr;
  if (t.address % 16 != 0) return "base pointers must be multiples of 16 bytes";
  const long long strides[] = {t.rows > 1 ? t.row_stride : 16, t.heads > 1 ? t.head_stride : 16,
                               t.batch > 1 ? t.batch_stride : 16};
  for (const long long s : strides) {
    if (s % 16 != 0) return "outer strides must be multiples of 16 bytes";
    if (s <= 0) return "outer strides of 0 or less are not addressable by TMA";
    if (s >= 1ll << 40) return "outer strides must be below 2^40 bytes";
  }
  return nullptr;
}

constexpr const char* attention_forward_reject(const AttentionForwardSpec& spec,
                                               const AttentionForwardShape& shape) {
  if (shape.head_dim_qk < 1 || shape.head_dim_v < 1) return "head_dim must be at least 1";
  if (shape.head_dim_qk > 128 || shape.head_dim_v > 128) return "head_dim must be at most 128";
  if (shape.head_dim_v % 8 != 0) {
    return "head_dim_v must be a multiple of 8: TMA stores units of 16 bytes, past a row's end";
  }
  if (shape.seqlen_q > kAttentionForwardMaxRows || shape.seqlen_kv > kAttentionForwardMaxRows) {
    return "more than 2^30 - 1024 rows in a tensor";
  }
  if (attention_forward_tiles_bound(spec, shape) >= 1ll << 30)
    return "more than 2^30 tiles of work";
  return nullptr;
}

}  // namespace onchip::sm90
