// The binary interface of DLPack 1.x (github.com/dmlc/dlpack): what array libraries hand over. Only
// the layouts that this binding reads are declared.
#pragma once

#include <cstddef>
#include <cstdint>

namespace onchip_python::dlpack {

constexpr std::uint32_t kMajor = 1;
constexpr std::uint32_t kMinor = 3;

struct Version {
  std::uint32_t major;
  std::uint32_t minor;  // newer minor versions only add enumerators
};

enum DeviceType : std::int32_t {
  kCpu = 1,
  kCuda = 2,
  kCudaHost = 3,
  kRocm = 10,
  kCudaManaged = 13
};

struct Device {
  std::int32_t type;
  std::int32_t id;
};

enum TypeCode : std::uint8_t {
  kInt = 0,
  kUInt = 1,
  kFloat = 2,
  kBfloat = 4,
  kComplex = 5,
  kBool = 6,
  kFloat8E4m3Fn = 10,
};

struct DataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  std::int32_t ndim;
  DataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // in elements; NULL = row-major
  std::uint64_t byte_offset;
};

// Capsule "dltensor".
struct ManagedTensor {
  Tensor tensor;
  void* context;
  void (*deleter)(ManagedTensor*);
};

constexpr std::uint64_t kReadOnly = 1;

// Capsule "dltensor_versioned". With a foreign major version only `deleter` may be used.
struct ManagedTensorVersioned {
  Version version;
  void* context;
  void (*deleter)(ManagedTensorVersioned*);
  std::uint64_t flags;
  Tensor tensor;
};

// Capsule "dlpack_exchange_api", the attribute __dlpack_c_exchange_api__ of an array type; lives as
// long as the process. Functions return 0, or -1 with Python's error set.
struct ExchangeApi {
  Version version;
  ExchangeApi* previous;  // the same table of an older major version
  void* managed_tensor_allocator;
  int (*managed_tensor_from_object)(void* object, ManagedTensorVersioned** out);
  void* managed_tensor_to_object;
  int (*tensor_from_object)(void* object, Tensor* out);  // which keeps nothing alive
  int (*current_work_stream)(std::int32_t device_type, std::int32_t device_id, void** stream);
};
static_assert(sizeof(ExchangeApi) == 7 * sizeof(void*));

}  // namespace onchip_python::dlpack
