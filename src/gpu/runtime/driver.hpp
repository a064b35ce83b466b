// The CUDA driver, opened at run time: the entry points used, devices, and the context to work in.
// Declarations are the project's own; the library links nothing of CUDA.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace onchip::gpu {

// ---- the driver's types, as its ABI fixes them

using CuResult = std::int32_t;
using CuDevice = std::int32_t;
using CuDevicePointer = std::uint64_t;
using CuContext = struct CuContextObject*;
using CuModule = struct CuModuleObject*;
using CuFunction = struct CuFunctionObject*;
using CuStream = struct CuStreamObject*;

inline constexpr CuResult kCuSuccess = 0;
inline constexpr CuResult kCuOutOfMemory = 2;
inline constexpr CuResult kCuNoDevice = 100;
inline constexpr CuResult kCuInvalidImage = 200;
inline constexpr CuResult kCuNoBinaryForGpu = 209;

enum class CuDeviceAttribute : std::int32_t {
  multiprocessor_count = 16,
  l2_cache_size = 38,
  compute_capability_major = 75,
  compute_capability_minor = 76,
  max_shared_memory_per_multiprocessor = 81,
  max_shared_memory_per_block_optin = 97,
};

enum class CuFunctionAttribute : std::int32_t { max_dynamic_shared_size_bytes = 8 };

enum class CuCaptureMode : std::int32_t { global = 0, thread_local_ = 1, relaxed = 2 };
enum class CuCaptureStatus : std::int32_t { none = 0, active = 1, invalidated = 2 };

struct CuLaunchConfig {
  std::uint32_t grid_x, grid_y, grid_z;
  std::uint32_t block_x, block_y, block_z;
  std::uint32_t dynamic_shared_bytes;
  CuStream stream;
  void* attributes;
  std::uint32_t num_attributes;
};
static_assert(sizeof(void*) == 8 && sizeof(CuLaunchConfig) == 56);

struct TensorMap;

// name, CUDA version whose signature is meant, parameters
#define ONCHIP_DRIVER_FUNCTIONS(X)                                                         \
  X(cuInit, 2000, (std::uint32_t flags))                                                   \
  X(cuDriverGetVersion, 2020, (std::int32_t* version))                                     \
  X(cuGetErrorName, 6000, (CuResult error, const char** text))                             \
  X(cuGetErrorString, 6000, (CuResult error, const char** text))                           \
  X(cuDeviceGetCount, 2000, (std::int32_t* count))                                         \
  X(cuDeviceGet, 2000, (CuDevice * device, std::int32_t ordinal))                          \
  X(cuDeviceGetName, 2000, (char* name, std::int32_t capacity, CuDevice device))           \
  X(cuDeviceGetAttribute, 2000,                                                            \
    (std::int32_t* value, CuDeviceAttribute attribute, CuDevice device))                   \
  X(cuDevicePrimaryCtxRetain, 7000, (CuContext * context, CuDevice device))                \
  X(cuCtxGetCurrent, 4000, (CuContext * context))                                          \
  X(cuCtxGetDevice, 2000, (CuDevice * device))                                             \
  X(cuCtxGetId, 12000, (CuContext context, unsigned long long* id))                        \
  X(cuCtxPushCurrent, 4000, (CuContext context))                                           \
  X(cuCtxPopCurrent, 4000, (CuContext * context))                                          \
  X(cuModuleLoadData, 2000, (CuModule * module, const void* image))                        \
  X(cuModuleUnload, 2000, (CuModule module))                                               \
  X(cuModuleGetFunction, 2000, (CuFunction * function, CuModule module, const char* name)) \
  X(cuFuncSetAttribute, 9000,                                                              \
    (CuFunction function, CuFunctionAttribute attribute, std::int32_t value))              \
  X(cuLaunchKernelEx, 11060,                                                               \
    (const CuLaunchConfig* config, CuFunction function, void** parameters, void** extra))  \
  X(cuTensorMapEncodeTiled, 12000,                                                         \
    (TensorMap * map, std::int32_t data_type, std::uint32_t rank, void* address,           \
     const std::uint64_t* dims, const std::uint64_t* strides, const std::uint32_t* box,    \
     const std::uint32_t* element_strides, std::int32_t interleave, std::int32_t swizzle,  \
     std::int32_t l2_promotion, std::int32_t oob_fill))                                    \
  X(cuStreamIsCapturing, 10000, (CuStream stream, CuCaptureStatus * status))               \
  X(cuThreadExchangeStreamCaptureMode, 10010, (CuCaptureMode * mode))                      \
  X(cuMemcpyHtoDAsync, 3020,                                                               \
    (CuDevicePointer target, const void* source, std::size_t bytes, CuStream stream))      \
  X(cuMemsetD8Async, 3020,                                                                 \
    (CuDevicePointer target, unsigned char value, std::size_t bytes, CuStream stream))

// Entry points that a supported driver may lack; null then.
#define ONCHIP_OPTIONAL_DRIVER_FUNCTIONS(X) X(cuFuncLoad, 12040, (CuFunction function))

struct Driver {
#define ONCHIP_DECLARE(name, version, parameters) CuResult(*name) parameters = nullptr;
  ONCHIP_DRIVER_FUNCTIONS(ONCHIP_DECLARE)
  ONCHIP_OPTIONAL_DRIVER_FUNCTIONS(ONCHIP_DECLARE)
#undef ONCHIP_DECLARE
  std::int32_t version = 0;  // 1000 major + 10 minor
};

// The oldest driver whose entry points suffice.
inline constexpr std::int32_t kOldestDriver = 12000;

// ---- loading

struct DriverState {
  const Driver* driver = nullptr;  // null: `problem` says why
  std::string problem;
  std::string path;  // of the library that was opened
};

// The process's driver, opened and initialised at the first call.
const DriverState& driver_state();

// Opens the named library and fills `driver`. Returns what is wrong, "" if nothing.
std::string load_driver(const char* library, Driver& driver, std::string* path = nullptr);

// The part of load_driver that follows opening: `find` gives the address of a name in the library.
std::string bind_driver(void* (*find)(void* library, const char* name), void* library,
                        Driver& driver);

// "CUDA_ERROR_INVALID_VALUE (1): invalid argument"
std::string driver_error_text(const Driver& driver, CuResult error);

// Throws Error(device_error, or out_of_memory) with "what: <driver_error_text>".
void check_driver(const Driver& driver, CuResult result, const char* what);

// ---- devices

struct DeviceFacts {
  std::string name;
  CuDevice device = 0;
  std::int32_t ordinal = 0;
  std::int32_t compute_capability = 0;  // 10 major + minor
  std::int32_t multiprocessors = 0;
  std::int32_t shared_bytes_per_block = 0;  // the most a kernel can ask for
  std::int32_t shared_bytes_per_multiprocessor = 0;
  std::int64_t l2_bytes = 0;
};

std::int32_t device_count(const Driver& driver);
DeviceFacts read_device_facts(const Driver& driver, std::int32_t ordinal);

struct DeviceResult {
  const DeviceFacts* facts = nullptr;  // null: `problem` says why
  std::string problem;
};

// Facts of one of the process's devices; read once. Never throws for what a machine may lack.
DeviceResult device_facts(std::int32_t ordinal);

// ---- contexts

// While it lives, a context of the device is current: the caller's own where it is of that device,
// else the device's primary context, which frameworks share. The caller's is current again after.
class ContextScope {
 public:
  ContextScope(const Driver& driver, const DeviceFacts& device);
  ~ContextScope();
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;

  // Unlike its address never used again for another context.
  std::uint64_t id() const { return id_; }

 private:
  const Driver& driver_;
  bool pushed_ = false;
  std::uint64_t id_ = 0;
};

// While it lives, this thread may make calls that a stream capture in progress would otherwise
// forbid (loading a module). They act at once and are no part of the captured graph.
class RelaxedCaptureScope {
 public:
  explicit RelaxedCaptureScope(const Driver& driver);
  ~RelaxedCaptureScope();
  RelaxedCaptureScope(const RelaxedCaptureScope&) = delete;
  RelaxedCaptureScope& operator=(const RelaxedCaptureScope&) = delete;

 private:
  const Driver& driver_;
  CuCaptureMode previous_ = CuCaptureMode::relaxed;
};

bool is_capturing(const Driver& driver, CuStream stream);

}  // namespace onchip::gpu
