// What the host side of the CPU's norms hands to the code compiled once per instruction set: plain
// data only. A unit works on rows that lie at equal distances in every tensor.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/conv.hpp"
#include "core/dtype.hpp"
#include "cpu/linear_unit.hpp"

namespace onchip::cpu {

constexpr std::size_t kNormAlignment = 64;

struct NormShape {
  DType dtype = DType::f32;       // of x and all that is shaped like it, but for the gate
  DType gate_dtype = DType::f32;  // of dgate too
  DType weight_dtype = DType::f32;
  Activation activation = Activation::none;
  bool l2 = false;
  bool gate_first = false;
  double eps = 0.0;
  std::int64_t dim = 0;
  std::int64_t group_size = 0;        // divides dim
  const std::byte* weight = nullptr;  // NULL: 1
};

// data NULL: absent, or not wanted.
struct NormRows {
  std::int64_t count = 0;
  UnitRow x, gate;
  UnitRow y;  // forward
  UnitRow d_y, dx, dgate;
};

#define ONCHIP_CPU_DECLARE_NORM(isa)                                                        \
  namespace isa {                                                                           \
  std::size_t norm_scratch_bytes(const NormShape& shape);                                   \
  std::size_t norm_sums_bytes(const NormShape& shape);                                      \
  /* The weight into scratch, where the functions below find it. */                         \
  void norm_load_weight(const NormShape& shape, std::byte* scratch);                        \
  void norm_outputs(const NormShape& shape, const NormRows& rows, std::byte* scratch);      \
  /* dweight is added to `sums` [dim]; NULL: not wanted. */                                 \
  void norm_gradients(const NormShape& shape, const NormRows& rows, std::byte* sums,        \
                      std::byte* scratch);                                                  \
  /* The sum of `count` sums that follow each other, as dweight's channels begin .. end. */ \
  void norm_store_sums(const NormShape& shape, const std::byte* sums, std::int64_t count,   \
                       std::int64_t begin, std::int64_t end, std::byte* dweight);           \
  }

ONCHIP_CPU_DECLARE_NORM(portable)
ONCHIP_CPU_DECLARE_NORM(avx2)
ONCHIP_CPU_DECLARE_NORM(avx512)
ONCHIP_CPU_DECLARE_NORM(avx512_bf16)
#undef ONCHIP_CPU_DECLARE_NORM

}  // namespace onchip::cpu
