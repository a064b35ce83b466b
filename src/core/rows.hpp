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

// One row as doubles.
inline void load_row(const std::byte* from, DType dtype, std::int64_t dim, double* to) {
  for (std::int64_t d = 0; d < dim; ++d)
    to[d] = load_as_double(from + d * dtype_size(dtype), dtype);
}

inline void load_row(const RowsView& rows, std::int64_t batch, std::int64_t row, std::int64_t head,
                     std::int64_t dim, double* to) {
  load_row(rows.at(batch, row, head), rows.dtype, dim, to);
}

inline void store_row(const RowsView& rows, std::int64_t batch, std::int64_t row, std::int64_t head,
                      std::int64_t dim, const double* from) {
  std::byte* to = rows.at(batch, row, head);
  for (std::int64_t d = 0; d < dim; ++d) {
    store_from_double(to + d * dtype_size(rows.dtype), rows.dtype, from[d]);
  }
}

inline void store_zeros(const RowsView& rows, std::int64_t batch, std::int64_t row,
                        std::int64_t head, std::int64_t dim) {
  std::byte* to = rows.at(batch, row, head);
  for (std::int64_t d = 0; d < dim; ++d) {
    store_from_double(to + d * dtype_size(rows.dtype), rows.dtype, 0.0);
  }
}

}  // namespace onchip
