#include "gpu/runtime/driver.hpp"

#include <dlfcn.h>
#include <link.h>

#include <array>
#include <atomic>
#include <memory>
#include <mutex>

#include "core/status.hpp"

namespace onchip::gpu {

namespace {

std::string version_text(std::int32_t version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

using GetProcAddress = CuResult (*)(const char* name, void** address, std::int32_t version,
                                    std::uint64_t flags, std::int32_t* status);

}  // namespace

std::string bind_driver(void* (*find)(void* library, const char* name), void* library,
                        Driver& driver) {
  // The driver's own version comes first: it explains whatever else is missing.
  driver.cuDriverGetVersion =
      reinterpret_cast<decltype(driver.cuDriverGetVersion)>(find(library, "cuDriverGetVersion"));
  if (driver.cuDriverGetVersion == nullptr) {
    return "the CUDA driver library has no cuDriverGetVersion: it is no CUDA driver";
  }
  std::int32_t version = 0;
  if (driver.cuDriverGetVersion(&version) != kCuSuccess) version = 0;
  if (version < kOldestDriver) {
    return "the CUDA driver is too old: got CUDA " + version_text(version) + ", wanted " +
           version_text(kOldestDriver) + " or newer";
  }
  driver.version = version;

  // By name and version: the plain names in the library are the oldest form of each function.
  const auto get = reinterpret_cast<GetProcAddress>(find(library, "cuGetProcAddress_v2"));
  if (get == nullptr) return "the CUDA driver lacks cuGetProcAddress_v2";
  std::string missing;
  const auto bind = [&](const char* name, std::int32_t since, bool required) -> void* {
    void* address = nullptr;
    std::int32_t status = 0;
    if (version < since || get(name, &address, since, 0, &status) != kCuSuccess) address = nullptr;
    if (address == nullptr && required)
      missing += missing.empty() ? name : std::string(", ") + name;
    return address;
  };
#define ONCHIP_BIND(name, since, parameters) \
  driver.name = reinterpret_cast<decltype(driver.name)>(bind(#name, since, true));
  ONCHIP_DRIVER_FUNCTIONS(ONCHIP_BIND)
#undef ONCHIP_BIND
#define ONCHIP_BIND(name, since, parameters) \
  driver.name = reinterpret_cast<decltype(driver.name)>(bind(#name, since, false));
  ONCHIP_OPTIONAL_DRIVER_FUNCTIONS(ONCHIP_BIND)
#undef ONCHIP_BIND
  if (!missing.empty()) {
    return "the CUDA driver (CUDA " + version_text(version) + ") lacks " + missing;
  }

  const CuResult result = driver.cuInit(0);
  if (result == kCuNoDevice) return "no CUDA device (cuInit: CUDA_ERROR_NO_DEVICE)";
  if (result != kCuSuccess) {
    return "the CUDA driver does not start (cuInit: " + driver_error_text(driver, result) + ")";
  }
  return {};
}

std::string load_driver(const char* library, Driver& driver, std::string* path) {
  // Never closed: what it gave out stays in use, and frameworks hold it open as well.
  void* handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* why = dlerror();
    return "no CUDA driver (" + std::string(why == nullptr ? library : why) + ")";
  }
  if (path != nullptr) {
    const link_map* map = nullptr;
    if (dlinfo(handle, RTLD_DI_LINKMAP, static_cast<void*>(&map)) == 0 && map != nullptr)
      *path = map->l_name;
  }
  return bind_driver(dlsym, handle, driver);
}

const DriverState& driver_state() {
  static const DriverState state = [] {
    static Driver driver;
    DriverState result;
    result.problem = load_driver("libcuda.so.1", driver, &result.path);
    if (result.problem.empty()) result.driver = &driver;
    return result;
  }();
  return state;
}

std::string driver_error_text(const Driver& driver, CuResult error) {
  const char* name = nullptr;
  const char* text = nullptr;
  if (driver.cuGetErrorName == nullptr || driver.cuGetErrorName(error, &name) != kCuSuccess ||
      name == nullptr) {
    return "CUDA error " + std::to_string(error);
  }
  std::string result = std::string(name) + " (" + std::to_string(error) + ")";
  if (driver.cuGetErrorString(error, &text) == kCuSuccess && text != nullptr) {
    result.append(": ").append(text);
  }
  return result;
}

void check_driver(const Driver& driver, CuResult result, const char* what) {
  if (result == kCuSuccess) return;
  throw Error(result == kCuOutOfMemory ? ONCHIP_OUT_OF_MEMORY : ONCHIP_DEVICE_ERROR,
              std::string(what) + ": " + driver_error_text(driver, result));
}

std::int32_t device_count(const Driver& driver) {
  std::int32_t count = 0;
  check_driver(driver, driver.cuDeviceGetCount(&count), "cuDeviceGetCount");
  return count;
}

DeviceFacts read_device_facts(const Driver& driver, std::int32_t ordinal) {
  DeviceFacts facts;
  facts.ordinal = ordinal;
  check_driver(driver, driver.cuDeviceGet(&facts.device, ordinal), "cuDeviceGet");
  std::array<char, 128> name{};
  check_driver(
      driver,
      driver.cuDeviceGetName(name.data(), static_cast<std::int32_t>(name.size() - 1), facts.device),
      "cuDeviceGetName");
  facts.name = name.data();
  const auto attribute = [&](CuDeviceAttribute which) {
    std::int32_t value = 0;
    check_driver(driver, driver.cuDeviceGetAttribute(&value, which, facts.device),
                 "cuDeviceGetAttribute");
    return value;
  };
  facts.compute_capability = 10 * attribute(CuDeviceAttribute::compute_capability_major) +
                             attribute(CuDeviceAttribute::compute_capability_minor);
  facts.multiprocessors = attribute(CuDeviceAttribute::multiprocessor_count);
  facts.shared_bytes_per_block = attribute(CuDeviceAttribute::max_shared_memory_per_block_optin);
  facts.shared_bytes_per_multiprocessor =
      attribute(CuDeviceAttribute::max_shared_memory_per_multiprocessor);
  facts.l2_bytes = attribute(CuDeviceAttribute::l2_cache_size);
  return facts;
}

DeviceResult device_facts(std::int32_t ordinal) {
  const DriverState& state = driver_state();
  if (state.driver == nullptr) return {nullptr, state.problem};

  // Read once a device; afterwards one atomic load.
  struct Devices {
    explicit Devices(std::int32_t n)
        : count(n),
          facts(std::make_unique<std::atomic<const DeviceFacts*>[]>(static_cast<std::size_t>(n))) {}
    std::int32_t count;
    std::unique_ptr<std::atomic<const DeviceFacts*>[]> facts;
    std::mutex mutex;
  };
  try {
    static Devices devices(device_count(*state.driver));
    if (ordinal < 0 || ordinal >= devices.count) {
      return {nullptr, "there is no device cuda:" + std::to_string(ordinal) +
                           "; this process sees " + std::to_string(devices.count)};
    }
    std::atomic<const DeviceFacts*>& slot = devices.facts[static_cast<std::size_t>(ordinal)];
    const DeviceFacts* facts = slot.load(std::memory_order_acquire);
    if (facts == nullptr) {
      const std::lock_guard lock(devices.mutex);
      facts = slot.load(std::memory_order_acquire);
      if (facts == nullptr) {
        // Never freed: handed out to whoever asks, for as long as the process runs.
        facts = new DeviceFacts(read_device_facts(*state.driver, ordinal));
        slot.store(facts, std::memory_order_release);
      }
    }
    return {facts, {}};
  } catch (const Error& error) {
    return {nullptr, error.what()};
  }
}

namespace {

// The primary context of a device, retained once for the life of the process: releasing it between
// calls would destroy and rebuild it wherever no framework holds it too.
CuContext primary_context(const Driver& driver, const DeviceFacts& device) {
  constexpr std::size_t kMaxDevices = 256;
  static std::array<std::atomic<CuContext>, kMaxDevices> contexts{};
  static std::mutex mutex;
  const auto index = static_cast<std::size_t>(device.ordinal);
  if (index >= kMaxDevices) {
    throw Error(ONCHIP_DEVICE_ERROR,
                "cuda:" + std::to_string(device.ordinal) + ": at most 256 devices are supported");
  }
  CuContext context = contexts[index].load(std::memory_order_acquire);
  if (context != nullptr) return context;
  const std::lock_guard lock(mutex);
  context = contexts[index].load(std::memory_order_acquire);
  if (context == nullptr) {
    check_driver(driver, driver.cuDevicePrimaryCtxRetain(&context, device.device),
                 "cuDevicePrimaryCtxRetain");
    contexts[index].store(context, std::memory_order_release);
  }
  return context;
}

}  // namespace

ContextScope::ContextScope(const Driver& driver, const DeviceFacts& device) : driver_(driver) {
  CuContext context = nullptr;
  check_driver(driver, driver.cuCtxGetCurrent(&context), "cuCtxGetCurrent");
  CuDevice current = -1;
  if (context != nullptr) check_driver(driver, driver.cuCtxGetDevice(&current), "cuCtxGetDevice");
  if (context == nullptr || current != device.device) {
    context = primary_context(driver, device);
    check_driver(driver, driver.cuCtxPushCurrent(context), "cuCtxPushCurrent");
    pushed_ = true;
  }
  unsigned long long id = 0;
  const CuResult result = driver.cuCtxGetId(context, &id);
  if (result != kCuSuccess) {
    if (pushed_) driver.cuCtxPopCurrent(&context);
    check_driver(driver, result, "cuCtxGetId");
  }
  id_ = id;
}

ContextScope::~ContextScope() {
  CuContext popped = nullptr;
  // It can fail only where the process is tearing down, when nobody needs the old context.
  if (pushed_) static_cast<void>(driver_.cuCtxPopCurrent(&popped));
}

RelaxedCaptureScope::RelaxedCaptureScope(const Driver& driver) : driver_(driver) {
  check_driver(driver, driver.cuThreadExchangeStreamCaptureMode(&previous_),
               "cuThreadExchangeStreamCaptureMode");
}

RelaxedCaptureScope::~RelaxedCaptureScope() {
  static_cast<void>(driver_.cuThreadExchangeStreamCaptureMode(&previous_));
}

bool is_capturing(const Driver& driver, CuStream stream) {
  CuCaptureStatus status = CuCaptureStatus::none;
  // The default stream answers with an error while any other stream of its context captures: to the
  // caller that means the same.
  return driver.cuStreamIsCapturing(stream, &status) != kCuSuccess ||
         status != CuCaptureStatus::none;
}

}  // namespace onchip::gpu
