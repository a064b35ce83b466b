// Arrays of any library into Tensors.
#pragma once

#include "errors.hpp"

namespace onchip_python {

// Called once, by the module.
void bind_cast(nb::module_& module);

}  // namespace onchip_python
