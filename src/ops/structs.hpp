// Reading versioned C structs: a caller compiled against an older header passes a shorter one,
// whose missing fields take their defaults; a longer one is taken only if the unknown tail is zero.
#pragma once

#include <cstddef>
#include <cstring>
#include <string>
#include <string_view>

#include "core/status.hpp"

namespace onchip::ops {

// `smallest` is the size the struct had in its first release.
template <typename T>
T read_struct(std::string_view op, std::string_view name, const T* given, const T& defaults,
              std::size_t smallest) {
  if (given == nullptr) throw_invalid(op, name, "NULL", "a pointer to the struct");
  std::size_t size = 0;
  std::memcpy(&size, given, sizeof(size));
  constexpr std::size_t kLargest = 4096;
  if (size < smallest || size > kLargest) {
    throw_invalid(op, std::string(name) + ".struct_size", std::to_string(size), "sizeof the struct",
                  std::to_string(sizeof(T)));
  }
  T result = defaults;
  std::memcpy(&result, given, size < sizeof(T) ? size : sizeof(T));
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  for (std::size_t i = sizeof(T); i < size; ++i) {
    if (bytes[i] != 0) {
      throw_invalid(op, name, "fields this library's version does not know", "zeros there",
                    "a newer library");
    }
  }
  result.struct_size = sizeof(T);
  return result;
}

}  // namespace onchip::ops
