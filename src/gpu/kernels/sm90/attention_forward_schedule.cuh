// The schedule role of the attention forward kernel (attention_forward.cuh), a warp of each block:
// which tile is next and where it lies. Rows without any key it writes itself.
#pragma once
#include "gpu/kernels/sm90/attention_forward_block.cuh"
#include "gpu/tile/sequences.cuh"
#include "gpu/tile/swizzle.cuh"
#include "gpu/tile/tma.cuh"
#include "gpu/tile/work_counter.cuh"

namespace onchip::sm90 {

static_assert(sizeof(WorkCounter) == kAttentionForwardCounterBytes);

template <AttentionForwardSpec spec>
ONCHIP_DEVICE Tile make_tile(const AttentionForwardParams& p, const TilePlace& place) {
  const Sequence& s = place.sequence;
  const int row = place.number * spec.tile_m();
  const int offset = p.top_left ? 0 : s.kv_length - s.q_length;
  Tile t{};
  t.kv_limit = spec.causal ? min(s.kv_length, s.q_length + offset) : s.kv_length;
  t.diagonal = row + offset + 1;
  t.live_rows = s.q_length - row;
  t.slot_rows = s.q_slot - row;
  const int seen = spec.causal ? min(t.kv_limit, row + spec.tile_m() + offset) : t.kv_limit;
  t.blocks = t.live_rows <= 0 || seen <= 0 ? 0 : attention_forward_ceil_div(seen, spec.tile_n);
  t.head = place.head;
  t.kv_head = t.head / p.heads_per_kv_head;
  t.batch = s.batch;
  t.q_row = spec.varlen ? p.seqlen_q - s.q_length + row : row;
  t.q_end = spec.varlen ? s.q_begin + s.q_length : 0;
  t.o_row = spec.varlen ? p.seqlen_q - s.q_slot + row : row;
  t.o_end = spec.varlen ? s.q_begin + s.q_slot : 0;
  t.kv_row = spec.varlen ? p.seqlen_kv - t.kv_limit : 0;
  t.kv_end = spec.varlen ? s.kv_begin + t.kv_limit : 0;
  t.lse = s.batch * p.lse_batch_stride + t.head * p.lse_head_stride + s.q_begin + row;
  return t;
}

// Rows without any key.
template <AttentionForwardSpec spec>
ONCHIP_DEVICE void write_empty(const Block<spec>& block, const Maps& maps, const Tile& t) {
  if (elect()) {
    for (int w = 0; w < spec.warpgroups && 64 * w < t.slot_rows; ++w) {
      for (int c = 0; c < spec.head_dim_v; c += kChunkColumns) {
        tma_store(maps.o, block.smem + block.kSmem.zeros,
                  {c, t.o_row + 64 * w, t.head, t.batch, t.o_end});
      }
    }
    tma_store_commit();
  }
  if (block.params.lse == nullptr) return;
  const int rows = min(t.slot_rows, spec.tile_m());
  for (int r = threadIdx.x % 32; r < rows; r += 32) block.params.lse[t.lse + r] = -infinity();
}

// A tile's part instead of the tile.
template <AttentionForwardSpec spec>
ONCHIP_DEVICE void take_part(Tile& t, const AttentionForwardPart& part) {
  t.blocks = part.blocks;
  t.kv_limit -= part.begin * spec.tile_n;
  t.kv_row += part.begin * spec.tile_n;
  t.parts = part.parts;
  t.slot = part.slot;
  t.first_slot = part.first_slot;
  t.split_tile = part.split_tile;
}

// Finds tiles, describes them to the other roles, and itself writes those without keys.
template <AttentionForwardSpec spec>
ONCHIP_DEVICE void schedule(const Block<spec>& block, const Maps& maps) {
  const AttentionForwardParams& p = block.params;
  const int lane = threadIdx.x % 32;
  WorkTaker counter{static_cast<WorkCounter*>(p.counter), p.launch};
  const bool packed = spec.varlen && p.packed;
  const UsedLengths used = {p.seqlens_q, p.seqlens_kv, p.seqlens_q_int64, p.seqlens_kv_int64};
  const DenseBatch dense = {p.seqlen_q,   p.seqlen_kv,         p.num_heads_q, p.tiles_per_head,
                            p.late_tiles, p.heads_per_section, p.num_tiles};
  SlotScan<spec.tile_m()> scan;
  if (packed) {
    scan.start({p.cu_seqlens_q, p.cu_seqlens_kv, p.cu_seqlens_q_int64, p.cu_seqlens_kv_int64,
                p.num_seqs, p.seqlen_q, p.seqlen_kv, p.num_heads_q});
  }
  bool more = true;
  int t = blockIdx.x;          // a tile, behind the last whole one a share of those that are split
  int position = 0, rest = 0;  // of a share
  for (int n = 0;;) {
    int number = t;
    if constexpr (attention_forward_splits(spec)) {
      const int whole_tiles = p.num_tiles - p.split.tiles;
      if (t >= whole_tiles) {
        if (rest == 0) {
          position = (t - whole_tiles) * p.split.share_blocks;
          rest = max(min(p.split.share_blocks, p.split.tiles * p.split.tile_blocks - position), 0);
        }
        number = rest == 0 ? p.num_tiles : whole_tiles + position / p.split.tile_blocks;
      }
    }
    TilePlace place;
    more = more && (packed ? find_packed(scan, used, p.num_seqs, number, place)
                           : find_dense(dense, used, number, place));
    Tile tile{};
    if (more) tile = make_tile<spec>(p, place);
    if constexpr (attention_forward_splits(spec)) {
      if (more && rest > 0) {
        const AttentionForwardPart part = attention_forward_part(p.split, position, rest);
        take_part<spec>(tile, part);
        position += part.blocks;
        rest -= part.blocks;
      }
    }
    if (more && tile.blocks == 0) {
      write_empty(block, maps, tile);
    } else {
      block.wait_empty(Barrier::tile_empty, n);
      if (lane == 0) {
        block.tile(n) = tile;
        block.arrive(Barrier::tile_full, n);
      }
      __syncwarp();
      if (!more) break;
      // What a block has taken no idle block can: it takes a tile only just in time.
      block.wait_full(Barrier::tile_wanted, n++);
    }
    if (rest > 0) continue;
    more = p.counter != nullptr;  // else the grid has a block for every tile
    if (more) t = gridDim.x + uniform(lane == 0 ? counter.take() : 0);
  }
  if (p.counter != nullptr && lane == 0) counter.leave(gridDim.x);
  tma_store_wait();
}

}  // namespace onchip::sm90
