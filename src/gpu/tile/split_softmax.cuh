// Outputs of one tile whose keys several warpgroups have taken in parts: each leaves its unfinished
// output in global memory, and the one that comes last adds them up in the order of their keys, so
// that the bits do not depend on who that is.
#pragma once
#include "gpu/tile/named_barrier.cuh"
#include "gpu/tile/online_softmax.cuh"

namespace onchip::tile {

// True for the last of `parts` that arrive under a launch's number, one thread each; what every
// thread ordered before it wrote is then visible. The word may hold anything beforehand but that
// number, or one up to `parts` above it, except what an earlier launch of the same number (a
// repeated capture) has left: `parts` above.
ONCHIP_DEVICE bool arrive_last(u64* word, u64 launch, int parts) {
  __threadfence();
  u64 seen = *const_cast<volatile u64*>(word);
  for (;;) {
    const u64 above = seen - launch;
    const u64 arrived = (above < static_cast<u64>(parts) ? above : 0) + 1;
    const u64 before = atomicCAS(word, seen, launch + arrived);
    if (before == seen) {
      __threadfence();
      return arrived == static_cast<u64>(parts);
    }
    seen = before;
  }
}

// Where the parts of a warpgroup's rows lie: one slot each, n + 4 planes of a float for every
// thread: its accumulator, maxima and sums. NOTE(codegen): with float4 ptxas spills a value of the
// kernel's (nvcc 13.0, noticed by tests/resources).
struct SplitOutput {
  float* slots;  // of part 0
  i64 stride;    // from part to part
  int part, parts;
  u64* arrived;
};

template <int n>
ONCHIP_DEVICE void store_part(const SplitOutput& split, int thread, const float (&o)[n],
                              const float (&maximum)[2], const float (&sum)[2]) {
  float* const slot = split.slots + split.part * split.stride + thread;
#pragma unroll
  for (int i = 0; i < n; ++i) __stcg(slot + 128 * i, o[i]);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    __stcg(slot + 128 * (n + r), maximum[r]);
    __stcg(slot + 128 * (n + 2 + r), sum[r]);
  }
}

template <int n>
ONCHIP_DEVICE void add_parts(const SplitOutput& split, int thread, float c, float (&o)[n],
                             float (&maximum)[2], float (&sum)[2]) {
  const float* slot = split.slots + thread;
  maximum[0] = maximum[1] = -infinity();
  sum[0] = sum[1] = 0.0f;
#pragma unroll 1
  for (int k = 0; k < split.parts; ++k) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      maximum[r] = fmaxf(maximum[r], __ldcg(slot + k * split.stride + 128 * (n + r)));
    }
  }
#pragma unroll
  for (int i = 0; i < n; ++i) o[i] = 0.0f;
#pragma unroll 1
  for (int k = 0; k < split.parts; ++k, slot += split.stride) {
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float own = __ldcg(slot + 128 * (n + r));
      // A part whose scores are all -inf adds nothing. Where all are, -inf - -inf is not formed.
      factor[r] = own == -infinity() ? 0.0f : ex2((own - maximum[r]) * c);
      sum[r] += factor[r] * __ldcg(slot + 128 * (n + 2 + r));
    }
#pragma unroll
    for (int i = 0; i < n; ++i) o[i] += factor[i / 2 % 2] * __ldcg(slot + 128 * i);
  }
}

// By a warpgroup, over a named barrier of its own. True: it came last, and o, maximum and sum are
// those of all keys. Sums may be of a thread's columns or of the row.
template <int n>
ONCHIP_DEVICE bool combine_parts(const SplitOutput& split, u64 launch, int barrier, int thread,
                                 float c, float (&o)[n], float (&maximum)[2], float (&sum)[2]) {
  store_part(split, thread, o, maximum, sum);
  named_barrier_sync(barrier, 128);
  const bool last = thread == 0 && arrive_last(split.arrived, launch, split.parts);
  if (!named_barrier_any(barrier, 128, last)) return false;
  add_parts(split, thread, c, o, maximum, sum);
  return true;
}

}  // namespace onchip::tile
