// Arrays of any library into Tensors.
#pragma once

#include "python.hpp"

namespace onchip_python {

// tensor(op, argument, array, dtype, writable, stream) -> Tensor, through the first that works of:
// the DLPack C exchange interface of the array's type, __dlpack__, the buffer protocol. Python
// signature and meaning of the arguments: _native.pyi.
PyObject* tensor_of_array(PyObject* module, PyObject* const* args, Py_ssize_t count);

}  // namespace onchip_python
