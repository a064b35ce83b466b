// Tensors in guarded host memory. Every byte that is no element of the tensor (gaps between strided
// rows, and the memory around it) holds poison, which reads as NaN, -1 or true; pages that may not
// be touched follow and precede it.
#pragma once

#include <onchip/onchip.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "core/dtype.hpp"

namespace onchip::test {

constexpr unsigned char kPoisonByte = 0xff;

// `size` bytes that touch the forbidden page behind them, or the one in front of them.
class GuardedMemory {
 public:
  enum class Against { end, front };

  GuardedMemory(std::size_t size, Against against, std::size_t shift = 0);
  ~GuardedMemory();
  GuardedMemory(GuardedMemory&& other) noexcept;
  GuardedMemory& operator=(GuardedMemory&& other) noexcept;
  GuardedMemory(const GuardedMemory&) = delete;
  GuardedMemory& operator=(const GuardedMemory&) = delete;

  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }
  // All accessible bytes: what `data` points to, and the poison beside it on its pages.
  std::span<std::byte> accessible() const { return {accessible_, accessible_size_}; }

 private:
  std::byte* mapping_ = nullptr;
  std::size_t mapping_size_ = 0;
  std::byte* accessible_ = nullptr;
  std::size_t accessible_size_ = 0;
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

using Shape = std::vector<std::int64_t>;

Shape contiguous_strides(const Shape& shape);

// Offsets in elements, relative to `data`, of the first and last element; empty views: 0, -1.
struct Extent {
  std::int64_t first = 0;
  std::int64_t last = -1;
};
Extent extent_of(const Shape& shape, const Shape& strides);

class HostTensor {
 public:
  HostTensor() = default;
  HostTensor(DType dtype, const Shape& shape)
      : HostTensor(dtype, shape, contiguous_strides(shape)) {}
  HostTensor(DType dtype, const Shape& shape, const Shape& strides,
             GuardedMemory::Against against = GuardedMemory::Against::end);

  const onchip_tensor& view() const { return view_; }
  const onchip_tensor* abi() const { return present() ? &view_ : nullptr; }
  bool present() const { return view_.rank >= 0; }
  DType dtype() const { return static_cast<DType>(view_.dtype); }
  std::int64_t numel() const;

  // In row-major order of the indices, whatever the strides.
  std::vector<double> values() const;
  void fill(const std::function<double()>& next);
  void fill_from(const std::vector<double>& values);
  void fill_integers(const std::vector<std::int64_t>& values);
  void set(const Shape& index, double value);
  double get(const Shape& index) const;

  std::span<std::byte> accessible() const { return memory_.accessible(); }
  std::vector<std::byte> bytes() const {
    return {memory_.accessible().begin(), memory_.accessible().end()};
  }
  // Empty if every byte that is no element still holds poison.
  std::string broken_guard() const;
  void poison();

 private:
  std::byte* address(const Shape& index) const;

  onchip_tensor view_{.data = nullptr,
                      .dtype = 0,
                      .rank = -1,
                      .device_type = 0,
                      .device_id = 0,
                      .shape = {},
                      .strides = {}};
  GuardedMemory memory_{0, GuardedMemory::Against::end};
};

// Calls f(address) for each element of a tensor of the ABI, in row-major order of the indices.
void for_each_element(const onchip_tensor& tensor, const std::function<void(std::byte*)>& f);
std::vector<double> read_values(const onchip_tensor& tensor);
std::vector<std::int64_t> read_integers(const onchip_tensor& tensor);
std::int64_t element_count(const onchip_tensor& tensor);

}  // namespace onchip::test
