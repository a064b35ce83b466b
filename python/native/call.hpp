// onchip._native.Call: one operator's argument struct, its plan and its run.
#pragma once

#include "errors.hpp"
#include "tensor.hpp"

namespace onchip_python {

// The workspace of a planned call in an array of bytes that has room for its alignment.
void* aligned_workspace(const onchip_plan& plan, const Tensor& workspace);

// Called once, by the module.
void bind_call(nb::module_& module);

}  // namespace onchip_python
