// onchip._native.Tensor: an onchip_tensor together with what keeps its memory alive.
#pragma once

#include <cstdint>
#include <string_view>

#include "python.hpp"

namespace onchip_python {

struct DTypeRow {
  const char* name;
  std::int32_t dtype;  // onchip_dtype
  std::int64_t size;
};

// For "wanted".
const char* dtype_names();

// NULL if there is none of that name.
const DTypeRow* find_dtype(std::string_view name);

enum class Owner : std::int32_t { kNone, kManaged, kManagedVersioned, kBuffer, kMemory };

struct TensorObject {
  PyObject_HEAD onchip_tensor view;
  std::int64_t byte_strides[ONCHIP_MAX_RANK];
  // By `owner`: dlpack::ManagedTensor*, dlpack::ManagedTensorVersioned*, Py_buffer* (PyMem), or
  // memory (PyMem).
  Owner owner;
  void* owned;
  bool has_data;            // false: a shape alone, for plans and explanations
  char layout_problem[56];  // why the C library would not take this layout; "" = it would
};

// A tensor of rank 0 that owns nothing yet.
Ref new_tensor();

// `object` as a Tensor, NULL if it is something else.
TensorObject* as_tensor(PyObject* object);
inline TensorObject* as_tensor(const Ref& ref) { return as_tensor(ref.get()); }

// Fills strides in elements from byte_strides, and layout_problem. Needs data, dtype and shape.
void describe_layout(TensorObject* self);

// Fills both kinds of strides. Extents too large to address saturate; the C library refuses them.
void set_row_major(TensorObject* self);

void set_rank(const Place& place, TensorObject* self, std::int64_t rank);

// Called once, by the module.
PyObject* make_tensor_type();

// shape(op, argument, shape, dtype, device_type, device_id) -> Tensor without data.
PyObject* tensor_of_shape(PyObject* module, PyObject* const* args, Py_ssize_t count);

}  // namespace onchip_python
