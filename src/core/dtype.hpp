// Element types: names, sizes, scalar conversions of the 16-bit floats.
#pragma once

#include <onchip/onchip.h>

#include <bit>
#include <cstdint>
#include <cstring>

namespace onchip {

enum class DType : std::int32_t {
  f64 = ONCHIP_FLOAT64,
  f32 = ONCHIP_FLOAT32,
  f16 = ONCHIP_FLOAT16,
  bf16 = ONCHIP_BFLOAT16,
  e4m3 = ONCHIP_FLOAT8_E4M3,
  i64 = ONCHIP_INT64,
  i32 = ONCHIP_INT32,
  boolean = ONCHIP_BOOL,
};

constexpr bool is_known_dtype(std::int32_t dtype) {
  return dtype >= ONCHIP_FLOAT64 && dtype <= ONCHIP_BOOL;
}

// The float types an operand of attention may have (e4m3 is storage for quantised calls only).
constexpr bool is_float(DType dtype) {
  return dtype == DType::f64 || dtype == DType::f32 || dtype == DType::f16 || dtype == DType::bf16;
}

constexpr std::int64_t dtype_size(DType dtype) {
  switch (dtype) {
    case DType::f64:
    case DType::i64:
      return 8;
    case DType::f32:
    case DType::i32:
      return 4;
    case DType::f16:
    case DType::bf16:
      return 2;
    case DType::e4m3:
    case DType::boolean:
      return 1;
  }
  return 0;
}

constexpr const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return "float64";
    case DType::f32:
      return "float32";
    case DType::f16:
      return "float16";
    case DType::bf16:
      return "bfloat16";
    case DType::e4m3:
      return "float8_e4m3";
    case DType::i64:
      return "int64";
    case DType::i32:
      return "int32";
    case DType::boolean:
      return "bool";
  }
  return "unknown";
}

struct Float16 {
  std::uint16_t bits;
};
struct BFloat16 {
  std::uint16_t bits;
};

inline float to_float(BFloat16 x) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(x.bits) << 16);
}

// Round to nearest even; NaN stays a quiet NaN.
inline BFloat16 to_bfloat16(float x) {
  std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    return {static_cast<std::uint16_t>((bits >> 16) | 0x40u)};
  }
  bits += 0x7fffu + ((bits >> 16) & 1u);
  return {static_cast<std::uint16_t>(bits >> 16)};
}

float to_float(Float16 x);
Float16 to_float16(float x);

// A double goes to 16 bits in one rounding: round to odd at fp32, then to nearest even.
float round_to_odd(double x);
inline BFloat16 to_bfloat16(double x) { return to_bfloat16(round_to_odd(x)); }
inline Float16 to_float16(double x) { return to_float16(round_to_odd(x)); }

// One element of any float or integer type as a double, from any element-aligned address.
double load_as_double(const void* address, DType dtype);
void store_from_double(void* address, DType dtype, double value);
std::int64_t load_integer(const void* address, DType dtype);

}  // namespace onchip
