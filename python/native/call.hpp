// onchip._native.Call: one operator's argument struct, its plan and its run.
#pragma once

#include "python.hpp"

namespace onchip_python {

// Called once, by the module.
PyObject* make_call_type();

}  // namespace onchip_python
