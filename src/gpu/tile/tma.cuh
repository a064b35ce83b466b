// Bulk tensor copies (TMA) of rank-5 tensor maps. Coordinates are in elements of the map's axes;
// boxes may reach outside the tensor on any side: loads put zeros there, stores leave it alone.
#pragma once
#include "gpu/tile/ptx.cuh"

namespace onchip::tile {

// Layout of CUtensorMap. As a kernel argument: const __grid_constant__.
struct alignas(64) TensorMap {
  u64 opaque[16];
};

struct TensorCoordinates {
  int c0, c1, c2, c3, c4;
};

// What the L2 should do with the lines of a load.
inline constexpr u64 kEvictFirst = 0x12F0000000000000ull;
inline constexpr u64 kEvictLast = 0x14F0000000000000ull;

ONCHIP_DEVICE void prefetch_tensormap(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// Completion is counted in bytes on `barrier`, always those of the whole box.
ONCHIP_DEVICE void tma_load(u32 smem, const TensorMap* map, u32 barrier, TensorCoordinates at,
                            u64 l2_policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(smem),
      "l"(map), "r"(barrier), "r"(at.c0), "r"(at.c1), "r"(at.c2), "r"(at.c3), "r"(at.c4),
      "l"(l2_policy)
      : "memory");
}
ONCHIP_DEVICE void tma_store(const TensorMap* map, u32 smem, TensorCoordinates at) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::
          "l"(map),
      "r"(smem), "r"(at.c0), "r"(at.c1), "r"(at.c2), "r"(at.c3), "r"(at.c4)
      : "memory");
}
ONCHIP_DEVICE void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// This thread's stores have read their shared memory.
ONCHIP_DEVICE void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
// This thread's stores are done.
ONCHIP_DEVICE void tma_store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

}  // namespace onchip::tile
