#include "gpu/runtime/launch.hpp"

#include <gtest/gtest.h>

#include <string>

#include "gpu/runtime/tensor_map.hpp"
#include "gpu_test_support.hpp"

namespace onchip::gpu::test {
namespace {

TEST(Launch, PassesShapeStreamAndArguments) {
  const Driver driver = fake_driver();
  int first = 17;
  double second = 2.5;
  void* parameters[] = {&first, &second};
  fake().on_launch = [](void** given) {
    EXPECT_EQ(*static_cast<int*>(given[0]), 17);
    EXPECT_EQ(*static_cast<double*>(given[1]), 2.5);
  };
  const auto function = reinterpret_cast<CuFunction>(std::uintptr_t{9});
  const auto stream = reinterpret_cast<CuStream>(std::uintptr_t{8});
  launch(driver, function, {.grid = 100000, .block = 384, .dynamic_shared_bytes = 70000}, stream,
         parameters, "name");
  EXPECT_EQ(fake().launched, function);
  const CuLaunchConfig& config = fake().launch;
  EXPECT_EQ(config.grid_x, 100000u);
  EXPECT_EQ(config.grid_y * config.grid_z, 1u);
  EXPECT_EQ(config.block_x, 384u);
  EXPECT_EQ(config.block_y * config.block_z, 1u);
  EXPECT_EQ(config.dynamic_shared_bytes, 70000u);
  EXPECT_EQ(config.stream, stream);
  EXPECT_EQ(config.num_attributes, 0u);
}

TEST(Launch, FailureNamesKernelShapeAndReason) {
  const Driver driver = fake_driver();
  fake().fails["cuLaunchKernelEx"] = 701;
  const Thrown thrown = thrown_by([&] {
    launch(driver, nullptr, {.grid = 7, .block = 128, .dynamic_shared_bytes = 5}, nullptr, nullptr,
           "cuda.sm90/x");
  });
  EXPECT_EQ(thrown.code, ONCHIP_DEVICE_ERROR);
  EXPECT_EQ(thrown.text,
            "launch of cuda.sm90/x (grid 7, block 128, 5 bytes of shared memory): CUDA_ERROR_FAKE "
            "(701): a planned failure");
}

// ---- tensor maps

TensorMapShape legal_shape() {
  TensorMapShape shape;
  shape.address = 1 << 20;
  shape.dtype = DType::bf16;
  shape.rank = 3;
  shape.dims[0] = 100;
  shape.dims[1] = 1000;
  shape.dims[2] = 7;
  shape.strides[0] = 208;
  shape.strides[1] = 208000;
  shape.box[0] = 64;
  shape.box[1] = 128;
  shape.box[2] = 1;
  return shape;
}

TEST(TensorMap, EncodesWhatItIsGiven) {
  const Driver driver = fake_driver();
  const TensorMapShape shape = legal_shape();
  EXPECT_EQ(why_no_tensor_map(shape), "");
  TensorMap map;
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(&map) % 64, 0u);
  encode_tensor_map(driver, shape, map);
  ASSERT_EQ(fake().maps.size(), 1u);
  const TensorMapShape& seen = fake().maps[0];
  EXPECT_EQ(seen.address, shape.address);
  EXPECT_EQ(seen.dtype, DType::bf16);
  EXPECT_EQ(seen.rank, 3u);
  EXPECT_EQ(seen.dims[2], 7u);
  EXPECT_EQ(seen.strides[1], 208000u);
  EXPECT_EQ(seen.box[1], 128u);
  EXPECT_EQ(seen.swizzle, TensorMapSwizzle::bytes128);
}

TEST(TensorMap, SaysWhatCannotBeAddressed) {
  const auto reason = [](auto&& change) {
    TensorMapShape shape = legal_shape();
    change(shape);
    return why_no_tensor_map(shape);
  };
  EXPECT_EQ(reason([](TensorMapShape& s) { s.rank = 0; }), "rank: got 0, wanted 1..5");
  EXPECT_EQ(reason([](TensorMapShape& s) { s.rank = 6; }), "rank: got 6, wanted 1..5");
  EXPECT_EQ(reason([](TensorMapShape& s) { s.address += 8; }),
            "address: got 8 past a multiple of 16 bytes, wanted a multiple");
  EXPECT_EQ(reason([](TensorMapShape& s) { s.dims[1] = 0; }),
            "extent of axis 1: got 0, wanted 1..2^32");
  EXPECT_EQ(reason([](TensorMapShape& s) { s.dims[2] = (1ull << 32) + 1; }),
            "extent of axis 2: got 4294967297, wanted 1..2^32");
  EXPECT_EQ(reason([](TensorMapShape& s) { s.box[1] = 257; }),
            "box of axis 1: got 257, wanted 1..256");
  EXPECT_EQ(reason([](TensorMapShape& s) { s.strides[0] = 200; }),
            "stride of axis 1: got 200, wanted a multiple of 16 bytes");
  EXPECT_EQ(reason([](TensorMapShape& s) { s.strides[1] = 1ull << 40; }),
            "stride of axis 2: got 1099511627776, wanted below 2^40 bytes");
  EXPECT_EQ(reason([](TensorMapShape& s) { s.box[0] = 4; }),
            "box bytes of axis 0: got 8, wanted a multiple of 16");
  EXPECT_EQ(reason([](TensorMapShape& s) { s.box[0] = 128; }),
            "box bytes of axis 0: got 256, wanted at most the swizzle's span");
  EXPECT_EQ(reason([](TensorMapShape& s) {
              s.box[0] = 128;
              s.swizzle = TensorMapSwizzle::none;
            }),
            "");
}

TEST(TensorMap, RefusesBeforeTheDriverIsAsked) {
  const Driver driver = fake_driver();
  TensorMapShape shape = legal_shape();
  shape.rank = 9;
  TensorMap map;
  EXPECT_EQ(thrown_by([&] { encode_tensor_map(driver, shape, map); }).code, ONCHIP_INTERNAL);
  EXPECT_TRUE(fake().maps.empty());
  fake().fails["cuTensorMapEncodeTiled"] = 1;
  EXPECT_EQ(thrown_by([&] { encode_tensor_map(driver, legal_shape(), map); }).code,
            ONCHIP_DEVICE_ERROR);
}

}  // namespace
}  // namespace onchip::gpu::test
