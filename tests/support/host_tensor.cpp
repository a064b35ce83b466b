#include "support/host_tensor.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

namespace onchip::test {

GuardedMemory::GuardedMemory(std::size_t size, Against against, std::size_t shift) : size_(size) {
  if (size == 0) return;
  static const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  accessible_size_ = (size + shift + page - 1) / page * page;
  mapping_size_ = accessible_size_ + 2 * page;
  void* mapping =
      mmap(nullptr, mapping_size_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) throw std::bad_alloc();
  mapping_ = static_cast<std::byte*>(mapping);
  accessible_ = mapping_ + page;
  if (mprotect(accessible_, accessible_size_, PROT_READ | PROT_WRITE) != 0) {
    munmap(mapping_, mapping_size_);
    throw std::bad_alloc();
  }
  std::memset(accessible_, kPoisonByte, accessible_size_);
  data_ =
      against == Against::end ? accessible_ + accessible_size_ - size - shift : accessible_ + shift;
}

GuardedMemory::~GuardedMemory() {
  if (mapping_ != nullptr) munmap(mapping_, mapping_size_);
}

GuardedMemory::GuardedMemory(GuardedMemory&& other) noexcept { *this = std::move(other); }

GuardedMemory& GuardedMemory::operator=(GuardedMemory&& other) noexcept {
  std::swap(mapping_, other.mapping_);
  std::swap(mapping_size_, other.mapping_size_);
  std::swap(accessible_, other.accessible_);
  std::swap(accessible_size_, other.accessible_size_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

Shape contiguous_strides(const Shape& shape) {
  Shape strides(shape.size(), 1);
  for (std::size_t axis = shape.size(); axis-- > 1;) {
    strides[axis - 1] = strides[axis] * std::max<std::int64_t>(shape[axis], 1);
  }
  return strides;
}

Extent extent_of(const Shape& shape, const Shape& strides) {
  Extent extent{0, 0};
  for (std::size_t axis = 0; axis < shape.size(); ++axis) {
    if (shape[axis] == 0) return {0, -1};
    const std::int64_t reach = strides[axis] * (shape[axis] - 1);
    (reach < 0 ? extent.first : extent.last) += reach;
  }
  return extent;
}

HostTensor::HostTensor(DType dtype, const Shape& shape, const Shape& strides,
                       GuardedMemory::Against against) {
  const Extent extent = extent_of(shape, strides);
  const std::int64_t size = dtype_size(dtype);
  memory_ =
      GuardedMemory(static_cast<std::size_t>((extent.last - extent.first + 1) * size), against);
  view_.data = memory_.data() == nullptr ? nullptr : memory_.data() - extent.first * size;
  view_.dtype = static_cast<std::int32_t>(dtype);
  view_.rank = static_cast<std::int32_t>(shape.size());
  view_.device_type = ONCHIP_DEVICE_CPU;
  std::copy(shape.begin(), shape.end(), view_.shape);
  std::copy(strides.begin(), strides.end(), view_.strides);
}

std::int64_t HostTensor::numel() const { return element_count(view_); }

std::vector<double> HostTensor::values() const { return read_values(view_); }

void HostTensor::fill(const std::function<double()>& next) {
  for_each_element(view_, [&](std::byte* at) {
    const double value = next();
    if (dtype() == DType::boolean) {
      const auto byte = static_cast<unsigned char>(value != 0.0);
      std::memcpy(at, &byte, 1);
    } else if (dtype() == DType::i32) {
      const auto integer = static_cast<std::int32_t>(value);
      std::memcpy(at, &integer, sizeof(integer));
    } else if (dtype() == DType::i64) {
      const auto integer = static_cast<std::int64_t>(value);
      std::memcpy(at, &integer, sizeof(integer));
    } else {
      store_from_double(at, dtype(), value);
    }
  });
}

void HostTensor::fill_from(const std::vector<double>& values) {
  std::size_t next = 0;
  fill([&] { return values[next++]; });
}

void HostTensor::fill_integers(const std::vector<std::int64_t>& values) {
  std::size_t next = 0;
  for_each_element(view_, [&](std::byte* at) {
    const std::int64_t value = values[next++];
    const auto narrow = static_cast<std::int32_t>(value);
    if (dtype() == DType::i64) {
      std::memcpy(at, &value, sizeof(value));
    } else {
      std::memcpy(at, &narrow, sizeof(narrow));
    }
  });
}

std::byte* HostTensor::address(const Shape& index) const {
  std::int64_t offset = 0;
  for (std::size_t axis = 0; axis < index.size(); ++axis) {
    offset += index[axis] * view_.strides[axis];
  }
  return static_cast<std::byte*>(view_.data) + offset * dtype_size(dtype());
}

void HostTensor::set(const Shape& index, double value) {
  store_from_double(address(index), dtype(), value);
}

double HostTensor::get(const Shape& index) const { return load_as_double(address(index), dtype()); }

std::string HostTensor::broken_guard() const {
  const std::span<std::byte> all = memory_.accessible();
  std::vector<bool> element(all.size(), false);
  const std::int64_t size = present() ? dtype_size(dtype()) : 0;
  if (present()) {
    for_each_element(view_, [&](std::byte* at) {
      const auto first = static_cast<std::size_t>(at - all.data());
      for (std::size_t byte = 0; byte < static_cast<std::size_t>(size); ++byte) {
        element[first + byte] = true;
      }
    });
  }
  for (std::size_t byte = 0; byte < all.size(); ++byte) {
    if (!element[byte] && all[byte] != std::byte{kPoisonByte}) {
      return "a byte outside the tensor was written, at " +
             std::to_string(all.data() + byte - memory_.data()) + " from its first";
    }
  }
  return "";
}

void HostTensor::poison() {
  const std::span<std::byte> all = memory_.accessible();
  std::fill(all.begin(), all.end(), std::byte{kPoisonByte});
}

void for_each_element(const onchip_tensor& tensor, const std::function<void(std::byte*)>& f) {
  const std::int64_t count = element_count(tensor);
  const std::int64_t size = dtype_size(static_cast<DType>(tensor.dtype));
  for (std::int64_t n = 0; n < count; ++n) {
    std::int64_t rest = n;
    std::int64_t offset = 0;
    for (std::int32_t axis = tensor.rank; axis-- > 0;) {
      offset += rest % tensor.shape[axis] * tensor.strides[axis];
      rest /= tensor.shape[axis];
    }
    f(static_cast<std::byte*>(tensor.data) + offset * size);
  }
}

std::vector<double> read_values(const onchip_tensor& tensor) {
  std::vector<double> values;
  for_each_element(tensor, [&](std::byte* at) {
    values.push_back(load_as_double(at, static_cast<DType>(tensor.dtype)));
  });
  return values;
}

std::vector<std::int64_t> read_integers(const onchip_tensor& tensor) {
  std::vector<std::int64_t> values;
  for_each_element(tensor, [&](std::byte* at) {
    values.push_back(load_integer(at, static_cast<DType>(tensor.dtype)));
  });
  return values;
}

std::int64_t element_count(const onchip_tensor& tensor) {
  if (tensor.rank < 0) return 0;
  std::int64_t count = 1;
  for (std::int32_t axis = 0; axis < tensor.rank; ++axis) count *= tensor.shape[axis];
  return count;
}

}  // namespace onchip::test
