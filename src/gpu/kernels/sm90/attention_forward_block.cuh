// What every role of the attention forward kernel (attention_forward.cuh) needs: barriers, tensor
// maps, and where the block's shared memory holds what.
#pragma once
#include "gpu/kernels/sm90/attention_forward_plan.hpp"
#include "gpu/tile/pipeline.cuh"
#include "gpu/tile/tma.cuh"

namespace onchip::sm90 {

// Named barriers of a warpgroup: 0 is the block's.
inline constexpr int kWarpgroup = 1;  // + warpgroup; its 128 threads wrote to shared memory
inline constexpr int kTurn = 5;       // + warpgroup; it may issue its products

using namespace tile;
using Barrier = AttentionForwardBarrier;
using Tile = AttentionForwardTile;

enum class Role : int { load, schedule, mma };  // the first two: warps of warpgroup 0

// No box may lie wholly outside: TMA then touches the map's base, with varlen out of the tensor.
struct Maps {
  const TensorMap *q, *k, *v, *o;
};

template <AttentionForwardSpec spec>
struct Block : Pipeline<Barrier, AttentionForwardWaitFailure, spec.debug_waits> {
  static constexpr AttentionForwardSmem kSmem = attention_forward_smem(spec);

  const AttentionForwardParams& params;
  u32 smem;
  Tile* tiles;

  ONCHIP_MEMBER Tile& tile(int n) const { return tiles[n & 1]; }
  // Warpgroup w's part of the Q slot of tile n.
  ONCHIP_MEMBER u32 q_slab(int n, int w) const {
    constexpr int kSlabBytes = kSmem.q_slot_bytes / spec.warpgroups;
    return smem + kSmem.q + (n & 1) * kSmem.q_slot_bytes + w * kSlabBytes;
  }
};

}  // namespace onchip::sm90
