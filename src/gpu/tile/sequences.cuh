// Sequences inside packed tensors: cu_seqlens and lengths in device memory, made safe, and the way
// from a running tile number to its sequence.
#pragma once
#include "gpu/tile/ptx.cuh"

namespace onchip::tile {

// A sequence as the tensors hold it.
struct Sequence {
  int batch;                      // index on the batch axis; 0 when packed
  int q_begin, q_slot, q_length;  // rows before it, rows it may use, rows it uses
  int kv_begin, kv_length;
};

// Element i of an int32 or int64 array in device memory, moved into [0, limit].
ONCHIP_DEVICE int load_index(const void* array, bool int64, int i, int limit) {
  const i64 v = int64 ? static_cast<const i64*>(array)[i] : static_cast<const int*>(array)[i];
  return v < 0 ? 0 : v > limit ? limit : static_cast<int>(v);
}
// Used length of sequence i; no array: all of its slot.
ONCHIP_DEVICE int load_length(const void* array, bool int64, int i, int slot) {
  return array == nullptr ? slot : load_index(array, int64, i, slot);
}

// A batch that is not packed: every sequence has as many tiles.
struct DenseBatch {
  const void *seqlens_q, *seqlens_kv;  // used lengths, or null
  bool q_int64, kv_int64;
  int seqlen_q, seqlen_kv, heads;
  int tiles_per_head, heads_per_section, num_tiles;
};

// Tile t: its sequence, head and number in it. Heads run in sections, the last tiles of all heads
// of a section first. False: there is no tile t.
ONCHIP_DEVICE bool find_dense(const DenseBatch& p, int t, Sequence& s, int& head, int& tile) {
  if (t >= p.num_tiles) return false;
  const int section_tiles = p.heads_per_section * p.tiles_per_head;
  const int section = t / section_tiles;
  const int rest = t - section * section_tiles;
  const int first = section * p.heads_per_section;
  const int section_heads = min(p.heads_per_section, p.num_tiles / p.tiles_per_head - first);
  const int step = rest / section_heads;
  const int batch_head = first + rest - step * section_heads;
  s.batch = batch_head / p.heads;
  s.q_begin = s.kv_begin = 0;
  s.q_slot = p.seqlen_q;
  s.q_length = load_length(p.seqlens_q, p.q_int64, s.batch, p.seqlen_q);
  s.kv_length = load_length(p.seqlens_kv, p.kv_int64, s.batch, p.seqlen_kv);
  head = batch_head - s.batch * p.heads;
  tile = p.tiles_per_head - 1 - step;
  return true;
}

struct PackedBatch {
  const void *cu_seqlens_q, *cu_seqlens_kv;  // num_seqs + 1 entries each
  bool q_int64, kv_int64;
  int num_seqs;
  int total_q, total_kv;
  int heads;  // tiles a slot are counted once a head
};

// A warp's position in the list of all tiles (of tile_m query rows of one head) of a packed batch.
// Slots are, in order, the rows before the first sequence, the sequences, and the rows after the
// last: together every query row once, whatever cu_seqlens holds. An end of a sequence that lies
// before the previous one, or past the tensor, is moved to the nearest that does not. Lane l stands
// for slot `first_ + l`.
template <int tile_m>
class SlotScan {
 public:
  ONCHIP_MEMBER void start(const PackedBatch& batch) {
    batch_ = batch;
    first_ = tiles_before_ = q_carry_ = kv_carry_ = 0;
    scan();
  }

  // Tile t: its slot (0: before the first sequence), where that lies, and the tile's number in it.
  // False: there is no tile t. t must not fall from call to call.
  ONCHIP_MEMBER bool find(int t, Sequence& s, int& slot, int& rest) {
    for (;;) {
      const int total = __shfl_sync(kWarpMask, tiles_end_, kLast);
      if (t < tiles_before_ + total) break;
      if (first_ + kLast > batch_.num_seqs) return false;
      tiles_before_ += total;
      q_carry_ = __shfl_sync(kWarpMask, q_end_, kLast);
      kv_carry_ = __shfl_sync(kWarpMask, kv_end_, kLast);
      first_ += 32;
      scan();
    }
    const int lane = __ffs(__ballot_sync(kWarpMask, t < tiles_before_ + tiles_end_)) - 1;
    const int before = max(lane - 1, 0);
    const int q = __shfl_sync(kWarpMask, q_end_, before);
    const int kv = __shfl_sync(kWarpMask, kv_end_, before);
    const int tiles = __shfl_sync(kWarpMask, tiles_end_, before);
    slot = first_ + lane;
    rest = t - tiles_before_ - (lane == 0 ? 0 : tiles);
    s.batch = 0;
    s.q_begin = lane == 0 ? q_carry_ : q;
    s.kv_begin = lane == 0 ? kv_carry_ : kv;
    s.q_slot = s.q_length = __shfl_sync(kWarpMask, q_end_, lane) - s.q_begin;
    s.kv_length = __shfl_sync(kWarpMask, kv_end_, lane) - s.kv_begin;
    return true;
  }

 private:
  static constexpr int kLast = 31;

  ONCHIP_MEMBER void scan() {
    const int lane = threadIdx.x % 32;
    const int slot = first_ + lane;
    int q_end = batch_.total_q, kv_end = batch_.total_kv;
    if (slot <= batch_.num_seqs) {
      q_end = load_index(batch_.cu_seqlens_q, batch_.q_int64, slot, batch_.total_q);
      kv_end = load_index(batch_.cu_seqlens_kv, batch_.kv_int64, slot, batch_.total_kv);
    }
    q_end = max(q_end, q_carry_);
    kv_end = max(kv_end, kv_carry_);
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int q = __shfl_up_sync(kWarpMask, q_end, d);
      const int kv = __shfl_up_sync(kWarpMask, kv_end, d);
      if (lane >= d) {
        q_end = max(q_end, q);
        kv_end = max(kv_end, kv);
      }
    }
    const int q_begin = __shfl_up_sync(kWarpMask, q_end, 1);
    const int rows = q_end - (lane == 0 ? q_carry_ : q_begin);
    int tiles = (rows + tile_m - 1) / tile_m * batch_.heads;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int t = __shfl_up_sync(kWarpMask, tiles, d);
      if (lane >= d) tiles += t;
    }
    q_end_ = q_end;
    kv_end_ = kv_end;
    tiles_end_ = tiles;
  }

  PackedBatch batch_;
  int first_, tiles_before_;  // first slot of the group; tiles of all slots before it
  int q_carry_, kv_carry_;    // where the group begins
  int q_end_, kv_end_;        // of the lane's slot
  int tiles_end_;             // tiles of slots first_ .. first_ + lane
};

}  // namespace onchip::tile
