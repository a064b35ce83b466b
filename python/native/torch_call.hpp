// onchip._native.TorchCall: an operator's calls with PyTorch's tensors, in few steps.
#pragma once

#include "errors.hpp"

namespace onchip_python {

// Called once, by the module.
void bind_torch_call(nb::module_& module);

}  // namespace onchip_python
