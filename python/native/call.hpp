// onchip._native.Call: one operator's argument struct, its plan and its run.
#pragma once

#include "errors.hpp"

namespace onchip_python {

// Called once, by the module.
void bind_call(nb::module_& module);

}  // namespace onchip_python
