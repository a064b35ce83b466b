// What onchip_describe says of the GPU backends, from made-up machines.
#include <gtest/gtest.h>

#include <string>

#include "ops/kernels.hpp"

namespace onchip::ops {
namespace {

gpu::DeviceFacts device(std::int32_t ordinal, std::int32_t compute_capability) {
  gpu::DeviceFacts facts;
  facts.name = "NVIDIA \"X\"";
  facts.ordinal = ordinal;
  facts.compute_capability = compute_capability;
  return facts;
}

std::string entry(bool available, const std::string& detail) {
  return std::string(R"({"name": "cuda.sm90", "available": )") + (available ? "true" : "false") +
         ", \"detail\": \"" + detail +
         R"("}, {"name": "cuda.sm80", "available": false, )"
         R"("detail": "this version has no kernels for it"})";
}

TEST(DescribeGpuBackends, WithoutDriverItsProblemIsTheReason) {
  gpu::GpuReport report;
  report.driver_problem = "libcuda.so.1: not found";
  report.nvrtc_problem = "no NVRTC";
  EXPECT_EQ(describe_gpu_backends(report), entry(false, "libcuda.so.1: not found"));
}

TEST(DescribeGpuBackends, DevicesOfOtherKindsAreNotEnough) {
  gpu::GpuReport report;
  EXPECT_EQ(describe_gpu_backends(report),
            entry(false, "no device of compute capability 9.0 among the 0 seen"));
  report.devices = {device(0, 80), device(1, 100)};
  report.driver_problem = "cuda:2: broken";
  EXPECT_EQ(describe_gpu_backends(report),
            entry(false, "no device of compute capability 9.0 among the 2 seen"));
}

TEST(DescribeGpuBackends, UsableDevicesAreNamed) {
  gpu::GpuReport report;
  report.devices = {device(0, 90), device(1, 80), device(2, 90)};
  const std::string usable = R"(cuda:0 (NVIDIA \"X\"), cuda:2 (NVIDIA \"X\"))";
  EXPECT_EQ(describe_gpu_backends(report), entry(true, usable));
}

TEST(DescribeGpuBackends, KernelsMustComeFromSomewhere) {
  gpu::GpuReport report;
  report.devices = {device(0, 90)};
  report.nvrtc_problem = "no NVRTC";
  EXPECT_EQ(describe_gpu_backends(report), entry(false, "no NVRTC"));
  report.archive_count = 1;
  EXPECT_EQ(describe_gpu_backends(report), entry(true, R"(cuda:0 (NVIDIA \"X\"))"));
}

}  // namespace
}  // namespace onchip::ops
