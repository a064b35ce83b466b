// Python values into the fields of the C library's argument structs.
#pragma once

#include "errors.hpp"
#include "operators.hpp"

namespace onchip_python {

// `base`: the field's struct. `held`: keeps what the field points to. `op`: for messages. None
// leaves the default where the field takes it.
void set_field(const char* op, const Field& field, void* base, nb::object& held, nb::handle value);

// The view must stay where it is.
void set_tensor(const Field& field, void* base, const onchip_tensor& view);

}  // namespace onchip_python
