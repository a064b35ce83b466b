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

// Used lengths of the sequences; each may be null.
struct UsedLengths {
  const void *q, *kv;
  bool q_int64, kv_int64;

  ONCHIP_MEMBER void apply(Sequence& s, int i) const {
    s.q_length = load_length(q, q_int64, i, s.q_slot);
    s.kv_length = load_length(kv, kv_int64, i, s.kv_length);
  }
};

// A tile of query rows: of which sequence and head, and the how-manieth of them.
struct TilePlace {
  Sequence sequence;
  int head, number;
};

// A batch that is not packed: every sequence has as many tiles.
struct DenseBatch {
  int seqlen_q, seqlen_kv, heads;  // heads of a sequence
  int tiles_per_head, late_tiles, heads_per_section, num_tiles;
};

// Tile t. Heads run in sections, the last tiles of all heads of a section first; the first
// `late_tiles` of every head come when all sections are through, so that the blocks end with small
// pieces. False: there is no tile t.
ONCHIP_DEVICE bool find_dense(const DenseBatch& b, const UsedLengths& used, int t,
                              TilePlace& place) {
  if (t >= b.num_tiles) return false;
  const int all_heads = b.num_tiles / b.tiles_per_head;
  const int early_tiles = b.tiles_per_head - b.late_tiles;
  int first = 0, heads = all_heads;
  int rest = t - early_tiles * all_heads;
  int tiles = b.late_tiles;
  if (rest < 0) {
    first = t / (b.heads_per_section * early_tiles) * b.heads_per_section;
    heads = min(b.heads_per_section, all_heads - first);
    rest = t - first * early_tiles;
    tiles = b.tiles_per_head;
  }
  const int step = rest / heads;
  const int batch_head = first + rest - step * heads;
  Sequence& s = place.sequence;
  s.batch = batch_head / b.heads;
  s.q_begin = s.kv_begin = 0;
  s.q_slot = b.seqlen_q;
  s.kv_length = b.seqlen_kv;
  used.apply(s, s.batch);
  place.head = batch_head - s.batch * b.heads;
  place.number = tiles - 1 - step;
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

// Tile t, sequence by sequence, head by head, each from its last tile on.
template <int tile_m>
ONCHIP_DEVICE bool find_packed(SlotScan<tile_m>& scan, const UsedLengths& used, int num_seqs, int t,
                               TilePlace& place) {
  int slot = 0, rest = 0;
  Sequence& s = place.sequence;
  if (!scan.find(t, s, slot, rest)) return false;
  if (slot == 0 || slot > num_seqs) {
    s.q_length = 0;
  } else {
    used.apply(s, slot - 1);
  }
  const int tiles = (s.q_slot + tile_m - 1) / tile_m;
  place.head = rest / tiles;
  place.number = tiles - 1 - (rest - place.head * tiles);
  return true;
}

}  // namespace onchip::tile
