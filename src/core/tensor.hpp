// A strided view with its type known, and the checks every operator makes on one.
#pragma once

#include <onchip/onchip.h>

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

#include "core/dtype.hpp"

namespace onchip {

struct Device {
  std::int32_t type = ONCHIP_DEVICE_CPU;
  std::int32_t id = 0;
  friend bool operator==(const Device&, const Device&) = default;
};

std::string device_text(Device device);

// Absent when rank < 0. Strides are in elements; byte offsets are formed in 64 bits.
struct TensorView {
  std::byte* data = nullptr;
  DType dtype = DType::f32;
  std::int32_t rank = -1;
  Device device;
  std::array<std::int64_t, ONCHIP_MAX_RANK> shape{};
  std::array<std::int64_t, ONCHIP_MAX_RANK> strides{};

  bool present() const { return rank >= 0; }
  std::int64_t numel() const;
  std::int64_t element_size() const { return dtype_size(dtype); }

  // Address of the element at the given index (as many as there are axes named).
  template <typename... Index>
  std::byte* at(Index... index) const {
    std::int64_t offset = 0;
    std::size_t axis = 0;
    ((offset += static_cast<std::int64_t>(index) * strides[axis++]), ...);
    return data + offset * element_size();
  }
};

std::string shape_text(const TensorView& tensor);
std::string shape_text(std::initializer_list<std::int64_t> shape);

// Known dtype, legal rank, extents >= 0, innermost stride 1, offsets that fit, data where needed,
// address aligned to the element. Throws Error(invalid_argument). NULL gives an absent view.
TensorView checked_view(std::string_view op, std::string_view name, const onchip_tensor* tensor);

void require_present(std::string_view op, std::string_view name, const TensorView& tensor);
void require_shape(std::string_view op, std::string_view name, const TensorView& tensor,
                   std::initializer_list<std::int64_t> shape, std::string_view axes);
void require_dtype(std::string_view op, std::string_view name, const TensorView& tensor,
                   std::initializer_list<DType> allowed);

// An output whose elements could share memory (stride 0 on an axis longer than 1, say) is refused.
void require_no_self_overlap(std::string_view op, std::string_view name, const TensorView& tensor);

// The bytes a view touches: the axes that move the address, strides made positive, innermost first,
// contiguous ones merged; and the range of addresses.
struct Footprint {
  struct Axis {
    std::int64_t extent;
    std::int64_t stride;
  };
  std::array<Axis, ONCHIP_MAX_RANK> axes;
  std::size_t count = 0;
  std::int64_t element_size = 1;
  std::uintptr_t low = 0;   // first byte
  std::uintptr_t high = 0;  // one past the last byte; == low for an empty view
  Device device;
};

Footprint footprint(const TensorView& tensor);

// True unless the two provably share no byte: their address ranges are apart, or their rows
// interleave without touching (slices of one packed tensor).
bool may_overlap(const Footprint& a, const Footprint& b);

}  // namespace onchip
