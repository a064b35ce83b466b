// One kernel a primitive of src/gpu/tile: it shows, in global memory, what the primitive did.
// Compiled by NVRTC and run by test_tile.py.
#include "gpu/tile/fragment.cuh"
#include "gpu/tile/named_barrier.cuh"
#include "gpu/tile/online_softmax.cuh"
#include "gpu/tile/pipeline.cuh"
#include "gpu/tile/sequences.cuh"
#include "gpu/tile/split_softmax.cuh"
#include "gpu/tile/tma.cuh"
#include "gpu/tile/wgmma.cuh"
#include "gpu/tile/work_counter.cuh"

using namespace onchip::tile;

namespace {

extern __shared__ __align__(1024) unsigned char shared_memory[];

constexpr int kRows = 64;

enum class Ring { full, empty, count };
struct RingFailure {
  int seen, block, thread, role, barrier, stage, parity;
};

__device__ u16& element(unsigned char* matrix, int rows, int row, int column) {
  const u32 chunk = column / kChunkColumns, in_chunk = column % kChunkColumns;
  const u32 at = chunk * rows * kChunkRowBytes + swizzle_128b(row, in_chunk / 8) + in_chunk % 8 * 2;
  return *reinterpret_cast<u16*>(matrix + at);
}

// [rows][columns] in global memory to the swizzled layout.
__device__ void stage(unsigned char* matrix, const u16* from, int rows, int columns) {
  for (int i = threadIdx.x; i < rows * columns; i += blockDim.x) {
    element(matrix, rows, i / columns, i % columns) = from[i];
  }
  fence_proxy_async_shared();
  __syncthreads();
}

}  // namespace

// A box at `at` of a map of 16-bit elements, 128 columns in two loads: out[64][128].
extern "C" __global__ void tma_load_box(const __grid_constant__ TensorMap map, TensorCoordinates at,
                                        u16* out) {
  const u32 smem = shared_address(shared_memory);
  const u32 barrier = smem + 2 * kRows * kChunkRowBytes;
  if (threadIdx.x == 0) {
    prefetch_tensormap(&map);
    mbarrier_init(barrier, 1);
    fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect_tx(barrier, kRows * 128 * 2);
    for (int chunk = 0; chunk < 2; ++chunk) {
      TensorCoordinates c = at;
      c.c0 += chunk * kChunkColumns;
      tma_load(smem + chunk * kRows * kChunkRowBytes, &map, barrier, c,
               chunk == 0 ? kEvictFirst : kEvictLast);
    }
  }
  mbarrier_wait(barrier, 0);
  for (int i = threadIdx.x; i < kRows * 128; i += blockDim.x) {
    out[i] = element(shared_memory, kRows, i / 128, i % 128);
  }
}

// from[64][128] to a box of the map.
extern "C" __global__ void tma_store_box(const __grid_constant__ TensorMap map,
                                         TensorCoordinates at, const u16* from) {
  stage(shared_memory, from, kRows, 128);
  if (threadIdx.x != 0) return;
  for (int chunk = 0; chunk < 2; ++chunk) {
    TensorCoordinates c = at;
    c.c0 += chunk * kChunkColumns;
    tma_store(&map, shared_address(shared_memory) + chunk * kRows * kChunkRowBytes, c);
  }
  tma_store_commit();
  tma_store_wait_read();
  tma_store_wait();
}

// out[thread][step][4] of a 64 x 128 matrix.
extern "C" __global__ void load_fragments_of(const u16* from, u32* out) {
  stage(shared_memory, from, kRows, 128);
  u32 a[8][4];
  load_fragments(a, shared_address(shared_memory), threadIdx.x);
  for (int k = 0; k < 8; ++k) {
    for (int i = 0; i < 4; ++i) out[(threadIdx.x * 8 + k) * 4 + i] = a[k][i];
  }
}

// The inverse: from[thread][step][4] to a 64 x 128 matrix.
extern "C" __global__ void store_fragments_to(const u32* from, u16* out) {
  for (int k = 0; k < 8; ++k) {
    u32 d[4];
    for (int i = 0; i < 4; ++i) d[i] = from[(threadIdx.x * 8 + k) * 4 + i];
    store_fragment(shared_address(shared_memory), threadIdx.x, k, d);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kRows * 128; i += blockDim.x) {
    out[i] = element(shared_memory, kRows, i / 128, i % 128);
  }
}

// out[row][column] of an accumulator that holds its own coordinates, packed as an A operand and
// written back: what pack_accumulator and store_fragment together must leave in place.
extern "C" __global__ void accumulator_round_trip(u16* out) {
  float d[64];
  const int row = accumulator_row(threadIdx.x), column = accumulator_column(threadIdx.x);
  for (int j = 0; j < 16; ++j) {
    for (int i = 0; i < 4; ++i) {
      d[4 * j + i] = static_cast<float>((row + i / 2 * 8) * 16 + (8 * j + column + i % 2) / 8);
    }
  }
  u32 p[8][4];
  pack_accumulator<false>(p, d);
  for (int k = 0; k < 8; ++k) store_fragment(shared_address(shared_memory), threadIdx.x, k, p[k]);
  __syncthreads();
  for (int i = threadIdx.x; i < kRows * 128; i += blockDim.x) {
    out[i] = element(shared_memory, kRows, i / 128, i % 128);
  }
}

// out[row][column] of an accumulator of ones but a NaN in column 3 of every row: row r times r,
// rows from `live` on without. Then with the signs turned.
extern "C" __global__ void accumulator_to_matrix(int live, u16* out, u16* negated) {
  const u32 matrix = shared_address(shared_memory);
  const int row = accumulator_row(threadIdx.x);
  float d[64];
  for (int i = 0; i < 64; ++i) {
    const int column = 8 * (i / 4) + accumulator_column(threadIdx.x) + i % 2;
    d[i] = column == 3 ? infinity() - infinity() : 1.0f;
  }
  const float factor[2] = {static_cast<float>(row), static_cast<float>(row + 8)};
  const bool rows_live[2] = {row < live, row + 8 < live};
  store_accumulator<false>(matrix, threadIdx.x, d, factor, rows_live);
  for (u16* to : {out, negated}) {
    __syncthreads();
    for (int i = threadIdx.x; i < kRows * 128; i += blockDim.x) {
      to[i] = element(shared_memory, kRows, i / 128, i % 128);
    }
    __syncthreads();
    negate_matrix<8>(matrix, threadIdx.x, 0x80008000u);
  }
}

extern "C" __global__ void pack_pairs(const float* in, u32* as_bf16, u32* as_fp16, int pairs) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= pairs) return;
  as_bf16[i] = pack<true>(in[2 * i], in[2 * i + 1]);
  as_fp16[i] = pack<false>(in[2 * i], in[2 * i + 1]);
}

// d[64][n] = a[64][128] b, twice (the second time added). b: [n][128] for ss and rs (K-major),
// [128][n] for rs_mn.
template <int n, bool bf16, int steps>
__device__ void multiply(const u16* a, const u16* b, float* out, int how) {
  unsigned char* matrix_a = shared_memory;
  unsigned char* matrix_b = shared_memory + kRows * 128 * 2;
  stage(matrix_a, a, kRows, 128);
  stage(matrix_b, b, how == 2 ? 128 : n, how == 2 ? n : 128);
  float d[n / 2];
  for (float& x : d) x = 12345.0f;  // overwritten by the first product
  u32 fragments[8][4];
  load_fragments(fragments, shared_address(matrix_a), threadIdx.x);
  const u32 da = descriptor_low(shared_address(matrix_a), 0);
  const u32 db = descriptor_low(shared_address(matrix_b), 128 * kChunkRowBytes);
  pin(d);
  pin(fragments);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < 16 / steps; ++i) {
    // Four steps are a chunk of 64 columns, or 64 rows of B where those are contracted.
    constexpr u32 kChunkOfA = kRows * kChunkRowBytes >> 4, kChunkOfB = n * kChunkRowBytes >> 4;
    const int at = i * steps % 8;
    u32 part[steps][4];
#pragma unroll
    for (int j = 0; j < 4 * steps; ++j) part[j / 4][j % 4] = fragments[at + j / 4][j % 4];
    const u32 b_at = db + at / 4 * (how == 2 ? 64 * kChunkRowBytes >> 4 : kChunkOfB);
    if (how == 0) {
      Wgmma<n, bf16, steps>::ss(d, da + at / 4 * kChunkOfA, b_at, i != 0);
    } else if (how == 1) {
      Wgmma<n, bf16, steps>::rs(d, part, b_at, i != 0);
    } else {
      Wgmma<n, bf16, steps>::rs_mn(d, part, b_at, i != 0);
    }
  }
  wgmma_commit_group();
  wgmma_wait_group<0>();
  pin(d);
  pin(fragments);
  const int row = accumulator_row(threadIdx.x), column = accumulator_column(threadIdx.x);
  for (int j = 0; j < n / 8; ++j) {
    for (int i = 0; i < 4; ++i) {
      out[(row + i / 2 * 8) * n + 8 * j + column + i % 2] = d[4 * j + i];
    }
  }
}

#define ONCHIP_MULTIPLY(n, type, is_bf16, steps, member, how)                              \
  extern "C" __global__ void __launch_bounds__(128)                                        \
      multiply_##n##_##type##_##steps##_##member(const u16* a, const u16* b, float* out) { \
    multiply<n, is_bf16, steps>(a, b, out, how);                                           \
  }
#define ONCHIP_MULTIPLY_EACH_WAY(n, type, is_bf16, steps) \
  ONCHIP_MULTIPLY(n, type, is_bf16, steps, ss, 0)         \
  ONCHIP_MULTIPLY(n, type, is_bf16, steps, rs, 1)         \
  ONCHIP_MULTIPLY(n, type, is_bf16, steps, rs_mn, 2)
ONCHIP_MULTIPLY_EACH_WAY(64, bf16, true, 4)
ONCHIP_MULTIPLY_EACH_WAY(64, bf16, true, 8)
ONCHIP_MULTIPLY_EACH_WAY(64, fp16, false, 4)
ONCHIP_MULTIPLY_EACH_WAY(64, fp16, false, 8)
ONCHIP_MULTIPLY_EACH_WAY(128, bf16, true, 4)
ONCHIP_MULTIPLY_EACH_WAY(128, bf16, true, 8)
ONCHIP_MULTIPLY_EACH_WAY(128, fp16, false, 4)
ONCHIP_MULTIPLY_EACH_WAY(128, fp16, false, 8)

// seen[]: 0 a fresh barrier is past parity 1; 1 it is not past parity 0; 2 nor after one of two
// arrivals; 3 it is after the second; 4 then parity 1 is still to come; 5 bytes count too; 6 a ring
// of two slots between two warps delivered 1000 numbers in order.
extern "C" __global__ void mbarrier_phases(int* seen) {
  __shared__ u64 storage[6];
  __shared__ int slots[2];
  const auto barrier = [&](int i) { return shared_address(&storage[i]); };
  if (threadIdx.x == 0) {
    mbarrier_init(barrier(0), 2);
    mbarrier_init(barrier(1), 1);
    fence_mbarrier_init();
    Pipeline<Ring, RingFailure, true>{barrier(2), nullptr, 0}.init({1, 1});
  }
  __syncthreads();
  constexpr i64 kShort = 100'000;
  if (threadIdx.x == 0) {
    seen[0] = mbarrier_wait_bounded(barrier(0), 1, kShort);
    seen[1] = !mbarrier_wait_bounded(barrier(0), 0, kShort);
    mbarrier_arrive(barrier(0));
    seen[2] = !mbarrier_wait_bounded(barrier(0), 0, kShort);
    mbarrier_arrive(barrier(0));
    seen[3] = mbarrier_wait_bounded(barrier(0), 0, kShort);
    seen[4] = !mbarrier_wait_bounded(barrier(0), 1, kShort);
    mbarrier_arrive_expect_tx(barrier(1), 16);
    seen[5] = !mbarrier_wait_bounded(barrier(1), 0, kShort);
  }
  __syncthreads();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Pipeline<Ring, RingFailure, true> ring{barrier(2), nullptr, warp};
  bool right = true;
  for (int n = 0; n < 1000; ++n) {
    if (warp == 0) {
      ring.wait_empty(Ring::empty, n);
      if (lane == 0) {
        slots[n % 2] = n;
        ring.arrive(Ring::full, n);
      }
      __syncwarp();
    } else if (warp == 1) {
      ring.wait_full(Ring::full, n);
      right = right && *static_cast<volatile int*>(&slots[n % 2]) == n;
      __syncwarp();
      if (lane == 0) ring.arrive(Ring::empty, n);
    }
  }
  if (warp == 1) {
    const bool all = __all_sync(kWarpMask, right);
    if (lane == 0) seen[6] = all;
  }
}

// Three warpgroups, one after the other, 50 rounds: order[] gets their numbers as they come.
extern "C" __global__ void __launch_bounds__(384) named_barrier_turns(int* order) {
  __shared__ int count;
  if (threadIdx.x == 0) count = 0;
  __syncthreads();
  const int w = threadIdx.x / 128;
  if (w == 2) named_barrier_arrive(5, 256);
  for (int round = 0; round < 50; ++round) {
    named_barrier_sync(5 + w, 256);
    if (threadIdx.x % 128 == 0) {
      const int at = *static_cast<volatile int*>(&count);
      order[at] = w;
      *static_cast<volatile int*>(&count) = at + 1;
    }
    named_barrier_sync(1 + w, 128);
    named_barrier_arrive(5 + (w + 1) % 3, 256);
  }
}

// Rows of 64 scores, blocks x [64][64], limits[block][row]: probabilities of each block as left by
// softmax_block, then o (ones, rescaled), maximum and sum a row. masked: bit b for block b.
template <bool vote>
__device__ void online_softmax(const float* scores, const int* limits, int blocks, unsigned masked,
                               float c, float* probabilities, float* o, float* maximum,
                               float* sum) {
  const int row = accumulator_row(threadIdx.x), column = accumulator_column(threadIdx.x);
  SoftmaxState state;
  float out[4] = {1.0f, 1.0f, 1.0f, 1.0f};
  for (int b = 0; b < blocks; ++b) {
    float s[32];
    const auto at = [&](int i) {
      return (b * 64 + row + i / 2 % 2 * 8) * 64 + 8 * (i / 4) + column + i % 2;
    };
    for (int i = 0; i < 32; ++i) s[i] = scores[at(i)];
    if (masked >> b & 1) {
      mask_columns(s, limits[b * 64 + row] - column, limits[b * 64 + row + 8] - column);
    }
    if (b == 0) {
      softmax_block<true, true, vote>(s, state, c);
    } else if (masked >> b & 1) {
      softmax_block<false, true, vote>(s, state, c);
    } else {
      softmax_block<false, false, vote>(s, state, c);
    }
    rescale(out, state);
    for (int i = 0; i < 32; ++i) probabilities[at(i)] = s[i];
  }
  for (int r = 0; r < 2; ++r) {
    const float total = row_sum(state.sum[r]);
    o[row + 8 * r] = out[2 * r];
    maximum[row + 8 * r] = state.maximum[r];
    sum[row + 8 * r] = total;
  }
}

#define ONCHIP_ONLINE_SOFTMAX(name, vote)                                                    \
  extern "C" __global__ void __launch_bounds__(128)                                          \
      name(const float* scores, const int* limits, int blocks, unsigned masked, float c,     \
           float* probabilities, float* o, float* maximum, float* sum) {                     \
    online_softmax<vote>(scores, limits, blocks, masked, c, probabilities, o, maximum, sum); \
  }
ONCHIP_ONLINE_SOFTMAX(online_softmax_of, false)
ONCHIP_ONLINE_SOFTMAX(online_softmax_by_vote, true)

// Block b is a warpgroup with part order[b] % parts of tile order[b] / parts: in[order[b]], n + 4
// planes of a float a thread (accumulator, maxima, sums). The one that finds itself the last of a
// tile writes out[tile] likewise, and is counted in last[tile].
template <int n>
__device__ void combine(const int* order, int parts, u64 launch, float c, const float* in,
                        float* slots, u64* arrived, float* out, int* last) {
  constexpr i64 kSlot = 128 * (n + 4);
  const int number = order[blockIdx.x], tile = number / parts;
  const float* from = in + number * kSlot + threadIdx.x;
  float o[n], maximum[2], sum[2];
  for (int i = 0; i < n; ++i) o[i] = from[128 * i];
  for (int r = 0; r < 2; ++r) {
    maximum[r] = from[128 * (n + r)];
    sum[r] = from[128 * (n + 2 + r)];
  }
  const SplitOutput split = {slots + tile * parts * kSlot, kSlot, number % parts, parts,
                             arrived + tile};
  if (!combine_parts(split, launch, 1, threadIdx.x, c, o, maximum, sum)) return;
  float* to = out + tile * kSlot + threadIdx.x;
  for (int i = 0; i < n; ++i) to[128 * i] = o[i];
  for (int r = 0; r < 2; ++r) {
    to[128 * (n + r)] = maximum[r];
    to[128 * (n + 2 + r)] = sum[r];
  }
  if (threadIdx.x == 0) atomicAdd(last + tile, 1);
}

#define ONCHIP_COMBINE(n)                                                                     \
  extern "C" __global__ void __launch_bounds__(128)                                           \
      combine_parts_of_##n(const int* order, int parts, u64 launch, float c, const float* in, \
                           float* slots, u64* arrived, float* out, int* last) {               \
    combine<n>(order, parts, launch, c, in, slots, arrived, out, last);                       \
  }
ONCHIP_COMBINE(32)
ONCHIP_COMBINE(64)

// Tile t of a packed batch for t = 0, step, 2 step ..: {slot, rest, q_begin, q_slot, kv_begin,
// kv_length}, or slot -1 past the end. One warp.
extern "C" __global__ void packed_tiles(PackedBatch batch, int step, int count, int* out) {
  SlotScan<128> scan;
  scan.start(batch);
  for (int i = 0; i < count; ++i) {
    Sequence s{};
    int slot = -1, rest = 0;
    if (!scan.find(i * step, s, slot, rest)) slot = -1;
    const int values[] = {slot, rest, s.q_begin, s.q_slot, s.kv_begin, s.kv_length};
    if (threadIdx.x == 0) {
      for (int j = 0; j < 6; ++j) out[i * 6 + j] = values[j];
    }
  }
}

// Tile t of a dense batch for t = 0 ..: {batch, head, tile, q_slot, q_length, kv_length}, or batch
// -1.
extern "C" __global__ void dense_tiles(DenseBatch batch, UsedLengths used, int count, int* out) {
  const int t = blockIdx.x * blockDim.x + threadIdx.x;
  if (t >= count) return;
  TilePlace place{};
  Sequence& s = place.sequence;
  if (!find_dense(batch, used, t, place)) s.batch = -1;
  const int values[] = {s.batch, place.head, place.number, s.q_slot, s.q_length, s.kv_length};
  for (int j = 0; j < 6; ++j) out[t * 6 + j] = values[j];
}

// Blocks share `pieces`: taken[i] counts who had piece i.
extern "C" __global__ void share_work(WorkCounter* counter, u64 launch, int pieces, int* taken) {
  if (threadIdx.x != 0) return;
  WorkTaker taker{counter, launch};
  // Some blocks come to leave, having taken nothing.
  if (blockIdx.x % 3 != 2) {
    for (int i = taker.take(); i < pieces; i = taker.take()) atomicAdd(taken + i, 1);
  }
  taker.leave(gridDim.x);
}

extern "C" __global__ void zero_of(int bytes, u32* out) {
  u32* const words = reinterpret_cast<u32*>(shared_memory);
  for (int i = threadIdx.x; i < 1024; i += blockDim.x) words[i] = 7;
  __syncthreads();
  zero_shared(shared_address(shared_memory) + 16, bytes);
  __syncthreads();
  for (int i = threadIdx.x; i < 1024; i += blockDim.x) out[i] = words[i];
}

extern "C" __global__ void small_instructions(const float* in, float* exponentials,
                                              float* logarithms, int* elected, int n) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    exponentials[i] = ex2(in[i]);
    logarithms[i] = lg2(in[i]);
  }
  __syncthreads();
  if (elect()) atomicAdd(elected, 1);
  if (uniform(threadIdx.x + 1) != static_cast<int>(threadIdx.x / 32 * 32 + 1)) elected[1] = 1;
}
