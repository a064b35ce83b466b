// From an instruction set to the table of its unit's entry points. A macro, for a unit's functions
// are found by the name of its namespace; units that are not built leave no case.
#pragma once

#include "cpu/cpu_features.hpp"

#if ONCHIP_CPU_HAS_AVX2
#define ONCHIP_CPU_CASE_AVX2(table) \
  case ::onchip::cpu::Isa::avx2:    \
    return table(avx2);
#else
#define ONCHIP_CPU_CASE_AVX2(table)
#endif
#if ONCHIP_CPU_HAS_AVX512
#define ONCHIP_CPU_CASE_AVX512(table) \
  case ::onchip::cpu::Isa::avx512:    \
    return table(avx512);
#else
#define ONCHIP_CPU_CASE_AVX512(table)
#endif
#if ONCHIP_CPU_HAS_AVX512_BF16
#define ONCHIP_CPU_CASE_AVX512_BF16(table) \
  case ::onchip::cpu::Isa::avx512_bf16:    \
    return table(avx512_bf16);
#else
#define ONCHIP_CPU_CASE_AVX512_BF16(table)
#endif

// Returns table(name of the unit's namespace) for `isa`, which must be available.
#define ONCHIP_CPU_RETURN_TABLE(isa, table) \
  switch (isa) {                            \
    ONCHIP_CPU_CASE_AVX2(table)             \
    ONCHIP_CPU_CASE_AVX512(table)           \
    ONCHIP_CPU_CASE_AVX512_BF16(table)      \
    default:                                \
      return table(portable);               \
  }
