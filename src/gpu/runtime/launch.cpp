#include "gpu/runtime/launch.hpp"

#include <string>

#include "core/status.hpp"

namespace onchip::gpu {

void launch(const Driver& driver, CuFunction function, const LaunchShape& shape, CuStream stream,
            void** parameters, std::string_view name) {
  CuLaunchConfig config{};
  config.grid_x = shape.grid;
  config.grid_y = config.grid_z = 1;
  config.block_x = shape.block;
  config.block_y = config.block_z = 1;
  config.dynamic_shared_bytes = shape.dynamic_shared_bytes;
  config.stream = stream;
  const CuResult result = driver.cuLaunchKernelEx(&config, function, parameters, nullptr);
  if (result == kCuSuccess) return;
  throw Error(ONCHIP_DEVICE_ERROR,
              "launch of " + std::string(name) + " (grid " + std::to_string(shape.grid) +
                  ", block " + std::to_string(shape.block) + ", " +
                  std::to_string(shape.dynamic_shared_bytes) +
                  " bytes of shared memory): " + driver_error_text(driver, result));
}

}  // namespace onchip::gpu
