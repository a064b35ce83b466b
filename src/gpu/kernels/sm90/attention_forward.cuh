// Exact attention forward: O = softmax(scale Q K^T + mask) V, lse = log of the denominator, for
// fp16 and bf16 on sm_90a. The online softmax is Milakov and Gimelshein's (2018) in the tiling of
// Dao et al., "FlashAttention" (2022); asynchronous products over warp roles follow Shah et al.,
// "FlashAttention-3" (2024). Page: attention_forward.md.
//
// q [batch, rows, num_heads_q, head_dim_qk], k, v [batch, rows, num_heads_kv, ..], o like q with
// head_dim_v, through rank-5 tensor maps (attention_forward_map); packed: batch is 1.
// Grid: at most one block a multiprocessor, each takes tiles of 64 query rows a warpgroup until
// none is left. Block: warpgroup 0 = load warp, schedule warp, two idle warps; warpgroups 1..
// multiply.
#include "gpu/kernels/sm90/attention_forward_plan.hpp"
#include "gpu/tile/fragment.cuh"
#include "gpu/tile/named_barrier.cuh"
#include "gpu/tile/online_softmax.cuh"
#include "gpu/tile/pipeline.cuh"
#include "gpu/tile/sequences.cuh"
#include "gpu/tile/tma.cuh"
#include "gpu/tile/wgmma.cuh"
#include "gpu/tile/work_counter.cuh"

namespace onchip::sm90 {

using namespace tile;
using Barrier = AttentionForwardBarrier;
using Tile = AttentionForwardTile;
static_assert(sizeof(WorkCounter) == kAttentionForwardCounterBytes);

enum class Role : int { load, schedule, mma };

// Named barriers of a warpgroup: 0 is the block's.
inline constexpr int kWarpgroup = 1;  // + warpgroup; its 128 threads wrote to shared memory
inline constexpr int kTurn = 5;       // + warpgroup; it may issue its products

// Key blocks of a tile still to be loaded when the next tile is asked for: finding it takes a round
// trip to the L2, two with lengths.
inline constexpr int kTileLead = 1;

struct Maps {
  const TensorMap *q, *k, *v, *o;
};

// What every role needs.
template <AttentionForwardSpec spec>
struct Block : Pipeline<Barrier, AttentionForwardWaitFailure, spec.debug_waits> {
  static constexpr AttentionForwardSmem kSmem = attention_forward_smem(spec);

  const AttentionForwardParams& params;
  u32 smem;
  Tile* tiles;

  ONCHIP_MEMBER Tile& tile(int n) const { return tiles[n & 1]; }
};

// ---- schedule role

// What a tile is cut from.
struct Work {
  Sequence sequence;
  int m, head;  // tile of the sequence, query head
};

// Tile t of a packed batch, sequence by sequence, head by head, longest first.
template <AttentionForwardSpec spec>
ONCHIP_DEVICE bool find_packed(const AttentionForwardParams& p, SlotScan<spec.tile_m()>& scan,
                               int t, Work& work) {
  int slot = 0, rest = 0;
  Sequence& s = work.sequence;
  if (!scan.find(t, s, slot, rest)) return false;
  const int i = slot - 1;
  if (i < 0 || i >= p.num_seqs) {
    s.q_length = 0;
  } else {
    s.q_length = load_length(p.seqlens_q, p.seqlens_q_int64, i, s.q_slot);
    s.kv_length = load_length(p.seqlens_kv, p.seqlens_kv_int64, i, s.kv_length);
  }
  const int tiles = attention_forward_ceil_div(s.q_slot, spec.tile_m());
  work.head = rest / tiles;
  work.m = tiles - 1 - (rest - work.head * tiles);
  return true;
}

template <AttentionForwardSpec spec>
ONCHIP_DEVICE Tile make_tile(const AttentionForwardParams& p, const Work& work) {
  const Sequence& s = work.sequence;
  const int row = work.m * spec.tile_m();
  const int offset = p.top_left ? 0 : s.kv_length - s.q_length;
  Tile t;
  t.kv_limit = spec.causal ? min(s.kv_length, s.q_length + offset) : s.kv_length;
  t.diagonal = row + offset + 1;
  t.live_rows = s.q_length - row;
  t.slot_rows = s.q_slot - row;
  const int seen = spec.causal ? min(t.kv_limit, row + spec.tile_m() + offset) : t.kv_limit;
  t.blocks = t.live_rows <= 0 || seen <= 0 ? 0 : attention_forward_ceil_div(seen, spec.tile_n);
  t.head = work.head;
  t.kv_head = t.head / p.heads_per_kv_head;
  t.batch = s.batch;
  t.q_row = spec.varlen ? p.seqlen_q - s.q_length + row : row;
  t.q_end = spec.varlen ? s.q_begin + s.q_length : 0;
  t.o_row = spec.varlen ? p.seqlen_q - s.q_slot + row : row;
  t.o_end = spec.varlen ? s.q_begin + s.q_slot : 0;
  t.kv_row = spec.varlen ? p.seqlen_kv - t.kv_limit : 0;
  t.kv_end = spec.varlen ? s.kv_begin + t.kv_limit : 0;
  const i64 lse = s.batch * p.lse_batch_stride + t.head * p.lse_head_stride + s.q_begin + row;
  t.lse_low = static_cast<int>(lse);
  t.lse_high = static_cast<int>(lse >> 32);
  return t;
}

// Rows without any key.
template <AttentionForwardSpec spec>
ONCHIP_DEVICE void write_empty(const Block<spec>& block, const Maps& maps, const Tile& t) {
  if (elect()) {
    for (int w = 0; w < spec.warpgroups; ++w) {
      for (int c = 0; c < spec.head_dim_v; c += kChunkColumns) {
        tma_store(maps.o, block.smem + block.kSmem.zeros,
                  {c, t.o_row + 64 * w, t.head, t.batch, t.o_end});
      }
    }
    tma_store_commit();
  }
  if (block.params.lse == nullptr) return;
  float* lse =
      block.params.lse + (static_cast<i64>(t.lse_high) << 32 | static_cast<u32>(t.lse_low));
  const int rows = min(t.slot_rows, spec.tile_m());
  for (int r = threadIdx.x % 32; r < rows; r += 32) lse[r] = -infinity();
}

// Finds tiles, describes them to the other roles, and itself writes those without keys.
template <AttentionForwardSpec spec>
ONCHIP_DEVICE void schedule(const Block<spec>& block, const Maps& maps) {
  const AttentionForwardParams& p = block.params;
  const int lane = threadIdx.x % 32;
  const bool counted = p.counter != nullptr;
  WorkTaker counter{static_cast<WorkCounter*>(p.counter), p.launch};
  const bool packed = spec.varlen && p.packed;
  const DenseBatch dense = {
      p.seqlens_q, p.seqlens_kv,  p.seqlens_q_int64, p.seqlens_kv_int64,  p.seqlen_q,
      p.seqlen_kv, p.num_heads_q, p.tiles_per_head,  p.heads_per_section, p.num_tiles};
  SlotScan<spec.tile_m()> scan;
  if (packed) {
    scan.start({p.cu_seqlens_q, p.cu_seqlens_kv, p.cu_seqlens_q_int64, p.cu_seqlens_kv_int64,
                p.num_seqs, p.seqlen_q, p.seqlen_kv, p.num_heads_q});
  }
  bool more = true;
  int t = blockIdx.x;
  for (int n = 0;;) {
    Work work;
    more = more && (packed ? find_packed<spec>(p, scan, t, work)
                           : find_dense(dense, t, work.sequence, work.head, work.m));
    Tile tile{};
    if (more) tile = make_tile<spec>(p, work);
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
    more = counted;  // else the grid has a block for every tile
    if (more) t = gridDim.x + uniform(lane == 0 ? counter.take() : 0);
  }
  if (counted && lane == 0) counter.leave(gridDim.x);
  tma_store_wait();
}

// ---- load role: one thread

template <AttentionForwardSpec spec>
ONCHIP_DEVICE void load(const Block<spec>& block, const Maps& maps) {
  constexpr AttentionForwardSmem kSmem = Block<spec>::kSmem;
  int it = 0;  // K and V block of this kernel block, counted over all tiles
#pragma unroll 1
  for (int n = 0;; ++n) {
    block.wait_full(Barrier::tile_full, n);
    int j = block.tile(n).blocks - 1;
    if (j < 0) break;
    const int head = block.tile(n).head;
    const int kv_head = block.tile(n).kv_head;
    const int batch = block.tile(n).batch;
    const int q_row = block.tile(n).q_row;
    const int q_end = block.tile(n).q_end;
    const int kv_row = block.tile(n).kv_row;
    const int kv_end = block.tile(n).kv_end;
    block.arrive(Barrier::tile_empty, n);

    block.wait_empty(Barrier::q_empty, n);
    const u32 q_full = block.barrier(Barrier::q_full, n & 1);
    mbarrier_arrive_expect_tx(q_full, spec.tile_m() * spec.head_dim_qk * 2);
    for (int w = 0; w < spec.warpgroups; ++w) {
      for (int c = 0; c < spec.head_dim_qk / kChunkColumns; ++c) {
        const u32 slot = block.smem + kSmem.q + (n & 1) * kSmem.q_slot_bytes +
                         w * (kSmem.q_slot_bytes / spec.warpgroups) + c * (64 * kChunkRowBytes);
        tma_load(slot, maps.q, q_full, {c * kChunkColumns, q_row + 64 * w, head, batch, q_end},
                 kEvictFirst);
      }
    }
    const auto load_block = [&](const TensorMap* map, Barrier full, Barrier empty, u32 ring,
                                int stage_bytes, int at, int use) {
      block.wait_empty(empty, use);
      const u32 barrier = block.barrier(full, use & 1);
      mbarrier_arrive_expect_tx(barrier, stage_bytes);
      for (int c = 0; c < stage_bytes / (spec.tile_n * kChunkRowBytes); ++c) {
        tma_load(ring + (use & 1) * stage_bytes + c * (spec.tile_n * kChunkRowBytes), map, barrier,
                 {c * kChunkColumns, kv_row + at * spec.tile_n, kv_head, batch, kv_end},
                 kEvictLast);
      }
    };
    const auto load_k = [&](int at, int use) {
      load_block(maps.k, Barrier::k_full, Barrier::k_empty, block.smem + kSmem.k,
                 kSmem.k_stage_bytes, at, use);
    };
    const auto load_v = [&](int at, int use) {
      load_block(maps.v, Barrier::v_full, Barrier::v_empty, block.smem + kSmem.v,
                 kSmem.v_stage_bytes, at, use);
    };
    const int wanted = min(kTileLead, j);
    // V is needed one step after its K.
    load_k(j, it);
#pragma unroll 1
    for (; j >= 0; --j, ++it) {
      if (j == wanted) block.arrive(Barrier::tile_wanted, n);
      if (j > 0) load_k(j - 1, it + 1);
      load_v(j, it);
    }
  }
}

// ---- mma role: one warpgroup

// S = Q K^T
template <AttentionForwardSpec spec, int steps>
ONCHIP_DEVICE void issue_qk(float (&s)[spec.tile_n / 2], const u32 (&q)[steps][4], u32 q_descriptor,
                            u32 k_descriptor) {
  using Product = Wgmma<spec.tile_n, spec.bf16>;
#pragma unroll
  for (int k = 0; k < spec.head_dim_qk / 16; ++k) {
    const u32 b = k_descriptor + descriptor_step_k_major(k, spec.tile_n);
    if constexpr (spec.q_in_registers) {
      Product::rs(s, q[k], b, k != 0);
    } else {
      Product::ss(s, q_descriptor + descriptor_step_k_major(k, 64), b, k != 0);
    }
  }
  wgmma_commit_group();
}

// O += P V. P was rounded to the input type: its error is the one that every 16-bit P V has.
template <AttentionForwardSpec spec>
ONCHIP_DEVICE void issue_pv(float (&o)[spec.head_dim_v / 2], const u32 (&p)[spec.tile_n / 16][4],
                            u32 v_descriptor) {
#pragma unroll
  for (int k = 0; k < spec.tile_n / 16; ++k) {
    Wgmma<spec.head_dim_v, spec.bf16>::rs_mn(o, p[k], v_descriptor + descriptor_step_mn_major(k),
                                             1);
  }
  wgmma_commit_group();
}

template <AttentionForwardSpec spec>
ONCHIP_DEVICE void multiply(const Block<spec>& block, const Maps& maps) {
  constexpr AttentionForwardSmem kSmem = Block<spec>::kSmem;
  constexpr int kN = spec.tile_n;
  constexpr int kQSteps = spec.q_in_registers ? spec.head_dim_qk / 16 : 1;
  constexpr int kSlabBytes =
      kSmem.q_slot_bytes / spec.warpgroups;  // a warpgroup's part of a Q slot
  // A warpgroup may have to pass over the first block of a tile, never over two: the V of a second
  // could only be loaded after products that this warpgroup issues later.
  static_assert(64 * (spec.warpgroups - 1) <= kN);
  const AttentionForwardParams& p = block.params;
  const int w = block.role - static_cast<int>(Role::mma);
  const int thread = threadIdx.x % 128;
  const int lane = threadIdx.x % 32;
  const float c = p.scale_log2;
  const u32 q_slab = block.smem + kSmem.q + w * kSlabBytes;
  const u32 q_descriptor = descriptor_low(q_slab, 0);
  const u32 k_descriptor = descriptor_low(block.smem + kSmem.k, 0);
  const u32 v_descriptor = descriptor_low(block.smem + kSmem.v, kN * kChunkRowBytes);

  float s[kN / 2];                // scores, then probabilities, of one block
  u32 probabilities[kN / 16][4];  // of the block before
  float o[spec.head_dim_v / 2];
  u32 q[kQSteps][4];
  SoftmaxState state;
  int it = 0;  // running block number: its ring slot and parity

  const auto release = [&](Barrier kind, int n) {
    if (lane == 0) block.arrive(kind, n);
  };
  const auto turn_begin = [&] {
    if constexpr (spec.turn_taking) named_barrier_sync(kTurn + w, 256);
  };
  const auto turn_end = [&] {
    if constexpr (spec.turn_taking) {
      named_barrier_arrive(kTurn + (w + 1 == spec.warpgroups ? 0 : w + 1), 256);
    }
  };
  if (spec.turn_taking && w == spec.warpgroups - 1) turn_end();

  const auto mask_block = [&](int n, int j) {
    const int limit = block.tile(n).kv_limit;
    int limit0 = limit, limit1 = limit;
    if constexpr (spec.causal) {
      const int seen = block.tile(n).diagonal + 64 * w + accumulator_row(thread);
      limit0 = min(limit, seen);
      limit1 = min(limit, seen + 8);
    }
    const int column = j * kN + accumulator_column(thread);
    mask_columns(s, limit0 - column, limit1 - column);
  };
  // S of block j and, under it, O += P V of block j + 1; then the softmax of S.
  const auto step = [&](auto masked, int n, int j) {
    block.wait_full(Barrier::k_full, it + 1);
    turn_begin();
    pin(s);
    pin(probabilities);
    pin(o);
    pin(q);
    wgmma_fence();
    issue_qk<spec>(s, q, q_descriptor + (n & 1) * (kSmem.q_slot_bytes >> 4),
                   k_descriptor + ((it + 1) & 1) * (kSmem.k_stage_bytes >> 4));
    block.wait_full(Barrier::v_full, it);
    rescale(o, state);  // for the block before, under the product just issued
    pin(o);
    wgmma_fence();
    issue_pv<spec>(o, probabilities, v_descriptor + (it & 1) * (kSmem.v_stage_bytes >> 4));
    turn_end();
    wgmma_wait_group<1>();
    pin(s);
    release(Barrier::k_empty, it + 1);
    if constexpr (masked.value) mask_block(n, j);
    softmax_block<false, masked.value>(s, state, c);
    wgmma_wait_group<0>();
    pin(o);
    pin(probabilities);
    release(Barrier::v_empty, it);
    pack_accumulator<spec.bf16>(probabilities, s);
    ++it;
  };
  const auto pass_block = [&] {
    block.wait_full(Barrier::k_full, it);
    release(Barrier::k_empty, it);
    block.wait_full(Barrier::v_full, it);
    release(Barrier::v_empty, it);
    ++it;
  };
  // Blocks of the tile for this warpgroup; those below `full` need no mask. 0: no more tiles, or
  // none of its rows is in the slot.
  const auto take_tile = [&](int n, int& full) {
    block.wait_full(Barrier::tile_full, n);
    int blocks = uniform(block.tile(n).blocks);
    if (uniform(block.tile(n).slot_rows) <= 64 * w) blocks = 0;
    full = blocks;
    if constexpr (spec.causal) {
      if (blocks == 0) return 0;
      const int limit = uniform(block.tile(n).kv_limit);
      const int seen = uniform(block.tile(n).diagonal) + 64 * w;  // by the first row
      full = max(min(limit, seen), 0) / kN;
      // The tile's first block may lie beyond this warpgroup's last row.
      if (blocks > 1 && min(limit, seen + 63) <= (blocks - 1) * kN) {
        pass_block();
        turn_begin();
        turn_end();
        --blocks;
      }
    }
    return blocks;
  };
  // A tile of which this warpgroup has no row: its blocks are passed over, one a turn.
  const auto pass_tile = [&](int n) {
    block.wait_full(Barrier::q_full, n);
#pragma unroll 1
    for (int j = uniform(block.tile(n).blocks); j > 0; --j) {
      pass_block();
      if (j == 1) break;
      turn_begin();
      turn_end();
    }
    release(Barrier::tile_empty, n);
    if (thread == 0) block.arrive(Barrier::q_empty, n);
    __syncwarp();
  };
  const auto take_q = [&](int n) {
    block.wait_full(Barrier::q_full, n);
    const u32 slab = q_slab + (n & 1) * kSmem.q_slot_bytes;
    if constexpr (spec.q_in_registers) {
      load_fragments(q, slab, thread);
      negate_fragments(q, p.q_sign);
      pin(q);
    } else if (p.q_sign != 0) {
      negate_matrix<spec.head_dim_qk / 16>(slab, thread, p.q_sign);
      fence_proxy_async_shared();
      named_barrier_sync(kWarpgroup + w, 128);
    }
    block.wait_full(Barrier::k_full, it);
  };
  const auto first_softmax = [&](int n, int j) {
    wgmma_wait_group<0>();
    pin(s);
    pin(q);
    release(Barrier::k_empty, it);
    mask_block(n, j);
    softmax_block<true, true>(s, state, c);
    pack_accumulator<spec.bf16>(probabilities, s);
  };
  // Divide by the sum; lse; O through this warpgroup's own Q slab.
  const auto finish_tile = [&](int n) {
    const int live_rows = block.tile(n).live_rows;
    const int row = 64 * w + accumulator_row(thread);
    float inverse[2];
    bool live[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = row_sum(state.sum[r]);
      live[r] = sum != 0.0f && row + 8 * r < live_rows;
      inverse[r] = live[r] ? __fdividef(1.0f, sum) : 0.0f;
      if (p.lse != nullptr && lane % 4 == 0 && row + 8 * r < block.tile(n).slot_rows) {
        constexpr float kLn2 = 0.693147180559945f;
        const i64 at = static_cast<i64>(block.tile(n).lse_high) << 32 |
                       static_cast<u32>(block.tile(n).lse_low);
        p.lse[at + row + 8 * r] = live[r] ? (state.maximum[r] * c + lg2(sum)) * kLn2 : -infinity();
      }
    }
    const u32 slab = q_slab + (n & 1) * kSmem.q_slot_bytes;
    store_accumulator<spec.bf16>(slab, thread, o, inverse, live);
    fence_proxy_async_shared();
    named_barrier_sync(kWarpgroup + w, 128);
    if (thread == 0) {
#pragma unroll
      for (int chunk = 0; chunk < spec.head_dim_v / kChunkColumns; ++chunk) {
        tma_store(maps.o, slab + chunk * (64 * kChunkRowBytes),
                  {chunk * kChunkColumns, block.tile(n).o_row + 64 * w, block.tile(n).head,
                   block.tile(n).batch, block.tile(n).o_end});
      }
      tma_store_commit();
    }
    release(Barrier::tile_empty, n);
  };

  const auto free_q = [&](int n) {  // O has left the slot
    if (thread == 0) {
      tma_store_wait_read();
      block.arrive(Barrier::q_empty, n);
    }
    // NOTE(codegen): without it ptxas takes the loop for divergent and moves descriptors to
    // uniform registers before every product; nvcc 13.0, noticed by R2UR in tests/resources.
    __syncwarp();
  };

  int full = 0;
  for (int n = 0;; ++n) {
    int j = take_tile(n, full) - 1;
    if (j < 0) {
      if (uniform(block.tile(n).blocks) == 0) break;
      pass_tile(n);
      continue;
    }
    take_q(n);
    pin(s);
    wgmma_fence();
    issue_qk<spec>(s, q, q_descriptor + (n & 1) * (kSmem.q_slot_bytes >> 4),
                   k_descriptor + (it & 1) * (kSmem.k_stage_bytes >> 4));
    first_softmax(n, j);
    for (;; ++n) {
#pragma unroll
      for (int i = 0; i < spec.head_dim_v / 2; ++i) o[i] = 0.0f;
      if constexpr (spec.causal) {
#pragma unroll 1
        for (; j > full && j > 0; --j) step(Constant<true>{}, n, j - 1);
      }
#pragma unroll 1
      for (; j > 0; --j) step(Constant<false>{}, n, j - 1);

      // The tile's last O += P V and the next tile's first S.
      // NOTE(codegen): everything is decided before the two products are issued, and a tile without
      // a next has its own path: ptxas serialises products with a branch between them (C7514; nvcc
      // 13.0).
      rescale(o, state);
      const int last = it++;
      j = take_tile(n + 1, full) - 1;
      if (j < 0) {
        block.wait_full(Barrier::v_full, last);
        pin(o);
        pin(probabilities);
        wgmma_fence();
        issue_pv<spec>(o, probabilities, v_descriptor + (last & 1) * (kSmem.v_stage_bytes >> 4));
        wgmma_wait_group<0>();
        pin(o);
        release(Barrier::v_empty, last);
        finish_tile(n);
        free_q(n);
        break;
      }
      take_q(n + 1);
      block.wait_full(Barrier::v_full, last);
      pin(o);
      pin(probabilities);
      pin(s);
      wgmma_fence();
      issue_pv<spec>(o, probabilities, v_descriptor + (last & 1) * (kSmem.v_stage_bytes >> 4));
      issue_qk<spec>(s, q, q_descriptor + ((n + 1) & 1) * (kSmem.q_slot_bytes >> 4),
                     k_descriptor + (it & 1) * (kSmem.k_stage_bytes >> 4));
      wgmma_wait_group<1>();
      pin(o);
      pin(probabilities);
      release(Barrier::v_empty, last);
      finish_tile(n);
      first_softmax(n + 1, j);
      free_q(n);
    }
  }
  if (thread == 0) tma_store_wait();
}

// ---- entry

template <AttentionForwardSpec spec>
ONCHIP_DEVICE void attention_forward(const Maps& maps, const AttentionForwardParams& params,
                                     unsigned char* memory) {
  const i64 begin = clock64();
  const int warpgroup = uniform(threadIdx.x / 128), warp = uniform(threadIdx.x / 32);
  const u32 smem = shared_address(memory);
  constexpr AttentionForwardSmem kSmem = Block<spec>::kSmem;
  Block<spec> block{
      {smem + kSmem.barriers, params.wait_failure, static_cast<int>(Role::mma) + warpgroup - 1},
      params,
      smem,
      reinterpret_cast<Tile*>(memory + kSmem.tiles)};
  if (smem % 1024 != 0) trap();  // the swizzle counts rows from there
  if (threadIdx.x == 0) {
    prefetch_tensormap(maps.q);
    prefetch_tensormap(maps.k);
    prefetch_tensormap(maps.v);
    prefetch_tensormap(maps.o);
    constexpr int kWarps = 4 * spec.warpgroups;
    constexpr int kArrivals[] = {1, spec.warpgroups, 1, kWarps, 1, kWarps, 1, kWarps + 1, 1};
    for (int i = 0; i < 2 * static_cast<int>(Barrier::count); ++i) {
      mbarrier_init(block.barrier(Barrier{}, i), kArrivals[i / 2]);
    }
    fence_mbarrier_init();
  }
  for (int i = threadIdx.x; i < 64 * kChunkRowBytes / 16; i += blockDim.x) {
    st_shared(smem + kSmem.zeros + 16 * i, 0, 0, 0, 0);
  }
  fence_proxy_async_shared();
  __syncthreads();

  if (warpgroup == 0) {
    setmaxnreg_dec<attention_forward_producer_registers(spec)>();
    if (warp == 0) {
      block.role = static_cast<int>(Role::load);
      if (elect()) load(block, maps);
    } else if (warp == 1) {
      block.role = static_cast<int>(Role::schedule);
      schedule(block, maps);
    }
  } else {
    setmaxnreg_inc<attention_forward_mma_registers(spec)>();
    multiply(block, maps);
    if (params.longest_block != nullptr && threadIdx.x % 128 == 0) {
      atomicMax(params.longest_block, static_cast<u64>(clock64() - begin));
    }
  }
}

}  // namespace onchip::sm90

#ifdef ONCHIP_ATTENTION_FORWARD_SPEC
inline constexpr onchip::sm90::AttentionForwardSpec kSpec = {ONCHIP_ATTENTION_FORWARD_SPEC};

extern "C" __global__ void __launch_bounds__(onchip::sm90::attention_forward_threads(kSpec), 1)
    onchip_attention_forward(const __grid_constant__ onchip::tile::TensorMap q,
                             const __grid_constant__ onchip::tile::TensorMap k,
                             const __grid_constant__ onchip::tile::TensorMap v,
                             const __grid_constant__ onchip::tile::TensorMap o,
                             const __grid_constant__ onchip::sm90::AttentionForwardParams params) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  onchip::sm90::attention_forward<kSpec>({&q, &k, &v, &o}, params, shared_memory);
}
#endif
