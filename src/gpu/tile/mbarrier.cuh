// mbarriers in shared memory, named by their 32-bit address. A phase ends when the set number of
// arrivals and all expected bytes are in; waiting names the parity of the phase. A fresh barrier is
// in phase 0, and a wait for parity 1 passes at once.
#pragma once
#include "gpu/tile/ptx.cuh"

namespace onchip::tile {

ONCHIP_DEVICE void mbarrier_init(u32 barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes inits visible to TMA; a barrier of the block must follow.
ONCHIP_DEVICE void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
ONCHIP_DEVICE void mbarrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
ONCHIP_DEVICE void mbarrier_arrive_expect_tx(u32 barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
// One attempt, which the hardware suspends for a short time.
ONCHIP_DEVICE bool mbarrier_try_wait(u32 barrier, int parity) {
  u32 done;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}
// NOTE(codegen): the loop is inside the asm so that ptxas sees no divergent branch around the
// products; nvcc 13.0, noticed by R2UR in the main loop (tests/resources).
ONCHIP_DEVICE void mbarrier_wait(u32 barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "WAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@p bra DONE;\n"
      "bra WAIT;\n"
      "DONE:\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
// False once about `cycles` have passed in vain.
ONCHIP_DEVICE bool mbarrier_wait_bounded(u32 barrier, int parity, i64 cycles) {
  const i64 begin = clock64();
  while (!mbarrier_try_wait(barrier, parity)) {
    if (clock64() - begin > cycles) return false;
  }
  return true;
}

}  // namespace onchip::tile
