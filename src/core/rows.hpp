// Rows of one head each, as backends see them: strides in bytes, broadcast axes with stride 0.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/dtype.hpp"

namespace onchip {

// q, k, v, o and their gradients: [batch, row, head, dim], or packed [row, head, dim] with
// batch_stride 0. The innermost axis is contiguous.
struct RowsView {
  std::byte* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t batch_stride = 0;
  std::int64_t row_stride = 0;
  std::int64_t head_stride = 0;
  bool wanted = false;  // false: an absent tensor

  std::byte* at(std::int64_t batch, std::int64_t row, std::int64_t head) const {
    return data + batch * batch_stride + row * row_stride + head * head_stride;
  }
};

}  // namespace onchip
