// Exact attention forward: O = softmax(scale Q K^T + mask) V, lse = log of the denominator, for
// fp16 and bf16 on sm_90a. The online softmax is Milakov and Gimelshein's (2018) in the tiling of
// Dao et al., "FlashAttention" (2022); asynchronous products over warp roles follow Shah et al.,
// "FlashAttention-3" (2024). Page: attention_forward.md.
//
// q [batch, rows, num_heads_q, head_dim_qk], k, v [batch, rows, num_heads_kv, ..], o like q with
// head_dim_v, through rank-5 tensor maps (attention_forward_map); packed: batch is 1.
// Grid: at most one block a multiprocessor; each takes tiles of 64 query rows a warpgroup until
// none is left. Block: warpgroup 0 = load warp, schedule warp, two idle; the others multiply.
#include "gpu/kernels/sm90/attention_forward_block.cuh"
#include "gpu/kernels/sm90/attention_forward_plan.hpp"
#include "gpu/kernels/sm90/attention_forward_schedule.cuh"
#include "gpu/tile/fragment.cuh"
#include "gpu/tile/split_softmax.cuh"
#include "gpu/tile/swizzle.cuh"
#include "gpu/tile/tma.cuh"
#include "gpu/tile/wgmma.cuh"

namespace onchip::sm90 {

// ---- load role: one thread

// Key blocks of a tile still to be loaded when the next tile is asked for: finding it takes a round
// trip to the L2, two with lengths.
inline constexpr int kTileLead = 4;

template <AttentionForwardSpec spec>
ONCHIP_DEVICE void load(const Block<spec>& block, const Maps& maps) {
  constexpr AttentionForwardSmem kSmem = Block<spec>::kSmem;
  int it = 0;  // K and V block of this kernel block, counted over all tiles
#pragma unroll 1
  for (int n = 0;; ++n) {
    block.wait_full(Barrier::tile_full, n);
    const Tile t = block.tile(n);
    if (t.blocks == 0) break;
    block.arrive(Barrier::tile_empty, n);
    block.wait_empty(Barrier::q_empty, n);
    const u32 q_full = block.barrier(Barrier::q_full, n & 1);
    // The others' slabs keep what they hold: their rows are not live.
    const int live = min(spec.warpgroups, attention_forward_ceil_div(t.live_rows, 64));
    mbarrier_arrive_expect_tx(q_full, live * 64 * spec.head_dim_qk * 2);
    for (int w = 0; w < live; ++w) {
      for (int c = 0; c < spec.head_dim_qk / kChunkColumns; ++c) {
        tma_load(block.q_slab(n, w) + c * (64 * kChunkRowBytes), maps.q, q_full,
                 {c * kChunkColumns, t.q_row + 64 * w, t.head, t.batch, t.q_end}, kEvictFirst);
      }
    }
    const auto load_block = [&](auto is_v, int at, int use) {
      constexpr bool kV = is_v.value;
      constexpr int kBytes = kV ? kSmem.v_stage_bytes : kSmem.k_stage_bytes;
      constexpr int kChunkBytes = spec.tile_n * kChunkRowBytes;
      block.wait_empty(kV ? Barrier::v_empty : Barrier::k_empty, use);
      const u32 full = block.barrier(kV ? Barrier::v_full : Barrier::k_full, use & 1);
      const u32 stage = block.smem + (kV ? kSmem.v : kSmem.k) + (use & 1) * kBytes;
      mbarrier_arrive_expect_tx(full, kBytes);
      for (int c = 0; c < kBytes / kChunkBytes; ++c) {
        tma_load(stage + c * kChunkBytes, kV ? maps.v : maps.k, full,
                 {c * kChunkColumns, t.kv_row + at * spec.tile_n, t.kv_head, t.batch, t.kv_end},
                 kEvictLast);
      }
    };
    // V is needed one step after its K.
    load_block(Constant<false>{}, t.blocks - 1, it);
#pragma unroll 1
    for (int j = t.blocks - 1; j >= 0; --j, ++it) {
      if (j == min(kTileLead, t.blocks - 1)) block.arrive(Barrier::tile_wanted, n);
      if (j > 0) load_block(Constant<false>{}, j - 1, it + 1);
      load_block(Constant<true>{}, j, it);
    }
  }
}

// ---- mma role: one warpgroup

template <AttentionForwardSpec spec>
ONCHIP_DEVICE void multiply(const Block<spec>& block, const Maps& maps) {
  constexpr AttentionForwardSmem kSmem = Block<spec>::kSmem;
  constexpr int kN = spec.tile_n;
  constexpr int kQSteps = spec.q_in_registers ? spec.head_dim_qk / 16 : 1;
  // A warpgroup may have to pass over the first block of a tile, never over two: the V of a second
  // could only be loaded after products that this warpgroup issues later.
  static_assert(64 * (spec.warpgroups - 1) <= kN);
  // Where P V is long its wait hides the exchange of maxima. NOTE(codegen): and without a branch
  // ptxas computes some exponentials before it; nvcc 13.0, early_exponentials in tests/resources.
  constexpr bool kVote = spec.head_dim_v <= 64;
  const AttentionForwardParams& p = block.params;
  const int w = block.role - static_cast<int>(Role::mma);
  const int thread = threadIdx.x % 128, lane = threadIdx.x % 32;
  const float c = p.scale_log2;
  const u32 q_slab = block.q_slab(0, w);
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
    const int next = w + 1 == spec.warpgroups ? 0 : w + 1;
    if constexpr (spec.turn_taking) named_barrier_arrive(kTurn + next, 256);
  };
  const auto pass_turn = [&] {
    turn_begin();
    turn_end();
  };
  if (spec.turn_taking && w == spec.warpgroups - 1) turn_end();
  const auto mask_block = [&](int n, int j) {
    const int limit = block.tile(n).kv_limit;
    const int seen = block.tile(n).diagonal + 64 * w + accumulator_row(thread);
    const int column = j * kN + accumulator_column(thread);
    mask_columns(s, (spec.causal ? min(limit, seen) : limit) - column,
                 (spec.causal ? min(limit, seen + 8) : limit) - column);
  };
  // S = Q K^T of tile n's Q and block number `use`.
  const auto issue_qk = [&](int n, int use) {
    const u32 k = k_descriptor + (use & 1) * (kSmem.k_stage_bytes >> 4);
    if constexpr (spec.q_in_registers) {
      issue_k_major<kN, spec.bf16>(s, q, k);
    } else {
      issue_k_major<kN, spec.bf16, spec.head_dim_qk / 16>(
          s, q_descriptor + (n & 1) * (kSmem.q_slot_bytes >> 4), k);
    }
  };
  // O += P V. P was rounded to the input type: its error is the one that every 16-bit P V has.
  const auto issue_pv = [&](int use) {
    issue_mn_major<spec.head_dim_v, spec.bf16>(
        o, probabilities, v_descriptor + (use & 1) * (kSmem.v_stage_bytes >> 4));
  };
  // S of block j and, under it, O += P V of block j + 1; then the softmax of S.
  const auto step = [&](auto masked, int n, int j) {
    block.wait_full(Barrier::k_full, it + 1);
    turn_begin();
    pin(s, probabilities, o, q);
    wgmma_fence();
    issue_qk(n, it + 1);
    block.wait_full(Barrier::v_full, it);
    rescale(o, state);  // for the block before, under the product just issued
    pin(o);
    wgmma_fence();
    issue_pv(it);
    turn_end();
    wgmma_wait_group<1>();
    pin(s);
    release(Barrier::k_empty, it + 1);
    if constexpr (masked.value) mask_block(n, j);
    softmax_block<false, masked.value, kVote>(s, state, c);
    wgmma_wait_group<0>();
    pin(o, probabilities);
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
        pass_turn();
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
      if (j > 1) pass_turn();
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
    release(Barrier::k_empty, it);
    mask_block(n, j);
    softmax_block<true, true, kVote>(s, state, c);
    pack_accumulator<spec.bf16>(probabilities, s);
  };
  // Divide by the sum; lse; O through this warpgroup's own Q slab. Of a split tile only by the
  // warpgroup that brings the last part.
  const auto finish_tile = [&](int n) {
    const Tile& tile = block.tile(n);
    const int live_rows = tile.live_rows;
    float maximum[2], sum[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      maximum[r] = state.maximum[r];
      sum[r] = row_sum(state.sum[r]);
    }
    bool writes = true;
    if constexpr (attention_forward_splits(spec)) {
      if (uniform(tile.parts) != 0) {
        constexpr int kSlab = attention_forward_slab_bytes(spec) / 4;
        u64* const arrivals = static_cast<u64*>(p.parts);
        float* const slabs = reinterpret_cast<float*>(
            static_cast<char*>(p.parts) + attention_forward_arrival_bytes(spec, p.split));
        constexpr i64 kStride = kSlab * spec.warpgroups;
        const SplitOutput split = {slabs + tile.first_slot * kStride + w * kSlab, kStride,
                                   tile.slot - tile.first_slot, tile.parts,
                                   arrivals + tile.split_tile * spec.warpgroups + w};
        writes = combine_parts(split, p.launch, kWarpgroup + w, thread, c, o, maximum, sum);
      }
    }
    const int row = 64 * w + accumulator_row(thread);
    float inverse[2];
    bool live[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      live[r] = sum[r] != 0.0f && row + 8 * r < live_rows;
      inverse[r] = live[r] ? __fdividef(1.0f, sum[r]) : 0.0f;
      if (writes && p.lse != nullptr && lane % 4 == 0 && row + 8 * r < tile.slot_rows) {
        constexpr float kLn2 = 0.693147180559945f;
        p.lse[tile.lse + row + 8 * r] =
            live[r] ? (maximum[r] * c + lg2(sum[r])) * kLn2 : -infinity();
      }
    }
    const u32 slab = q_slab + (n & 1) * kSmem.q_slot_bytes;
    store_accumulator<spec.bf16>(slab, thread, o, inverse, live);
    fence_proxy_async_shared();
    named_barrier_sync(kWarpgroup + w, 128);
    if (writes && thread == 0) {
      for (int chunk = 0; chunk < spec.head_dim_v / kChunkColumns; ++chunk) {
        tma_store(maps.o, slab + chunk * (64 * kChunkRowBytes),
                  {chunk * kChunkColumns, tile.o_row + 64 * w, tile.head, tile.batch, tile.o_end});
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
    issue_qk(n, it);
    wgmma_wait_group<0>();
    pin(s, q);
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

      // The tile's last O += P V and the next tile's first S; without a next tile S is the product
      // of what lies there, which nobody looks at. NOTE(codegen): a path of its own for that case
      // would cost a quarter more time to compile; a branch between the products, serialised ones
      // (C7514; nvcc 13.0). So everything is decided before.
      rescale(o, state);
      const int last = it++;
      j = take_tile(n + 1, full) - 1;
      const bool more = j >= 0;
      if (more) take_q(n + 1);
      block.wait_full(Barrier::v_full, last);
      pin(s, o, probabilities);
      wgmma_fence();
      issue_pv(last);
      issue_qk(n + 1, it);
      wgmma_wait_group<1>();
      pin(o, probabilities);
      release(Barrier::v_empty, last);
      finish_tile(n);
      wgmma_wait_group<0>();
      pin(s, q);
      if (!more) {
        free_q(n);
        break;
      }
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
  const int role = warpgroup == 0 ? warp : static_cast<int>(Role::mma) + warpgroup - 1;
  const Block<spec> block{{smem + kSmem.barriers, params.wait_failure, role},
                          params,
                          smem,
                          reinterpret_cast<Tile*>(memory + kSmem.tiles)};
  if (smem % 1024 != 0) trap();  // the swizzle counts rows from there
  if (threadIdx.x == 0) {
    for (const TensorMap* map : {maps.q, maps.k, maps.v, maps.o}) prefetch_tensormap(map);
    constexpr int kWarps = 4 * spec.warpgroups;
    block.init({1, spec.warpgroups, 1, kWarps, 1, kWarps, 1, kWarps + 1, 1});
  }
  zero_shared(smem + kSmem.zeros, 64 * kChunkRowBytes);
  fence_proxy_async_shared();
  __syncthreads();

  if (warpgroup == 0) {
    setmaxnreg_dec<attention_forward_producer_registers(spec)>();
    if (warp == static_cast<int>(Role::load)) {
      if (elect()) load(block, maps);
    } else if (warp == static_cast<int>(Role::schedule)) {
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
