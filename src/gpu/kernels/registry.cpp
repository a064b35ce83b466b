#include "gpu/kernels/registry.hpp"

#include "gpu/kernels/sm90/attention_forward.hpp"

namespace onchip::gpu {

std::span<const KernelDefinition* const> kernel_definitions() {
  static constexpr const KernelDefinition* kDefinitions[] = {
      &sm90::attention_forward_kernel,
  };
  return kDefinitions;
}

}  // namespace onchip::gpu
