// A 64-bit hash of what a plan may depend on: types, shapes, strides, devices, 16-byte alignment
// and options; never addresses or stored values.
#pragma once

#include <onchip/onchip.h>

#include <bit>
#include <cstdint>
#include <string_view>

namespace onchip::ops {

class Fingerprint {
 public:
  void add(std::uint64_t word) {
    state_ = (state_ ^ word) * 0x9E3779B97F4A7C15u;
    state_ ^= state_ >> 29;
  }
  void add(std::int64_t word) { add(static_cast<std::uint64_t>(word)); }
  void add(std::int32_t word) { add(static_cast<std::uint64_t>(static_cast<std::uint32_t>(word))); }
  void add(double value) { add(std::bit_cast<std::uint64_t>(value)); }
  void add(std::string_view text) {
    add(static_cast<std::uint64_t>(text.size()));
    for (const char c : text) add(static_cast<std::uint64_t>(static_cast<unsigned char>(c)));
  }
  void add(const onchip_tensor* tensor) {
    if (tensor == nullptr) {
      add(std::uint64_t{0x6e6f6e65});
      return;
    }
    add((static_cast<std::uint64_t>(static_cast<std::uint32_t>(tensor->dtype)) << 32) |
        static_cast<std::uint32_t>(tensor->rank));
    add((static_cast<std::uint64_t>(static_cast<std::uint32_t>(tensor->device_type)) << 32) |
        static_cast<std::uint32_t>(tensor->device_id));
    add(static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(tensor->data) % 16));
    for (std::int32_t i = 0; i < tensor->rank; ++i) {
      add(tensor->shape[i]);
      add(tensor->strides[i]);
    }
  }
  std::uint64_t value() const { return state_; }

 private:
  std::uint64_t state_ = 0x243F6A8885A308D3u;
};

}  // namespace onchip::ops
