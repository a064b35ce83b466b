// Tensor maps: what the copy engine of compute capability 9.0 and later is told about a tensor.
#pragma once

#include <cstdint>
#include <string>

#include "core/dtype.hpp"
#include "gpu/runtime/driver.hpp"

namespace onchip::gpu {

// Opaque; passed to kernels by value as a __grid_constant__ parameter.
struct alignas(64) TensorMap {
  std::uint64_t words[16];
};
static_assert(sizeof(TensorMap) == 128);

inline constexpr std::uint32_t kMaxTensorMapRank = 5;

enum class TensorMapSwizzle : std::int32_t { none = 0, bytes32 = 1, bytes64 = 2, bytes128 = 3 };
enum class TensorMapPromotion : std::int32_t { none = 0, bytes64 = 1, bytes128 = 2, bytes256 = 3 };

// Axis 0 is the contiguous one. Elements beyond `dims` read as zero and are not written.
struct TensorMapShape {
  std::uint64_t address = 0;
  DType dtype = DType::bf16;
  std::uint32_t rank = 0;
  std::uint64_t dims[kMaxTensorMapRank] = {};         // elements
  std::uint64_t strides[kMaxTensorMapRank - 1] = {};  // bytes, of axes 1..rank-1
  std::uint32_t box[kMaxTensorMapRank] = {};          // elements
  TensorMapSwizzle swizzle = TensorMapSwizzle::bytes128;
  TensorMapPromotion promotion = TensorMapPromotion::bytes256;
};

// What the copy engine cannot address about it; "" if nothing.
std::string why_no_tensor_map(const TensorMapShape& shape);

// Throws Error(internal) with why_no_tensor_map's text: a plan is to refuse such tensors by then.
void encode_tensor_map(const Driver& driver, const TensorMapShape& shape, TensorMap& map);

}  // namespace onchip::gpu
