// Numbers of a dtype that is known at run time only.
#pragma once

#include "cpu/simd.hpp"

namespace onchip::cpu::ONCHIP_CPU_ISA {
namespace {

// f(Stored<dtype>{}).
template <DType kValue>
struct Stored {
  static constexpr DType kDType = kValue;
};

template <typename F>
ONCHIP_INLINE void with_stored(DType dtype, F&& f) {
  switch (dtype) {
    case DType::f64:
      f(Stored<DType::f64>{});
      return;
    case DType::f32:
      f(Stored<DType::f32>{});
      return;
    case DType::bf16:
      f(Stored<DType::bf16>{});
      return;
    default:
      f(Stored<DType::f16>{});
      return;
  }
}

// `count` numbers of a dtype that is known at run time only.
template <typename T>
Vec<T> load_any(const std::byte* from, DType dtype, int count) {
  Vec<T> x{};
  with_stored(dtype,
              [&](auto stored) { x = load_numbers<decltype(stored)::kDType, T>(from, count); });
  return x;
}

template <typename T>
void store_any(std::byte* to, DType dtype, Vec<T> x, int count) {
  with_stored(dtype,
              [&](auto stored) { store_numbers<decltype(stored)::kDType, T>(to, x, count); });
}

}  // namespace
}  // namespace onchip::cpu::ONCHIP_CPU_ISA
