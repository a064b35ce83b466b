#include "core/dtype.hpp"

#include <cmath>

namespace onchip {

float to_float(Float16 x) {
  const std::uint32_t sign = static_cast<std::uint32_t>(x.bits & 0x8000u) << 16;
  const std::uint32_t exponent = (x.bits >> 10) & 0x1fu;
  const std::uint32_t fraction = x.bits & 0x3ffu;
  if (exponent == 0) {
    const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
    return std::bit_cast<float>(std::bit_cast<std::uint32_t>(magnitude) | sign);
  }
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | (fraction << 13));
  return std::bit_cast<float>(sign | ((exponent + 112u) << 23) | (fraction << 13));
}

Float16 to_float16(float x) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
  const std::uint16_t sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000u);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<std::uint16_t>(sign | 0x7e00u)};
  if (magnitude >= 0x477ff000u) return {static_cast<std::uint16_t>(sign | 0x7c00u)};
  if (magnitude < 0x38800000u) {
    // Below the smallest normal: adding 2^-1 leaves the subnormal's rounded bits in the fraction.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return {static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(shifted) & 0x7ffu))};
  }
  const std::uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return {static_cast<std::uint16_t>(sign | ((rounded - 0x38000000u) >> 13))};
}

float round_to_odd(double x) {
  const float nearest = static_cast<float>(x);
  const double back = static_cast<double>(nearest);
  if (back == x || std::isnan(x) || std::isinf(x)) return nearest;
  // Truncate towards zero, then set the last bit: inexact results end odd and cannot tie later.
  std::uint32_t bits = std::bit_cast<std::uint32_t>(nearest);
  if (std::fabs(back) > std::fabs(x)) bits -= 1;
  return std::bit_cast<float>(bits | 1u);
}

namespace {

template <typename T>
T load(const void* address) {
  T value;
  std::memcpy(&value, address, sizeof(T));
  return value;
}

template <typename T>
void store(void* address, T value) {
  std::memcpy(address, &value, sizeof(T));
}

}  // namespace

double load_as_double(const void* address, DType dtype) {
  switch (dtype) {
    case DType::f64:
      return load<double>(address);
    case DType::f32:
      return static_cast<double>(load<float>(address));
    case DType::f16:
      return static_cast<double>(to_float(load<Float16>(address)));
    case DType::bf16:
      return static_cast<double>(to_float(load<BFloat16>(address)));
    case DType::i64:
      return static_cast<double>(load<std::int64_t>(address));
    case DType::i32:
      return static_cast<double>(load<std::int32_t>(address));
    case DType::boolean:
      return load<std::uint8_t>(address) != 0 ? 1.0 : 0.0;
    case DType::e4m3:
      break;
  }
  return std::nan("");
}

void store_from_double(void* address, DType dtype, double value) {
  switch (dtype) {
    case DType::f64:
      store(address, value);
      return;
    case DType::f32:
      store(address, static_cast<float>(value));
      return;
    case DType::f16:
      store(address, to_float16(value));
      return;
    case DType::bf16:
      store(address, to_bfloat16(value));
      return;
    default:
      return;
  }
}

std::int64_t load_integer(const void* address, DType dtype) {
  return dtype == DType::i64 ? load<std::int64_t>(address)
                             : static_cast<std::int64_t>(load<std::int32_t>(address));
}

}  // namespace onchip
