#include "cast.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>

#include "dlpack.hpp"
#include "tensor.hpp"

namespace onchip_python {

namespace {

// A cast as asked for by the caller.
struct Request {
  Place place;
  PyObject* array;
  const DTypeRow* reinterpreted;  // read the bytes as this dtype; NULL = as what they are
  bool writable;
  std::uint64_t stream;  // where the memory will be used; 0 = the default stream
};

// What one element is, whether onchip has a number for it or not.
struct Element {
  std::int64_t size;
  std::string name;
};

Element element_of(dlpack::DataType type) {
  std::string name;
  switch (type.code) {
    case dlpack::kInt:
      name = "int";
      break;
    case dlpack::kUInt:
      name = "uint";
      break;
    case dlpack::kFloat:
      name = "float";
      break;
    case dlpack::kBfloat:
      name = "bfloat";
      break;
    case dlpack::kComplex:
      name = "complex";
      break;
    case dlpack::kBool:
      name = "bool";
      break;
    case dlpack::kFloat8E4m3Fn:
      name = "float8_e4m3";
      break;
    default:
      name = "DLPack code " + std::to_string(type.code) + " with bits ";
      break;
  }
  const bool named_whole = type.code == dlpack::kBool || type.code == dlpack::kFloat8E4m3Fn;
  if (!named_whole || type.bits != 8) name += std::to_string(type.bits);
  if (type.lanes != 1) name += " x " + std::to_string(type.lanes);
  return {(std::int64_t{type.bits} * type.lanes + 7) / 8, name};
}

// PEP 3118: an optional byte order, then one letter.
Element element_of(const Py_buffer& buffer) {
  const std::string_view format = buffer.format == nullptr ? "B" : buffer.format;
  constexpr std::string_view kNativeOrder =
      __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ ? "@=<" : "@=>!";
  std::string_view letter = format;
  if (letter.size() == 2 && kNativeOrder.find(letter[0]) != std::string_view::npos) {
    letter.remove_prefix(1);
  }
  const std::string bits = std::to_string(8 * buffer.itemsize);
  if (letter == "?") return {buffer.itemsize, "bool"};
  if (letter.size() == 1 && std::string_view("dfe").find(letter) != std::string_view::npos) {
    return {buffer.itemsize, "float" + bits};
  }
  if (letter.size() == 1 && std::string_view("bhilqn").find(letter) != std::string_view::npos) {
    return {buffer.itemsize, "int" + bits};
  }
  if (letter.size() == 1 && std::string_view("BHILQN").find(letter) != std::string_view::npos) {
    return {buffer.itemsize, "uint" + bits};
  }
  return {buffer.itemsize, "of buffer format '" + std::string(format) + "'"};
}

void set_dtype(const Request& request, TensorObject* self, const Element& element) {
  const DTypeRow* row = request.reinterpreted;
  if (row == nullptr) {
    row = find_dtype(element.name);
    if (row == nullptr) refuse(request.place, "dtype " + element.name, dtype_names());
  } else if (row->size != element.size) {
    refuse(request.place, "elements of " + std::to_string(element.size) + " bytes",
           "the " + std::to_string(row->size) + " bytes of " + row->name);
  }
  self->view.dtype = row->dtype;
}

void set_device(const Request& request, TensorObject* self, dlpack::Device device) {
  switch (device.type) {
    case dlpack::kCpu:
    case dlpack::kCudaHost:
      self->view.device_type = ONCHIP_DEVICE_CPU;
      self->view.device_id = 0;
      return;
    case dlpack::kCuda:
    case dlpack::kCudaManaged:
      self->view.device_type = ONCHIP_DEVICE_CUDA;
      self->view.device_id = device.id;
      return;
    default:
      refuse(request.place, "memory of DLPack device type " + std::to_string(device.type),
             "host memory (types 1 and 3) or a CUDA GPU's (2 and 13)");
  }
}

void require_writable(const Request& request, bool read_only) {
  if (request.writable && read_only) {
    refuse(request.place, "a read-only array", "memory that may be written");
  }
}

void describe(const Request& request, TensorObject* self, const dlpack::Tensor& tensor) {
  set_rank(request.place, self, tensor.ndim);
  set_device(request, self, tensor.device);
  const Element element = element_of(tensor.dtype);
  set_dtype(request, self, element);
  self->view.data = static_cast<std::byte*>(tensor.data) + tensor.byte_offset;
  std::copy_n(tensor.shape, tensor.ndim, self->view.shape);
  if (tensor.strides == nullptr) {
    set_row_major(self);
  } else {
    for (std::int32_t axis = 0; axis < tensor.ndim; ++axis) {
      self->byte_strides[axis] = tensor.strides[axis] * element.size;
    }
  }
  describe_layout(self);
}

void describe(const Request& request, TensorObject* self, const Py_buffer& buffer) {
  set_rank(request.place, self, buffer.ndim);
  set_device(request, self, {dlpack::kCpu, 0});
  set_dtype(request, self, element_of(buffer));
  self->view.data = buffer.buf;
  std::copy_n(buffer.shape, buffer.ndim, self->view.shape);
  std::copy_n(buffer.strides, buffer.ndim, self->byte_strides);
  describe_layout(self);
}

Ref own(const Request& request, Ref tensor, dlpack::ManagedTensorVersioned* managed) {
  TensorObject* self = as_tensor(tensor);
  self->owner = Owner::kManagedVersioned;
  self->owned = managed;
  if (managed->version.major != dlpack::kMajor) {
    refuse(request.place, "DLPack version " + std::to_string(managed->version.major) + ".x",
           "version 1.x");
  }
  require_writable(request, (managed->flags & dlpack::kReadOnly) != 0);
  describe(request, self, managed->tensor);
  return tensor;
}

Ref own(const Request& request, Ref tensor, dlpack::ManagedTensor* managed) {
  TensorObject* self = as_tensor(tensor);
  self->owner = Owner::kManaged;
  self->owned = managed;
  describe(request, self, managed->tensor);
  return tensor;
}

// ---- the C exchange interface -------------------------------------------------------------------

// The interface of an array type, NULL if it has none that this binding reads. Looked up once a
// type; the cache holds the types it knows, so that an address cannot come to mean another type.
const dlpack::ExchangeApi* exchange_api(PyObject* type) {
  struct Entry {
    PyObject* type = nullptr;
    const dlpack::ExchangeApi* api = nullptr;
  };
  static std::array<Entry, 8> cache;  // guarded by the GIL
  static std::size_t next = 0;
  for (const Entry& entry : cache) {
    if (entry.type == type) return entry.api;
  }
  const dlpack::ExchangeApi* api = nullptr;
  PyObject* found = PyObject_GetAttrString(type, "__dlpack_c_exchange_api__");
  if (found == nullptr) {
    if (PyErr_ExceptionMatches(PyExc_AttributeError) == 0) throw PythonError{};
    PyErr_Clear();
  } else {
    const Ref capsule = Ref::steal(found);
    if (PyCapsule_IsValid(found, "dlpack_exchange_api") != 0) {
      api = static_cast<const dlpack::ExchangeApi*>(
          PyCapsule_GetPointer(found, "dlpack_exchange_api"));
      while (api != nullptr && api->version.major != dlpack::kMajor) api = api->previous;
    }
  }
  Py_INCREF(type);
  Entry& entry = cache[next];
  next = (next + 1) % cache.size();
  PyObject* forgotten = std::exchange(entry.type, type);
  entry.api = api;
  Py_XDECREF(forgotten);
  return api;
}

// Empty where the interface is absent, refuses the array, or would leave the array's last writes on
// another stream than the one it will be used on.
Ref from_exchange(const Request& request) {
  const dlpack::ExchangeApi* api =
      exchange_api(reinterpret_cast<PyObject*>(Py_TYPE(request.array)));
  if (api == nullptr || api->managed_tensor_from_object == nullptr) return {};
  Ref tensor = new_tensor();
  dlpack::ManagedTensorVersioned* managed = nullptr;
  if (api->managed_tensor_from_object(request.array, &managed) != 0) {
    if (PyErr_Occurred() != nullptr && PyErr_ExceptionMatches(PyExc_Exception) == 0) {
      throw PythonError{};
    }
    PyErr_Clear();  // __dlpack__ gives the reason
    return {};
  }
  tensor = own(request, std::move(tensor), managed);
  const onchip_tensor& view = as_tensor(tensor)->view;
  if (view.device_type == ONCHIP_DEVICE_CUDA) {
    void* current = nullptr;
    if (api->current_work_stream == nullptr ||
        api->current_work_stream(dlpack::kCuda, view.device_id, &current) != 0) {
      PyErr_Clear();
      return {};
    }
    if (reinterpret_cast<std::uintptr_t>(current) != request.stream) return {};
  }
  return tensor;
}

// ---- __dlpack__ ---------------------------------------------------------------------------------

// Takes what a capsule holds; the consumer's part is to rename it.
Ref take_capsule(const Request& request, PyObject* capsule) {
  Ref tensor = new_tensor();
  if (PyCapsule_IsValid(capsule, "dltensor_versioned") != 0) {
    auto* managed = static_cast<dlpack::ManagedTensorVersioned*>(
        PyCapsule_GetPointer(capsule, "dltensor_versioned"));
    check(PyCapsule_SetName(capsule, "used_dltensor_versioned"));
    return own(request, std::move(tensor), managed);
  }
  if (PyCapsule_IsValid(capsule, "dltensor") != 0) {
    auto* managed = static_cast<dlpack::ManagedTensor*>(PyCapsule_GetPointer(capsule, "dltensor"));
    check(PyCapsule_SetName(capsule, "used_dltensor"));
    return own(request, std::move(tensor), managed);
  }
  refuse(request.place, "an array whose __dlpack__ returned " + describe_value(capsule),
         "a DLPack capsule");
}

std::int64_t device_type_of(PyObject* array) {
  const Ref method = checked(PyObject_GetAttrString(array, "__dlpack_device__"));
  const Ref device = checked(PyObject_CallFunctionObjArgs(method.get(), nullptr));
  const Ref type = checked(PySequence_GetItem(device.get(), 0));
  const Ref number = checked(PyNumber_Long(type.get()));  // some producers return an enum
  const long long value = PyLong_AsLongLong(number.get());
  if (PyErr_Occurred() != nullptr) throw PythonError{};
  return value;
}

Ref call_dlpack(const Request& request, PyObject* method) {
  const Ref no_arguments = checked(PyTuple_New(0));
  const Ref options = checked(PyDict_New());
  const std::int64_t device = device_type_of(request.array);
  if (device == dlpack::kCuda || device == dlpack::kCudaManaged) {
    // The producer makes this stream wait for its own work. 1 names CUDA's default stream.
    const Ref stream =
        checked(PyLong_FromUnsignedLongLong(request.stream == 0 ? 1 : request.stream));
    check(PyDict_SetItemString(options.get(), "stream", stream.get()));
  }
  const Ref version = checked(Py_BuildValue("(II)", dlpack::kMajor, dlpack::kMinor));
  check(PyDict_SetItemString(options.get(), "max_version", version.get()));
  PyObject* capsule = PyObject_Call(method, no_arguments.get(), options.get());
  if (capsule == nullptr && PyErr_ExceptionMatches(PyExc_TypeError) != 0) {
    PyErr_Clear();  // a producer from before DLPack 1.0 does not know max_version
    check(PyDict_DelItemString(options.get(), "max_version"));
    capsule = PyObject_Call(method, no_arguments.get(), options.get());
  }
  return checked(capsule);
}

// "TypeName: text" of the error that is set, which it clears.
std::string take_error() {
  PyObject* type = nullptr;
  PyObject* value = nullptr;
  PyObject* traceback = nullptr;
  PyErr_Fetch(&type, &value, &traceback);
  PyErr_NormalizeException(&type, &value, &traceback);
  const Ref owned_type = Ref::steal(type);
  const Ref owned_value = Ref::steal(value);
  const Ref owned_traceback = Ref::steal(traceback);
  const Ref name = checked(PyType_GetName(reinterpret_cast<PyTypeObject*>(type)));
  const Ref text = checked(PyObject_Str(value));
  return std::string(utf8(name.get())) + ": " + utf8(text.get());
}

// Empty where there is no __dlpack__, or it raised: then `reason` says what.
Ref from_dlpack(const Request& request, std::string& reason) {
  PyObject* found = PyObject_GetAttrString(request.array, "__dlpack__");
  if (found == nullptr) {
    if (PyErr_ExceptionMatches(PyExc_AttributeError) == 0) throw PythonError{};
    PyErr_Clear();
    return {};
  }
  const Ref method = Ref::steal(found);
  Ref capsule;
  try {
    capsule = call_dlpack(request, method.get());
  } catch (const PythonError&) {
    const bool passes_through = PyErr_ExceptionMatches(PyExc_Exception) == 0 ||
                                PyErr_ExceptionMatches(PyExc_MemoryError) != 0;
    if (passes_through) throw;
    reason = take_error();
    return {};
  }
  return take_capsule(request, capsule.get());
}

// ---- the buffer protocol ------------------------------------------------------------------------

Ref from_buffer(const Request& request) {
  if (PyObject_CheckBuffer(request.array) == 0) return {};
  Ref tensor = new_tensor();
  TensorObject* self = as_tensor(tensor);
  auto* buffer = static_cast<Py_buffer*>(PyMem_Malloc(sizeof(Py_buffer)));
  if (buffer == nullptr) {
    PyErr_NoMemory();
    throw PythonError{};
  }
  if (PyObject_GetBuffer(request.array, buffer, PyBUF_FORMAT | PyBUF_STRIDES) != 0) {
    PyMem_Free(buffer);
    if (PyErr_ExceptionMatches(PyExc_Exception) == 0) throw PythonError{};
    PyErr_Clear();
    return {};
  }
  self->owner = Owner::kBuffer;
  self->owned = buffer;
  require_writable(request, buffer->readonly != 0);
  describe(request, self, *buffer);
  return tensor;
}

Ref cast(const Request& request) {
  if (as_tensor(request.array) != nullptr) return Ref::borrow(request.array);
  if (Ref tensor = from_exchange(request)) return tensor;
  std::string reason;
  if (Ref tensor = from_dlpack(request, reason)) return tensor;
  if (Ref tensor = from_buffer(request)) return tensor;
  std::string got = describe_value(request.array);
  if (!reason.empty()) got += " that does not export its memory (" + reason + ")";
  refuse(request.place, got, "an array (NumPy, PyTorch, CuPy, JAX or any other with DLPack)");
}

}  // namespace

PyObject* tensor_of_array(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return guarded<>(static_cast<PyObject*>(nullptr), [&] {
    if (count != 6) {
      PyErr_SetString(PyExc_TypeError, "tensor() takes 6 arguments");
      throw PythonError{};
    }
    Request request{{utf8(args[0]), utf8(args[1])}, args[2], nullptr, args[4] == Py_True, 0};
    if (args[3] != Py_None) {
      request.reinterpreted = find_dtype(utf8(args[3]));
      if (request.reinterpreted == nullptr) {
        refuse(request.place, "dtype " + describe_value(args[3]), dtype_names());
      }
    }
    request.stream = PyLong_AsUnsignedLongLong(args[5]);
    if (PyErr_Occurred() != nullptr) throw PythonError{};
    return cast(request).release();
  });
}

}  // namespace onchip_python
