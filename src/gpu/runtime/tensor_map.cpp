#include "gpu/runtime/tensor_map.hpp"

#include "core/status.hpp"

namespace onchip::gpu {

namespace {

// The driver's number of an element type; -1: none.
std::int32_t data_type(DType dtype) {
  switch (dtype) {
    case DType::e4m3:
    case DType::boolean:
      return 0;  // UINT8
    case DType::i32:
      return 3;
    case DType::i64:
      return 5;
    case DType::f16:
      return 6;
    case DType::f32:
      return 7;
    case DType::f64:
      return 8;
    case DType::bf16:
      return 9;
  }
  return -1;
}

std::uint64_t swizzle_span(TensorMapSwizzle swizzle) {
  switch (swizzle) {
    case TensorMapSwizzle::none:
      return ~std::uint64_t{0};
    case TensorMapSwizzle::bytes32:
      return 32;
    case TensorMapSwizzle::bytes64:
      return 64;
    case TensorMapSwizzle::bytes128:
      return 128;
  }
  return 0;
}

}  // namespace

std::string why_no_tensor_map(const TensorMapShape& shape) {
  const auto axis_text = [](const char* what, std::uint32_t axis, std::uint64_t got,
                            const char* wanted) {
    return std::string(what) + " of axis " + std::to_string(axis) + ": got " + std::to_string(got) +
           ", wanted " + wanted;
  };
  if (shape.rank < 1 || shape.rank > kMaxTensorMapRank) {
    return "rank: got " + std::to_string(shape.rank) + ", wanted 1..5";
  }
  if (shape.address % 16 != 0) {
    return "address: got " + std::to_string(shape.address % 16) +
           " past a multiple of 16 bytes, wanted a multiple";
  }
  for (std::uint32_t i = 0; i < shape.rank; ++i) {
    if (shape.dims[i] < 1 || shape.dims[i] > std::uint64_t{1} << 32) {
      return axis_text("extent", i, shape.dims[i], "1..2^32");
    }
    if (shape.box[i] < 1 || shape.box[i] > 256) {
      return axis_text("box", i, shape.box[i], "1..256");
    }
  }
  for (std::uint32_t i = 1; i < shape.rank; ++i) {
    const std::uint64_t stride = shape.strides[i - 1];
    if (stride % 16 != 0) return axis_text("stride", i, stride, "a multiple of 16 bytes");
    if (stride >= std::uint64_t{1} << 40) return axis_text("stride", i, stride, "below 2^40 bytes");
  }
  const std::uint64_t row_bytes =
      std::uint64_t{shape.box[0]} * static_cast<std::uint64_t>(dtype_size(shape.dtype));
  if (row_bytes % 16 != 0) return axis_text("box bytes", 0, row_bytes, "a multiple of 16");
  if (row_bytes > swizzle_span(shape.swizzle)) {
    return axis_text("box bytes", 0, row_bytes, "at most the swizzle's span");
  }
  return {};
}

void encode_tensor_map(const Driver& driver, const TensorMapShape& shape, TensorMap& map) {
  const std::string problem = why_no_tensor_map(shape);
  if (!problem.empty()) throw Error(ONCHIP_INTERNAL, "tensor map: " + problem);
  constexpr std::uint32_t kElementStrides[kMaxTensorMapRank] = {1, 1, 1, 1, 1};
  constexpr std::int32_t kInterleaveNone = 0;
  constexpr std::int32_t kFillZeros = 0;
  check_driver(driver,
               driver.cuTensorMapEncodeTiled(
                   &map, data_type(shape.dtype), shape.rank,
                   reinterpret_cast<void*>(static_cast<std::uintptr_t>(shape.address)), shape.dims,
                   shape.strides, shape.box, kElementStrides, kInterleaveNone,
                   static_cast<std::int32_t>(shape.swizzle),
                   static_cast<std::int32_t>(shape.promotion), kFillZeros),
               "cuTensorMapEncodeTiled");
}

}  // namespace onchip::gpu
