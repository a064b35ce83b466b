// What the machine reaches at best: the bounds that a benchmark's figures are read against.
#pragma once

#include "errors.hpp"

namespace onchip_python {

// Called once, by the module.
void bind_peaks(nb::module_& module);

}  // namespace onchip_python
