#include "core/tensor.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

#include "core/status.hpp"

namespace onchip {

Footprint footprint(const TensorView& tensor) {
  Footprint result;
  result.element_size = tensor.element_size();
  result.device = tensor.device;
  if (tensor.numel() == 0) return result;
  auto address = reinterpret_cast<std::intptr_t>(tensor.data);
  const std::int64_t size = tensor.element_size();
  std::int64_t span = 0;
  for (std::int32_t i = 0; i < tensor.rank; ++i) {
    std::int64_t stride = tensor.strides[static_cast<std::size_t>(i)];
    const std::int64_t extent = tensor.shape[static_cast<std::size_t>(i)];
    if (extent <= 1) continue;
    if (stride < 0) {
      address += stride * (extent - 1) * size;
      stride = -stride;
    }
    span += stride * (extent - 1);
    result.axes[result.count++] = {extent, stride};
  }
  std::sort(result.axes.begin(), result.axes.begin() + static_cast<std::ptrdiff_t>(result.count),
            [](const Footprint::Axis& a, const Footprint::Axis& b) { return a.stride < b.stride; });
  std::size_t merged = 0;
  for (std::size_t i = 0; i < result.count; ++i) {
    if (merged > 0) {
      Footprint::Axis& inner = result.axes[merged - 1];
      if (result.axes[i].stride == inner.stride * inner.extent) {
        inner.extent *= result.axes[i].extent;
        continue;
      }
    }
    result.axes[merged++] = result.axes[i];
  }
  result.count = merged;
  result.low = static_cast<std::uintptr_t>(address);
  result.high = result.low + static_cast<std::uintptr_t>((span + 1) * size);
  return result;
}

std::string device_text(Device device) {
  switch (device.type) {
    case ONCHIP_DEVICE_CPU:
      return "cpu";
    case ONCHIP_DEVICE_CUDA:
      return "cuda:" + std::to_string(device.id);
    default:
      return "device type " + std::to_string(device.type);
  }
}

std::int64_t TensorView::numel() const {
  std::int64_t count = 1;
  for (std::int32_t i = 0; i < rank; ++i) count *= shape[static_cast<std::size_t>(i)];
  return rank < 0 ? 0 : count;
}

std::string shape_text(std::initializer_list<std::int64_t> shape) {
  std::string text = "[";
  for (const std::int64_t extent : shape) {
    if (text.size() > 1) text += ", ";
    text += std::to_string(extent);
  }
  return text + "]";
}

std::string shape_text(const TensorView& tensor) {
  std::string text = "[";
  for (std::int32_t i = 0; i < tensor.rank; ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(tensor.shape[static_cast<std::size_t>(i)]);
  }
  return text + "]";
}

TensorView checked_view(std::string_view op, std::string_view name, const onchip_tensor* tensor) {
  TensorView view;
  if (tensor == nullptr) return view;
  if (!is_known_dtype(tensor->dtype)) {
    throw_invalid(op, name, "dtype number " + std::to_string(tensor->dtype),
                  "an onchip_dtype (1..8)");
  }
  if (tensor->rank < 0 || tensor->rank > ONCHIP_MAX_RANK) {
    throw_invalid(op, name, "rank " + std::to_string(tensor->rank), "rank 0..6");
  }
  if (tensor->device_type != ONCHIP_DEVICE_CPU && tensor->device_type != ONCHIP_DEVICE_CUDA) {
    throw_invalid(op, name, "device type " + std::to_string(tensor->device_type),
                  "1 (CPU) or 2 (CUDA)");
  }
  if (tensor->device_id < 0 ||
      (tensor->device_type == ONCHIP_DEVICE_CPU && tensor->device_id != 0)) {
    throw_invalid(op, name, "device id " + std::to_string(tensor->device_id),
                  "0 for the CPU, an ordinal from 0 for CUDA");
  }
  view.data = static_cast<std::byte*>(tensor->data);
  view.dtype = static_cast<DType>(tensor->dtype);
  view.rank = tensor->rank;
  view.device = {tensor->device_type, tensor->device_id};
  const auto rank = static_cast<std::size_t>(view.rank);
  std::copy_n(tensor->shape, rank, view.shape.begin());
  std::copy_n(tensor->strides, rank, view.strides.begin());
  bool empty = false;
  for (std::size_t axis = 0; axis < rank; ++axis) {
    if (view.shape[axis] < 0) {
      throw_invalid(op, name, "shape " + shape_text(view), "extents of at least 0");
    }
    empty = empty || view.shape[axis] == 0;
  }
  // The element count and the span of addresses must fit in 63 bits, or offsets would wrap.
  __extension__ using Wide = __int128;
  constexpr Wide kLimit = INT64_MAX / 8;
  Wide count = 1;
  Wide span = 0;
  for (std::size_t axis = 0; axis < rank; ++axis) {
    if (view.shape[axis] == 0) {
      view.strides[axis] = 0;
      continue;
    }
    count *= view.shape[axis];
    // An axis of one element is never stepped along, an empty tensor not at all: whatever stands
    // there must not overflow when it is turned into bytes.
    if (empty ||
        (view.shape[axis] == 1 && (view.strides[axis] > kLimit || view.strides[axis] < -kLimit))) {
      view.strides[axis] = 0;
    }
    const Wide reach = Wide{view.strides[axis]} * (view.shape[axis] - 1);
    span += reach < 0 ? -reach : reach;
    if (count > kLimit || span > kLimit) {
      throw_invalid(op, name, "shape " + shape_text(view) + " with these strides",
                    "a view that spans less than 2^63 bytes");
    }
  }
  if (empty) {
    // Nor is its address used: rows of no elements start at NULL + 0.
    view.data = nullptr;
    return view;
  }
  if (rank > 0 && view.shape[rank - 1] > 1 && view.strides[rank - 1] != 1) {
    throw_invalid(op, name, "innermost stride " + std::to_string(view.strides[rank - 1]),
                  "innermost stride 1", "a contiguous copy");
  }
  if (view.data == nullptr) {
    throw_invalid(op, name, "a null data pointer with shape " + shape_text(view),
                  "an address, or an empty shape");
  }
  const auto address = reinterpret_cast<std::uintptr_t>(view.data);
  if (address % static_cast<std::uintptr_t>(view.element_size()) != 0) {
    throw_invalid(op, name, "an address not aligned to its elements",
                  "a multiple of " + std::to_string(view.element_size()) + " bytes");
  }
  return view;
}

void require_present(std::string_view op, std::string_view name, const TensorView& tensor) {
  if (!tensor.present()) throw_invalid(op, name, "no tensor", "a tensor");
}

void require_shape(std::string_view op, std::string_view name, const TensorView& tensor,
                   std::initializer_list<std::int64_t> shape, std::string_view axes) {
  bool same = tensor.rank == static_cast<std::int32_t>(shape.size());
  std::size_t axis = 0;
  for (const std::int64_t extent : shape) {
    same = same && tensor.shape[axis] == extent;
    ++axis;
  }
  if (!same) {
    throw_invalid(op, name, "shape " + shape_text(tensor),
                  std::string(axes) + " = " + shape_text(shape));
  }
}

void require_dtype(std::string_view op, std::string_view name, const TensorView& tensor,
                   std::initializer_list<DType> allowed) {
  if (std::find(allowed.begin(), allowed.end(), tensor.dtype) != allowed.end()) return;
  std::string wanted;
  for (const DType dtype : allowed) {
    if (!wanted.empty()) wanted += " or ";
    wanted += dtype_name(dtype);
  }
  throw_invalid(op, name, dtype_name(tensor.dtype), wanted);
}

void require_no_self_overlap(std::string_view op, std::string_view name, const TensorView& tensor) {
  if (tensor.numel() == 0) return;
  const Footprint print = footprint(tensor);
  std::int64_t reach = 1;
  for (std::size_t i = 0; i < print.count; ++i) {
    if (print.axes[i].stride < reach) {
      throw_invalid(op, name, "an output whose elements overlap in memory",
                    "strides that keep elements apart", "a contiguous tensor");
    }
    reach = print.axes[i].stride * (print.axes[i].extent - 1) + reach;
  }
}

bool may_overlap(const Footprint& a, const Footprint& b) {
  if (a.low == a.high || b.low == b.high || !(a.device == b.device)) return false;
  if (a.high <= b.low || b.high <= a.low) return false;

  // Both are rows of bytes at multiples of g from their starts. On a circle of g bytes each
  // occupies one arc; disjoint arcs mean that no byte is shared.
  std::int64_t gcd = 0;
  const auto row_bytes = [&gcd](const Footprint& print) {
    std::int64_t row = print.element_size;
    std::size_t first = 0;
    if (print.count > 0 && print.axes[0].stride == 1) {
      row *= print.axes[0].extent;
      first = 1;
    }
    for (std::size_t i = first; i < print.count; ++i) {
      gcd = std::gcd(gcd, print.axes[i].stride * print.element_size);
    }
    return row;
  };
  const std::int64_t row_a = row_bytes(a);
  const std::int64_t row_b = row_bytes(b);
  if (gcd == 0) return true;
  const auto circle = static_cast<std::uintptr_t>(gcd);
  const auto distance =
      static_cast<std::int64_t>((b.low % circle + circle - a.low % circle) % circle);
  return !(distance >= row_a && distance + row_b <= gcd);
}

}  // namespace onchip
