#include "tensor.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <limits>

#include "dlpack.hpp"

namespace onchip_python {

namespace {

PyTypeObject* tensor_type = nullptr;

constexpr std::array<DTypeRow, 8> kDTypes = {{
    {"float64", ONCHIP_FLOAT64, 8},
    {"float32", ONCHIP_FLOAT32, 4},
    {"float16", ONCHIP_FLOAT16, 2},
    {"bfloat16", ONCHIP_BFLOAT16, 2},
    {"float8_e4m3", ONCHIP_FLOAT8_E4M3, 1},
    {"int64", ONCHIP_INT64, 8},
    {"int32", ONCHIP_INT32, 4},
    {"bool", ONCHIP_BOOL, 1},
}};

// Shapes without data get addresses that no process has memory at, each its own range, so that
// they overlap nothing.
constexpr std::uint64_t kFirstAddress = std::uint64_t{1} << 56;
constexpr std::uint64_t kLastAddress = std::uint64_t{1} << 57;
constexpr std::uint64_t kPage = 4096;

constexpr std::int64_t kCopyAlignment = 64;

const DTypeRow& dtype_of(const TensorObject* self) {
  return *std::find_if(kDTypes.begin(), kDTypes.end(),
                       [&](const DTypeRow& row) { return row.dtype == self->view.dtype; });
}

bool is_empty(const onchip_tensor& view) {
  return std::any_of(view.shape, view.shape + view.rank, [](std::int64_t n) { return n == 0; });
}

std::int64_t saturating_product(std::int64_t a, std::int64_t b) {
  std::int64_t product = 0;
  return __builtin_mul_overflow(a, b, &product) ? std::numeric_limits<std::int64_t>::max()
                                                : product;
}

void release_owned(TensorObject* self) {
  void* owned = std::exchange(self->owned, nullptr);
  switch (std::exchange(self->owner, Owner::kNone)) {
    case Owner::kNone:
      break;
    case Owner::kManaged: {
      auto* managed = static_cast<dlpack::ManagedTensor*>(owned);
      if (managed->deleter != nullptr) managed->deleter(managed);
      break;
    }
    case Owner::kManagedVersioned: {
      auto* managed = static_cast<dlpack::ManagedTensorVersioned*>(owned);
      if (managed->deleter != nullptr) managed->deleter(managed);
      break;
    }
    case Owner::kBuffer:
      PyBuffer_Release(static_cast<Py_buffer*>(owned));
      PyMem_Free(owned);
      break;
    case Owner::kMemory:
      PyMem_Free(owned);
      break;
  }
}

void tensor_dealloc(PyObject* object) {
  {
    const ErrorAside aside;  // a deleter may run Python code
    release_owned(reinterpret_cast<TensorObject*>(object));
  }
  auto* type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  PyObject_Free(object);
  Py_DECREF(type);
}

PyObject* int_tuple(const std::int64_t* values, std::int32_t count) {
  return guarded<>(static_cast<PyObject*>(nullptr), [&] {
    Ref tuple = checked(PyTuple_New(count));
    for (std::int32_t i = 0; i < count; ++i) {
      check(PyTuple_SetItem(tuple.get(), i, checked(PyLong_FromLongLong(values[i])).release()));
    }
    return tuple.release();
  });
}

void copy_elements(const TensorObject* from, const TensorObject* to, std::int64_t size) {
  const onchip_tensor& view = from->view;
  const int inner = view.rank - 1;
  const std::int64_t run = inner < 0 ? 1 : view.shape[inner];
  const std::int64_t step = inner < 0 ? 0 : from->byte_strides[inner];
  std::array<std::int64_t, ONCHIP_MAX_RANK> index{};
  const auto* source = static_cast<const std::byte*>(view.data);
  auto* target = static_cast<std::byte*>(to->view.data);
  for (;;) {
    for (std::int64_t i = 0; i < run; ++i) {
      std::memcpy(target + i * size, source + i * step, static_cast<std::size_t>(size));
    }
    int axis = inner - 1;
    for (; axis >= 0; --axis) {
      // An axis that repeats its source stays one in the copy.
      const std::int64_t extent = to->byte_strides[axis] == 0 ? 1 : view.shape[axis];
      if (++index[static_cast<std::size_t>(axis)] < extent) {
        source += from->byte_strides[axis];
        target += to->byte_strides[axis];
        break;
      }
      source -= (extent - 1) * from->byte_strides[axis];
      target -= (extent - 1) * to->byte_strides[axis];
      index[static_cast<std::size_t>(axis)] = 0;
    }
    if (axis < 0) return;
  }
}

// A row-major copy in host memory. Outer axes of stride 0 stay so: a broadcast array costs no more
// than what it repeats.
PyObject* tensor_contiguous(PyObject* object, PyObject*) {
  return guarded<>(static_cast<PyObject*>(nullptr), [&] {
    auto* self = reinterpret_cast<TensorObject*>(object);
    if (self->layout_problem[0] == '\0') return Ref::borrow(object).release();
    if (self->view.device_type != ONCHIP_DEVICE_CPU) {
      PyErr_SetString(PyExc_TypeError, "contiguous() copies host memory only");
      throw PythonError{};
    }
    const std::int64_t size = dtype_of(self).size;
    Ref result = new_tensor();
    TensorObject* copy = as_tensor(result);
    copy->view = self->view;
    std::int64_t bytes = size;
    for (int axis = self->view.rank - 1; axis >= 0; --axis) {
      const bool repeats = axis < self->view.rank - 1 && self->byte_strides[axis] == 0;
      copy->byte_strides[axis] = repeats ? 0 : bytes;
      if (!repeats) bytes = saturating_product(bytes, self->view.shape[axis]);
    }
    void* memory = bytes > std::numeric_limits<std::int64_t>::max() - kCopyAlignment
                       ? nullptr
                       : PyMem_Malloc(static_cast<std::size_t>(bytes + kCopyAlignment));
    if (memory == nullptr) {
      PyErr_NoMemory();
      throw PythonError{};
    }
    copy->owner = Owner::kMemory;
    copy->owned = memory;
    const auto address = reinterpret_cast<std::uintptr_t>(memory);
    copy->view.data = static_cast<std::byte*>(memory) + (kCopyAlignment - address % kCopyAlignment);
    describe_layout(copy);
    {
      const WithoutGil others_run;
      copy_elements(self, copy, size);
    }
    return result.release();
  });
}

PyObject* get_shape(PyObject* object, void*) {
  const auto* self = reinterpret_cast<TensorObject*>(object);
  return int_tuple(self->view.shape, self->view.rank);
}

PyObject* get_strides(PyObject* object, void*) {
  const auto* self = reinterpret_cast<TensorObject*>(object);
  return int_tuple(self->byte_strides, self->view.rank);
}

PyObject* get_dtype(PyObject* object, void*) {
  return PyUnicode_FromString(dtype_of(reinterpret_cast<TensorObject*>(object)).name);
}

PyObject* get_device(PyObject* object, void*) {
  const auto* self = reinterpret_cast<TensorObject*>(object);
  return Py_BuildValue("(ii)", self->view.device_type, self->view.device_id);
}

PyObject* get_address(PyObject* object, void*) {
  const auto* self = reinterpret_cast<TensorObject*>(object);
  return PyLong_FromVoidPtr(self->view.data);
}

PyObject* get_has_data(PyObject* object, void*) {
  return PyBool_FromLong(reinterpret_cast<TensorObject*>(object)->has_data);
}

PyObject* get_layout_problem(PyObject* object, void*) {
  const auto* self = reinterpret_cast<TensorObject*>(object);
  if (self->layout_problem[0] == '\0') Py_RETURN_NONE;
  return PyUnicode_FromString(self->layout_problem);
}

std::array<PyGetSetDef, 8> getters = {{
    {"shape", get_shape, nullptr, "Extents.", nullptr},
    {"byte_strides", get_strides, nullptr, "Strides in bytes.", nullptr},
    {"dtype", get_dtype, nullptr, "Name of the element type.", nullptr},
    {"device", get_device, nullptr, "(DLPack device type, ordinal): (1, 0) is the CPU.", nullptr},
    {"address", get_address, nullptr, "Of the first element.", nullptr},
    {"has_data", get_has_data, nullptr, "False for a shape alone.", nullptr},
    {"layout_problem", get_layout_problem, nullptr,
     "Why the C library would not take this layout, or None.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
}};

std::array<PyMethodDef, 2> methods = {{
    {"contiguous", tensor_contiguous, METH_NOARGS,
     "contiguous($self, /)\n--\n\nItself where the layout is fine, else a copy in host memory."},
    {nullptr, nullptr, 0, nullptr},
}};

std::uint64_t next_address(std::int64_t bytes) {
  static std::uint64_t next = kFirstAddress;  // guarded by the GIL
  const std::uint64_t room = kLastAddress - kFirstAddress;
  const std::uint64_t length = std::min(static_cast<std::uint64_t>(bytes) / kPage * kPage, room);
  if (kLastAddress - next < length + kPage) next = kFirstAddress;
  const std::uint64_t address = next;
  next += length + kPage;
  return address;
}

}  // namespace

const char* dtype_names() {
  return "float64, float32, float16, bfloat16, float8_e4m3, int64, int32 or bool";
}

const DTypeRow* find_dtype(std::string_view name) {
  const auto* row = std::find_if(kDTypes.begin(), kDTypes.end(),
                                 [&](const DTypeRow& candidate) { return name == candidate.name; });
  return row == kDTypes.end() ? nullptr : row;
}

Ref new_tensor() {
  auto* self = PyObject_New(TensorObject, tensor_type);
  if (self == nullptr) throw PythonError{};
  self->view = onchip_tensor{};
  std::fill(std::begin(self->byte_strides), std::end(self->byte_strides), 0);
  self->owner = Owner::kNone;
  self->owned = nullptr;
  self->has_data = true;
  self->layout_problem[0] = '\0';
  return Ref::steal(reinterpret_cast<PyObject*>(self));
}

TensorObject* as_tensor(PyObject* object) {
  return Py_IS_TYPE(object, tensor_type) ? reinterpret_cast<TensorObject*>(object) : nullptr;
}

void set_rank(const Place& place, TensorObject* self, std::int64_t rank) {
  if (rank > ONCHIP_MAX_RANK) {
    refuse(place, "rank " + std::to_string(rank),
           "rank " + std::to_string(ONCHIP_MAX_RANK) + " at most");
  }
  self->view.rank = static_cast<std::int32_t>(rank);
}

void set_row_major(TensorObject* self) {
  const std::int64_t size = dtype_of(self).size;
  std::int64_t stride = 1;
  for (int axis = self->view.rank - 1; axis >= 0; --axis) {
    // As describe_layout does: a plan compares strides.
    self->view.strides[axis] = self->view.shape[axis] == 1 ? 1 : stride;
    self->byte_strides[axis] = saturating_product(self->view.strides[axis], size);
    stride = saturating_product(stride, std::max<std::int64_t>(self->view.shape[axis], 1));
  }
}

void describe_layout(TensorObject* self) {
  onchip_tensor& view = self->view;
  if (is_empty(view)) {
    set_row_major(self);
    return;
  }
  const std::int64_t size = dtype_of(self).size;
  char* problem = self->layout_problem;
  const auto say = [&](const char* format, std::int64_t value) {
    if (*problem != '\0') return;
    std::snprintf(problem, sizeof(self->layout_problem), format, static_cast<long long>(value));
  };
  for (int axis = view.rank - 1; axis >= 0; --axis) {
    // The stride of an axis with one element is never used, and producers leave anything there.
    if (view.shape[axis] == 1) self->byte_strides[axis] = size;
    const std::int64_t stride = self->byte_strides[axis];
    view.strides[axis] = stride / size;
    if (stride % size != 0) {
      say("stride of %lld bytes", stride);
    } else if (axis == view.rank - 1 && stride != size) {
      say("innermost stride %lld", stride / size);
    }
  }
  if (reinterpret_cast<std::uintptr_t>(view.data) % static_cast<std::uintptr_t>(size) != 0) {
    say("address not a multiple of %lld", size);
  }
}

PyObject* make_tensor_type() {
  std::array<PyType_Slot, 5> slots = {{
      {Py_tp_dealloc, reinterpret_cast<void*>(tensor_dealloc)},
      {Py_tp_getset, getters.data()},
      {Py_tp_methods, methods.data()},
      {Py_tp_doc, const_cast<char*>("A strided view of an array's memory, kept alive.")},
      {0, nullptr},
  }};
  PyType_Spec spec = {"onchip._native.Tensor", sizeof(TensorObject), 0,
                      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots.data()};
  PyObject* type = checked(PyType_FromSpec(&spec)).release();
  tensor_type = reinterpret_cast<PyTypeObject*>(type);
  return type;
}

PyObject* tensor_of_shape(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return guarded<>(static_cast<PyObject*>(nullptr), [&] {
    if (count != 6) {
      PyErr_SetString(PyExc_TypeError, "shape() takes 6 arguments");
      throw PythonError{};
    }
    const Place place{utf8(args[0]), utf8(args[1])};
    Ref result = new_tensor();
    TensorObject* self = as_tensor(result);
    self->has_data = false;
    const Ref extents = checked(PySequence_Tuple(args[2]));
    set_rank(place, self, PyTuple_Size(extents.get()));
    for (std::int32_t i = 0; i < self->view.rank; ++i) {
      self->view.shape[i] = PyLong_AsLongLong(PyTuple_GetItem(extents.get(), i));
      if (PyErr_Occurred() != nullptr) throw PythonError{};
      if (self->view.shape[i] < 0) refuse(place, "a negative extent", "extents of 0 or more");
    }
    const DTypeRow* row = find_dtype(utf8(args[3]));
    if (row == nullptr) refuse(place, "dtype " + describe_value(args[3]), dtype_names());
    self->view.dtype = row->dtype;
    self->view.device_type = static_cast<std::int32_t>(PyLong_AsLong(args[4]));
    self->view.device_id = static_cast<std::int32_t>(PyLong_AsLong(args[5]));
    if (PyErr_Occurred() != nullptr) throw PythonError{};
    set_row_major(self);
    std::int64_t bytes = row->size;
    for (std::int32_t i = 0; i < self->view.rank; ++i) {
      bytes = saturating_product(bytes, self->view.shape[i]);
    }
    self->view.data = reinterpret_cast<void*>(next_address(bytes));
    return result.release();
  });
}

}  // namespace onchip_python
