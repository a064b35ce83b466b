// Every GPU kernel the library has.
#pragma once

#include <span>

#include "gpu/runtime/kernel_spec.hpp"

namespace onchip::gpu {

std::span<const KernelDefinition* const> kernel_definitions();

}  // namespace onchip::gpu
