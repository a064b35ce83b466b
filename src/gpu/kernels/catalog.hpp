// The registered variants of all GPU kernels (a kernel, a spec, an architecture): listed, compiled
// ahead of time, packed; and what this process has to compile and run them with.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "gpu/runtime/driver.hpp"
#include "gpu/runtime/kernel_cache.hpp"
#include "gpu/runtime/kernel_spec.hpp"

namespace onchip::gpu {

struct KernelVariant {
  std::string name;  // "cuda.sm90/attention_forward[bf16=1,...]@sm_90a"
  KernelSpec spec;
  Architecture architecture;
};

// Those whose name contains the filter; "" takes all.
std::vector<KernelVariant> kernel_variants(std::string_view filter);

// The image of each, in order, made where it is not at hand, as many at a time as the CPU backends
// use threads. Throws Error(compile_failed) if one cannot be made.
std::vector<std::shared_ptr<const CachedImage>> variant_images(
    KernelCache& cache, const std::vector<KernelVariant>& variants);

// All that decides how GPU kernels are found and run in this process. Problems are ""
// where there is none.
struct GpuReport {
  std::int32_t driver_version = 0;  // 1000 major + 10 minor
  std::string driver_path;
  std::string driver_problem;
  std::vector<DeviceFacts> devices;
  std::string nvrtc_version;
  std::string nvrtc_path;
  std::string nvrtc_problem;
  std::string cache_directory;
  std::string cache_problem;
  std::string archive_path;
  std::size_t archive_count = 0;
  std::string archive_problem;
};

GpuReport gpu_report();

}  // namespace onchip::gpu
