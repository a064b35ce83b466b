// The functions of cpu/simd.hpp and cpu/logistic.hpp as plain ones over arrays, once per
// instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/cpu_features.hpp"

namespace onchip::test {

// Arrays hold a multiple of 64 elements.
struct SimdProbe {
  void (*exp2_f32)(const float* x, float* y, std::size_t count);
  void (*exp2_f64)(const double* x, double* y, std::size_t count);
  void (*tanh_f32)(const float* x, float* y, std::size_t count);
  void (*tanh_f64)(const double* x, double* y, std::size_t count);
  void (*softplus_f32)(const float* x, float* y, std::size_t count);
  void (*softplus_f64)(const double* x, double* y, std::size_t count);
  void (*logistic_f32)(const float* x, float* y, float* slope, std::size_t count);
  void (*logistic_f64)(const double* x, double* y, double* slope, std::size_t count);
  void (*from_bf16)(const std::uint16_t* x, float* y, std::size_t count);
  void (*from_f16)(const std::uint16_t* x, float* y, std::size_t count);
  void (*to_bf16)(const float* x, std::uint16_t* y, std::size_t count);
  void (*to_f16)(const float* x, std::uint16_t* y, std::size_t count);
  void (*max_f32)(const float* a, const float* b, float* y, std::size_t count);
  void (*max_f64)(const double* a, const double* b, double* y, std::size_t count);
  // y = a < b ? a : b, written with less and select.
  void (*select_f32)(const float* a, const float* b, float* y, std::size_t count);
  void (*select_f64)(const double* a, const double* b, double* y, std::size_t count);
  // Squares of lanes x lanes elements; returns lanes.
  int (*transpose_f32)(const float* x, float* y);
  int (*transpose_f64)(const double* x, double* y);
  // Loads and stores `count` elements, at most a vector.
  void (*copy_f32)(const float* x, float* y, int count);
  void (*copy_bf16)(const std::uint16_t* x, std::uint16_t* y, int count);
};

SimdProbe simd_probe(cpu::Isa isa);

}  // namespace onchip::test

#define ONCHIP_TEST_DECLARE_PROBE(isa) \
  namespace onchip::cpu::isa {         \
  test::SimdProbe simd_probe();        \
  }
ONCHIP_TEST_DECLARE_PROBE(portable)
ONCHIP_TEST_DECLARE_PROBE(avx2)
ONCHIP_TEST_DECLARE_PROBE(avx512)
ONCHIP_TEST_DECLARE_PROBE(avx512_bf16)
#undef ONCHIP_TEST_DECLARE_PROBE
