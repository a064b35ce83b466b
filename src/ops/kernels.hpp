// GPU kernels ahead of their first call: the texts and actions of onchip_kernels_*.
#pragma once

#include <string>
#include <string_view>

#include "gpu/kernels/catalog.hpp"

namespace onchip::ops {

// JSON: {"kernels": [{"name", "kernel", "architecture", "spec": {field: value}}, ...]}.
std::string kernels_list(std::string_view filter);

// Compiles what the filter picks into the kernel cache.
void kernels_warm(std::string_view filter);

// JSON: {"kernels": [{"name", "origin", "compiler", "registers", ...}, ...]}.
std::string kernels_resources(std::string_view filter);

// Writes the archive of what the filter picks.
void kernels_build(std::string_view filter, std::string_view path);

// JSON object: driver, devices, NVRTC, kernel cache, archive.
std::string describe_gpu(const gpu::GpuReport& report);

// JSON objects {"name", "available", "detail"} of the GPU backends, with commas between them:
// the devices each would use, or why it takes no call.
std::string describe_gpu_backends(const gpu::GpuReport& report);

}  // namespace onchip::ops
