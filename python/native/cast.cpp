#include "cast.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include "dlpack.hpp"
#include "tensor.hpp"

namespace onchip_python {

namespace {

// A cast as asked for by the caller.
struct Request {
  Place place;
  nb::handle array;
  const DTypeRow* reinterpreted;  // read the bytes as this dtype; NULL = as what they are
  bool writable;
  std::uint64_t stream;  // where the memory will be used; 0 = the default stream
};

std::string name_of(dlpack::DataType type) {
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
      name = "float8_e4m3 of bits ";
      break;
    default:
      name = "DLPack code " + std::to_string(type.code) + " with bits ";
      break;
  }
  name += std::to_string(type.bits);
  if (type.lanes != 1) name += " x " + std::to_string(type.lanes);
  return name;
}

// PEP 3118: an optional byte order, then one letter.
std::string name_of(const Py_buffer& buffer) {
  const std::string_view format = buffer.format == nullptr ? "B" : buffer.format;
  constexpr std::string_view kNativeOrder =
      __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ ? "@=<" : "@=>!";
  std::string_view letter = format;
  if (letter.size() == 2 && kNativeOrder.find(letter[0]) != std::string_view::npos) {
    letter.remove_prefix(1);
  }
  if (letter == "?") return "bool";
  const std::string bits = std::to_string(8 * buffer.itemsize);
  const auto is_one_of = [&](std::string_view letters) {
    return letter.size() == 1 && letters.find(letter) != std::string_view::npos;
  };
  if (is_one_of("dfe")) return "float" + bits;
  if (is_one_of("bhilqn")) return "int" + bits;
  if (is_one_of("BHILQN")) return "uint" + bits;
  return "of buffer format '" + std::string(format) + "'";
}

// `exported`: what the array's own elements are; NULL if onchip has no number for that.
template <typename Source>
void set_dtype(const Request& request, Tensor& result, const DTypeRow* exported, std::int64_t size,
               const Source& source) {
  const DTypeRow* row = request.reinterpreted == nullptr ? exported : request.reinterpreted;
  if (row == nullptr)
    refuse(request.place, "dtype " + name_of(source), dtypes_wanted(request.place));
  if (row->size != size) {
    refuse(request.place, "elements of " + std::to_string(size) + " bytes",
           "the " + std::to_string(row->size) + " bytes of " + row->name);
  }
  result.view.dtype = row->dtype;
}

void set_device(const Request& request, Tensor& result, dlpack::Device device) {
  switch (device.type) {
    case dlpack::kCpu:
    case dlpack::kCudaHost:
      result.view.device_type = ONCHIP_DEVICE_CPU;
      result.view.device_id = 0;
      return;
    case dlpack::kCuda:
    case dlpack::kCudaManaged:
      result.view.device_type = ONCHIP_DEVICE_CUDA;
      result.view.device_id = device.id;
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

void describe(const Request& request, Tensor& result, const dlpack::Tensor& tensor) {
  result.set_rank(request.place, tensor.ndim);
  set_device(request, result, tensor.device);
  const std::int64_t size = (std::int64_t{tensor.dtype.bits} * tensor.dtype.lanes + 7) / 8;
  set_dtype(request, result, find_dtype(tensor.dtype), size, tensor.dtype);
  result.view.data = static_cast<std::byte*>(tensor.data) + tensor.byte_offset;
  std::copy_n(tensor.shape, tensor.ndim, result.view.shape);
  if (tensor.strides == nullptr) {
    result.set_row_major();
  } else {
    for (std::int32_t axis = 0; axis < tensor.ndim; ++axis) {
      result.byte_strides[axis] = tensor.strides[axis] * size;
    }
  }
  result.set_strides();
}

void describe(const Request& request, Tensor& result, const Py_buffer& buffer) {
  result.set_rank(request.place, buffer.ndim);
  set_device(request, result, {dlpack::kCpu, 0});
  set_dtype(request, result, find_dtype(name_of(buffer)), buffer.itemsize, buffer);
  result.view.data = buffer.buf;
  std::copy_n(buffer.shape, buffer.ndim, result.view.shape);
  std::copy_n(buffer.strides, buffer.ndim, result.byte_strides);
  result.set_strides();
}

template <typename Managed>
void give_back(void* owned) {
  const nb::error_scope aside;  // the deleter may run Python code
  auto* managed = static_cast<Managed*>(owned);
  if (managed->deleter != nullptr) managed->deleter(managed);
}

template <typename Managed>
std::optional<Tensor> own(const Request& request, Managed* managed) {
  std::optional<Tensor> result(std::in_place);
  result->owner = Owner(managed, give_back<Managed>);
  if constexpr (std::is_same_v<Managed, dlpack::ManagedTensorVersioned>) {
    if (managed->version.major != dlpack::kMajor) {
      refuse(request.place, "DLPack version " + std::to_string(managed->version.major) + ".x",
             "version 1.x");
    }
    require_writable(request, (managed->flags & dlpack::kReadOnly) != 0);
  }
  describe(request, *result, managed->tensor);
  return result;
}

// ---- the C exchange interface -------------------------------------------------------------------

// The interface of an array type, NULL if it has none that this binding reads. Looked up once a
// type; the cache holds the types it knows, so that an address cannot come to mean another type.
const dlpack::ExchangeApi* exchange_api(nb::handle type) {
  constexpr const char* kCapsule = "dlpack_exchange_api";
  struct Entry {
    nb::handle type;
    const dlpack::ExchangeApi* api;
  };
  static std::array<Entry, 8> cache{};  // guarded by the GIL
  static std::size_t next = 0;
  for (const Entry& entry : cache) {
    if (entry.type.is(type)) return entry.api;
  }
  const dlpack::ExchangeApi* api = nullptr;
  const nb::object capsule = nb::getattr(type, "__dlpack_c_exchange_api__", nb::handle());
  if (capsule.is_valid() && PyCapsule_IsValid(capsule.ptr(), kCapsule) != 0) {
    api = static_cast<const dlpack::ExchangeApi*>(nb::borrow<nb::capsule>(capsule).data(kCapsule));
    while (api != nullptr && api->version.major != dlpack::kMajor) api = api->previous;
  }
  type.inc_ref();
  const Entry forgotten = std::exchange(cache[next], {type, api});
  next = (next + 1) % cache.size();
  forgotten.type.dec_ref();
  return api;
}

bool work_stream(const dlpack::ExchangeApi& api, std::int32_t device_id, std::uint64_t& stream) {
  void* current = nullptr;
  if (api.current_work_stream == nullptr ||
      api.current_work_stream(dlpack::kCuda, device_id, &current) != 0) {
    drop_error();
    return false;
  }
  stream = reinterpret_cast<std::uintptr_t>(current);
  return true;
}

// Empty where the interface is absent, refuses the array, or would leave the array's last writes on
// another stream than the one it will be used on.
std::optional<Tensor> from_exchange(const Request& request) {
  const dlpack::ExchangeApi* api = exchange_api(request.array.type());
  if (api == nullptr || api->managed_tensor_from_object == nullptr) return {};
  dlpack::ManagedTensorVersioned* managed = nullptr;
  if (api->managed_tensor_from_object(request.array.ptr(), &managed) != 0) {
    drop_error();  // __dlpack__ gives the reason
    return {};
  }
  std::optional<Tensor> result = own(request, managed);
  if (result->view.device_type == ONCHIP_DEVICE_CUDA) {
    std::uint64_t current = 0;
    if (!work_stream(*api, result->view.device_id, current) || current != request.stream) return {};
  }
  return result;
}

// ---- __dlpack__ ---------------------------------------------------------------------------------

// Takes what a capsule of that name holds; the consumer's part is to rename it.
template <typename Managed>
std::optional<Tensor> take(const Request& request, nb::handle capsule, const char* name,
                           const char* used_name) {
  if (PyCapsule_IsValid(capsule.ptr(), name) == 0) return {};
  void* managed = nb::borrow<nb::capsule>(capsule).data(name);
  if (PyCapsule_SetName(capsule.ptr(), used_name) != 0) nb::raise_python_error();
  return own(request, static_cast<Managed*>(managed));
}

nb::object call_dlpack(const Request& request, const nb::object& method) {
  // Some producers return an enumerator.
  const nb::int_ type(request.array.attr("__dlpack_device__")()[0]);
  const bool on_gpu =
      type.equal(nb::int_(int{dlpack::kCuda})) || type.equal(nb::int_(int{dlpack::kCudaManaged}));
  const auto call = [&](auto&&... keywords) {
    if (!on_gpu) return method(keywords...);
    // The producer makes this stream wait for its own work. 1 names CUDA's default stream.
    return method(nb::arg("stream") = request.stream == 0 ? 1 : request.stream, keywords...);
  };
  try {
    return call(nb::arg("max_version") = nb::make_tuple(dlpack::kMajor, dlpack::kMinor));
  } catch (nb::python_error& error) {
    if (!error.matches(PyExc_TypeError)) throw;
  }
  return call();  // a producer from before DLPack 1.0 does not know max_version
}

// Empty where there is no __dlpack__, or it raised: then `reason` says what.
std::optional<Tensor> from_dlpack(const Request& request, std::string& reason) {
  const nb::object method = nb::getattr(request.array, "__dlpack__", nb::handle());
  if (!method.is_valid()) return {};
  nb::object capsule;
  try {
    capsule = call_dlpack(request, method);
  } catch (nb::python_error& error) {
    if (!error.matches(PyExc_Exception) || error.matches(PyExc_MemoryError)) throw;
    reason = utf8(nb::getattr(error.type(), "__name__"));
    reason.append(": ").append(utf8(nb::str(error.value())));
    return {};
  }
  using dlpack::ManagedTensor, dlpack::ManagedTensorVersioned;
  if (auto result = take<ManagedTensorVersioned>(request, capsule, "dltensor_versioned",
                                                 "used_dltensor_versioned")) {
    return result;
  }
  if (auto result = take<ManagedTensor>(request, capsule, "dltensor", "used_dltensor")) {
    return result;
  }
  refuse(request.place, "an array whose __dlpack__ returned " + describe_value(capsule),
         "a DLPack capsule");
}

// ---- the buffer protocol ------------------------------------------------------------------------

std::optional<Tensor> from_buffer(const Request& request) {
  if (PyObject_CheckBuffer(request.array.ptr()) == 0) return {};
  auto buffer = std::make_unique<Py_buffer>();
  if (PyObject_GetBuffer(request.array.ptr(), buffer.get(), PyBUF_FORMAT | PyBUF_STRIDES) != 0) {
    drop_error();
    return {};
  }
  Tensor result;
  result.owner = Owner(buffer.release(), [](void* owned) {
    const nb::error_scope aside;  // the exporter may run Python code
    const std::unique_ptr<Py_buffer> given_back(static_cast<Py_buffer*>(owned));
    PyBuffer_Release(given_back.get());
  });
  const auto* exported = static_cast<const Py_buffer*>(result.owner.get());
  require_writable(request, exported->readonly != 0);
  describe(request, result, *exported);
  return result;
}

nb::object tensor_of_array(const char* op, const char* argument, nb::handle array, nb::handle dtype,
                           bool writable, std::uint64_t stream) {
  Request request{{op, argument}, array, nullptr, writable, stream};
  if (!dtype.is_none()) {
    request.reinterpreted = find_dtype(utf8(dtype));
    if (request.reinterpreted == nullptr) {
      refuse(request.place, "dtype " + describe_value(dtype), dtypes_wanted(request.place));
    }
  }
  if (as_tensor(array) != nullptr) return nb::borrow(array);
  if (auto tensor = from_exchange(request)) return nb::cast(std::move(*tensor));
  std::string reason;
  if (auto tensor = from_dlpack(request, reason)) return nb::cast(std::move(*tensor));
  if (auto tensor = from_buffer(request)) return nb::cast(std::move(*tensor));
  std::string got = describe_value(array);
  if (!reason.empty()) got += " that does not export its memory (" + reason + ")";
  refuse(request.place, got, "an array (NumPy, PyTorch, CuPy, JAX or any other with DLPack)");
}

}  // namespace

bool borrow_memory(const Place& place, nb::handle array, Tensor& result) {
  const dlpack::ExchangeApi* api = exchange_api(array.type());
  if (api == nullptr || api->tensor_from_object == nullptr) return false;
  dlpack::Tensor borrowed{};
  if (api->tensor_from_object(array.ptr(), &borrowed) != 0) {
    drop_error();
    return false;
  }
  describe({place, array, nullptr, false, 0}, result, borrowed);
  return true;
}

bool current_stream(nb::handle array, std::int32_t device_id, std::uint64_t& stream) {
  const dlpack::ExchangeApi* api = exchange_api(array.type());
  return api != nullptr && work_stream(*api, device_id, stream);
}

void bind_cast(nb::module_& module) {
  module.def(
      "tensor", tensor_of_array, nb::arg(), nb::arg(), nb::arg().none(), nb::arg().none(),
      nb::arg(), nb::arg(),
      nb::sig("def tensor(op: str, argument: str, array: object, dtype: str | None, "
              "writable: bool, stream: int, /) -> Tensor"),
      "An array's memory, through the first that works of: the DLPack C exchange interface of its\n"
      "type, `__dlpack__`, the buffer protocol.\n\n"
      "dtype: read the elements' bytes as this one.\n"
      "stream: the CUDA stream that the memory will be used on (0 = the default stream); the\n"
      "producer's pending work is ordered before it.\n"
      "Raises InvalidArgument, naming op and argument.");
}

}  // namespace onchip_python
