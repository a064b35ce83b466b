// Integer types, shared-memory access and the small PTX instructions that have no folder-mate of
// their own. No CUDA header is needed.
#pragma once

#define ONCHIP_DEVICE static __device__ __forceinline__
#define ONCHIP_MEMBER __device__ __forceinline__

namespace onchip::tile {

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

inline constexpr u32 kWarpMask = 0xffffffffu;

// A compile-time flag as an argument.
template <auto v>
struct Constant {
  static constexpr auto value = v;
};

ONCHIP_DEVICE float infinity() { return __int_as_float(0x7f800000); }

// 32-bit address in the shared window.
ONCHIP_DEVICE u32 shared_address(const void* p) {
  return static_cast<u32>(__cvta_generic_to_shared(p));
}

ONCHIP_DEVICE void st_shared(u32 address, int a, int b, int c, int d) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}

// `bytes` of zeros, a multiple of 16, by the whole block.
ONCHIP_DEVICE void zero_shared(u32 address, int bytes) {
  for (int i = threadIdx.x; i < bytes / 16; i += blockDim.x) {
    st_shared(address + 16 * i, 0, 0, 0, 0);
  }
}

// Value of lane 0 in every lane. ptxas then knows that it is the same in the whole warp, and keeps
// what is computed from it in uniform registers.
ONCHIP_DEVICE int uniform(int v) { return __shfl_sync(kWarpMask, v, 0); }

// Base-2 exponential and logarithm of the special-function unit; -inf gives 0, 0 gives -inf.
ONCHIP_DEVICE float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
ONCHIP_DEVICE float lg2(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// True in one lane of a converged warp.
ONCHIP_DEVICE bool elect() {
  u32 chosen;
  asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p;}" : "=r"(chosen));
  return chosen != 0;
}

// Registers of a warpgroup; all its warps execute it.
template <int n>
ONCHIP_DEVICE void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(n));
}
template <int n>
ONCHIP_DEVICE void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(n));
}

// Orders this thread's ordinary accesses to shared memory before later ones of TMA and wgmma.
ONCHIP_DEVICE void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

[[noreturn]] ONCHIP_DEVICE void trap() {
  asm volatile("trap;");
  __builtin_unreachable();
}

}  // namespace onchip::tile
