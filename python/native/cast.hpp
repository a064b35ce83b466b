// Arrays of any library into Tensors.
#pragma once

#include <cstdint>

#include "errors.hpp"
#include "tensor.hpp"

namespace onchip_python {

// Memory that the caller keeps alive through the array, by the C exchange interface of its type.
// False where that is absent or does not describe the array. Refuses what onchip has no dtype for.
bool borrow_memory(const Place& place, nb::handle array, Tensor& result);

// The stream on which the array's library works at present, by the same interface.
bool current_stream(nb::handle array, std::int32_t device_id, std::uint64_t& stream);

// Called once, by the module.
void bind_cast(nb::module_& module);

}  // namespace onchip_python
