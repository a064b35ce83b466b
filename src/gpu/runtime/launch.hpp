// Launching a loaded kernel on the caller's stream.
#pragma once

#include <cstdint>
#include <string_view>

#include "gpu/runtime/driver.hpp"

namespace onchip::gpu {

struct LaunchShape {
  std::uint32_t grid = 1;  // flat: no axis limit of 65,535 shows
  std::uint32_t block = 1;
  std::uint32_t dynamic_shared_bytes = 0;
};

// `parameters` points at the kernel's arguments, one pointer each. They are copied before it
// returns. Throws Error(device_error) with the name and the driver's words.
void launch(const Driver& driver, CuFunction function, const LaunchShape& shape, CuStream stream,
            void** parameters, std::string_view name);

}  // namespace onchip::gpu
