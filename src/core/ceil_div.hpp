#pragma once

#include <cstdint>

namespace onchip {

// a / b, rounded up, for a >= 0 and b > 0, both as large as their type allows.
constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  const auto divisor = static_cast<std::uint64_t>(b);
  return static_cast<std::int64_t>((static_cast<std::uint64_t>(a) + divisor - 1) / divisor);
}

}  // namespace onchip
