// What the GPU tests share: temporary folders, child processes, a compiler and a driver that only
// record, and the way to a real NVRTC.
#pragma once

#include <gtest/gtest.h>

#include <sys/stat.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "core/status.hpp"
#include "gpu/runtime/driver.hpp"
#include "gpu/runtime/kernel_cache.hpp"
#include "gpu/runtime/kernel_spec.hpp"
#include "gpu/runtime/nvrtc.hpp"
#include "gpu/runtime/tensor_map.hpp"

namespace onchip::gpu::test {

class TempDir {
 public:
  TempDir() {
    std::string pattern = (std::filesystem::temp_directory_path() / "onchip_test_XXXXXX").string();
    if (mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("mkdtemp fails");
    path_ = pattern;
  }
  ~TempDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  const std::string& path() const { return path_; }
  std::string file(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

inline std::string read_all(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}
inline void write_all(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

inline std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

// A running child process and the text that it will leave.
struct Child {
  pid_t pid = -1;
  int pipe = -1;
};

inline Child start_child(const std::function<std::string()>& body) {
  int ends[2];
  if (pipe(ends) != 0) throw std::runtime_error("pipe fails");
  const pid_t pid = fork();
  if (pid == 0) {
    close(ends[0]);
    std::string text;
    try {
      text = body();
    } catch (const std::exception& error) {
      text = std::string("threw: ") + error.what();
    }
    const bool written =
        write(ends[1], text.data(), text.size()) == static_cast<ssize_t>(text.size());
    _exit(written ? 0 : 1);
  }
  close(ends[1]);
  return {pid, ends[0]};
}

// The child's text, or how it died.
inline std::string finish_child(const Child& child) {
  std::string text;
  char buffer[4096];
  for (ssize_t got; (got = read(child.pipe, buffer, sizeof(buffer))) > 0;) {
    text.append(buffer, static_cast<std::size_t>(got));
  }
  close(child.pipe);
  int status = 0;
  waitpid(child.pid, &status, 0);
  if (WIFSIGNALED(status)) return "died by signal " + std::to_string(WTERMSIG(status));
  if (WEXITSTATUS(status) != 0) return "exit status " + std::to_string(WEXITSTATUS(status));
  return text;
}

// For what changes a process for good: limits, users, loaded libraries.
inline std::string in_child(const std::function<std::string()>& body) {
  return finish_child(start_child(body));
}

// The message and code of the Error that body throws.
struct Thrown {
  onchip_status code = ONCHIP_OK;
  std::string text;
};
inline Thrown thrown_by(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return {error.code(), error.what()};
  }
  return {};
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// ---- NVRTC

// ONCHIP_TEST_NVRTC, else the one in .venv; "" if there is none.
inline std::string real_nvrtc() {
  if (const char* path = std::getenv("ONCHIP_TEST_NVRTC")) return path;
  std::error_code ignored;
  const std::string lib = std::string(ONCHIP_SOURCE_DIR) + "/.venv/lib";
  for (const auto& python : std::filesystem::directory_iterator(lib, ignored)) {
    const std::string path =
        python.path().string() + "/site-packages/nvidia/cu13/lib/libnvrtc.so.13";
    if (std::filesystem::exists(path, ignored)) return path;
  }
  return {};
}

#define ONCHIP_REQUIRE_NVRTC(path)                                                         \
  const std::string path = ::onchip::gpu::test::real_nvrtc();                              \
  if (path.empty()) {                                                                      \
    GTEST_SKIP() << "no NVRTC: tools/setup installs one, ONCHIP_TEST_NVRTC names another"; \
  }

inline Compiler open_nvrtc(const std::string& path) {
  NvrtcSearch search;
  search.setting = path;
  Compiler compiler;
  const std::string problem = load_nvrtc(search, compiler);
  if (!problem.empty()) throw std::runtime_error(problem);
  return compiler;
}

// ---- a kernel of the tests' own

inline constexpr char kTestHeader[] =
    "#pragma once\n"
    "constexpr int twice(int x) { return 2 * x; }\n";
inline constexpr char kTestKernel[] =
    "#pragma once\n"
    "#include \"gpu/tile/test.cuh\"\n"
    "struct Spec { int width; bool add; };\n"
    "inline constexpr Spec kSpec = {ONCHIP_TEST_SPEC};\n"
    "extern \"C\" __global__ void __launch_bounds__(128, 1) onchip_test_kernel(float* x) {\n"
    "  __shared__ float s[twice(kSpec.width)];\n"
    "  s[threadIdx.x] = x[threadIdx.x];\n"
    "  __syncthreads();\n"
    "  x[threadIdx.x] = s[threadIdx.x ^ 1] + (kSpec.add ? 1.0f : 0.0f);\n"
    "}\n";

inline EmbeddedFile embedded(const char* path, const char* text) {
  return {path, text, std::strlen(text)};
}

inline const std::vector<EmbeddedFile>& test_files() {
  static const std::vector<EmbeddedFile> files = {
      embedded("gpu/kernels/test/kernel.cuh", kTestKernel),
      embedded("gpu/tile/test.cuh", kTestHeader),
      embedded("gpu/tile/unrelated.cuh", "#pragma once\n"),
  };
  return files;
}

inline constexpr const char* kTestFields[] = {"width", "add"};
inline constexpr Architecture kTestArchitectures[] = {{90, true}};
inline constexpr std::int32_t kTestSharedBytes = 200 * 1024;

inline const KernelDefinition& test_kernel() {
  static const KernelDefinition kernel = {
      .name = "test/kernel",
      .file = "gpu/kernels/test/kernel.cuh",
      .entry = "onchip_test_kernel",
      .macro = "ONCHIP_TEST_SPEC",
      .fields = kTestFields,
      .shared_bytes = [](const KernelSpec&) { return kTestSharedBytes; },
      .architecture_for = [](std::int32_t) { return kTestArchitectures[0]; },
      .architectures = kTestArchitectures,
      .registered_count = 0,
      .registered = nullptr,
  };
  return kernel;
}

inline KernelSpec test_spec(std::int32_t width = 64, std::int32_t add = 0) {
  KernelSpec spec;
  spec.kernel = &test_kernel();
  spec.values[0] = width;
  spec.values[1] = add;
  return spec;
}

// A compiler whose machine code is the text it was given. Counts compiles.
class FakeCompiler {
 public:
  FakeCompiler() {
    compiler_.version = "13.0";
    compiler_.path = "/fake/libnvrtc.so.13";
    compiler_.compile = [this](const CompileRequest& request) {
      ++count;
      if (during) during();
      CompileResult result;
      result.log = log;
      if (!fail) {
        result.cubin.assign(request.text.begin(), request.text.end());
      }
      return result;
    };
  }
  CompilerState state() const { return {&compiler_, {}}; }
  void set_version(const std::string& version) { compiler_.version = version; }

  std::atomic<int> count{0};
  std::function<void()> during;
  bool fail = false;
  std::string log =
      "ptxas info    : Compiling entry function 'onchip_test_kernel' for 'sm_90a'\n"
      "ptxas info    : Used 42 registers, used 1 barriers, 512 bytes smem\n";

 private:
  Compiler compiler_;
};

inline std::string code_for(const KernelSpec& spec) {
  return kernel_source({test_files()}, spec, kTestArchitectures[0]).request.text;
}
inline std::string code_of(const CachedImage& image) {
  return {image.image.cubin.begin(), image.image.cubin.end()};
}

// ---- a driver that records

struct FakeDriver {
  static constexpr CuResult kFailure = 700;

  std::map<std::string, int> calls;
  std::map<std::string, CuResult> fails;  // what a function returns instead
  std::map<std::string, CuResult> fails_once;
  std::vector<CuContext> stack;     // contexts of the (one) thread
  std::vector<std::string> loaded;  // machine code of modules, in order
  CuCaptureMode capture_mode = CuCaptureMode::global;
  std::vector<CuCaptureMode> mode_at_load;
  CuCaptureStatus capture_status = CuCaptureStatus::none;
  std::int32_t max_dynamic_shared = 0;
  CuLaunchConfig launch{};
  CuFunction launched = nullptr;
  std::function<void(void**)> on_launch;
  std::vector<TensorMapShape> maps;
  std::vector<char> copied;
  CuDevicePointer copy_target = 0;
  int unloaded = 0;
  bool no_func_load = false;
};

inline FakeDriver& fake() {
  static FakeDriver driver;
  return driver;
}

// Context c belongs to device c / 16; the primary one of device d is 16 d + 1.
inline CuContext fake_context(std::uintptr_t number) { return reinterpret_cast<CuContext>(number); }

inline CuResult fake_call(const char* name) {
  ++fake().calls[name];
  if (const auto once = fake().fails_once.extract(name); !once.empty()) return once.mapped();
  const auto at = fake().fails.find(name);
  return at == fake().fails.end() ? kCuSuccess : at->second;
}
#define ONCHIP_FAKE_CALL(name) \
  if (const CuResult planned = fake_call(name); planned != kCuSuccess) return planned

// Machine code must outlive the module only in tests: the real driver copies it.
inline Driver fake_driver() {
  fake() = {};
  Driver d;
  d.version = 12080;
  d.cuGetErrorName = [](CuResult, const char** text) {
    *text = "CUDA_ERROR_FAKE";
    return kCuSuccess;
  };
  d.cuGetErrorString = [](CuResult, const char** text) {
    *text = "a planned failure";
    return kCuSuccess;
  };
  d.cuCtxGetCurrent = [](CuContext* context) {
    ONCHIP_FAKE_CALL("cuCtxGetCurrent");
    *context = fake().stack.empty() ? nullptr : fake().stack.back();
    return kCuSuccess;
  };
  d.cuCtxGetDevice = [](CuDevice* device) {
    ONCHIP_FAKE_CALL("cuCtxGetDevice");
    *device = static_cast<CuDevice>(reinterpret_cast<std::uintptr_t>(fake().stack.back()) / 16);
    return kCuSuccess;
  };
  d.cuCtxGetId = [](CuContext context, unsigned long long* id) {
    ONCHIP_FAKE_CALL("cuCtxGetId");
    *id = reinterpret_cast<std::uintptr_t>(context) + 1000;
    return kCuSuccess;
  };
  d.cuDevicePrimaryCtxRetain = [](CuContext* context, CuDevice device) {
    ONCHIP_FAKE_CALL("cuDevicePrimaryCtxRetain");
    *context = fake_context(static_cast<std::uintptr_t>(device) * 16 + 1);
    return kCuSuccess;
  };
  d.cuCtxPushCurrent = [](CuContext context) {
    ONCHIP_FAKE_CALL("cuCtxPushCurrent");
    fake().stack.push_back(context);
    return kCuSuccess;
  };
  d.cuCtxPopCurrent = [](CuContext* context) {
    ONCHIP_FAKE_CALL("cuCtxPopCurrent");
    *context = fake().stack.back();
    fake().stack.pop_back();
    return kCuSuccess;
  };
  d.cuModuleLoadData = [](CuModule* module, const void* image) {
    fake().mode_at_load.push_back(fake().capture_mode);
    ONCHIP_FAKE_CALL("cuModuleLoadData");
    fake().loaded.emplace_back(static_cast<const char*>(image), 8);
    *module = reinterpret_cast<CuModule>(fake().loaded.size());
    return kCuSuccess;
  };
  d.cuModuleUnload = [](CuModule) {
    ++fake().unloaded;
    return kCuSuccess;
  };
  d.cuModuleGetFunction = [](CuFunction* function, CuModule module, const char*) {
    ONCHIP_FAKE_CALL("cuModuleGetFunction");
    *function = reinterpret_cast<CuFunction>(reinterpret_cast<std::uintptr_t>(module) + 100);
    return kCuSuccess;
  };
  d.cuFuncSetAttribute = [](CuFunction, CuFunctionAttribute, std::int32_t value) {
    ONCHIP_FAKE_CALL("cuFuncSetAttribute");
    fake().max_dynamic_shared = value;
    return kCuSuccess;
  };
  d.cuFuncLoad = [](CuFunction) {
    ONCHIP_FAKE_CALL("cuFuncLoad");
    return kCuSuccess;
  };
  d.cuThreadExchangeStreamCaptureMode = [](CuCaptureMode* mode) {
    ONCHIP_FAKE_CALL("cuThreadExchangeStreamCaptureMode");
    std::swap(*mode, fake().capture_mode);
    return kCuSuccess;
  };
  d.cuStreamIsCapturing = [](CuStream, CuCaptureStatus* status) {
    ONCHIP_FAKE_CALL("cuStreamIsCapturing");
    *status = fake().capture_status;
    return kCuSuccess;
  };
  d.cuLaunchKernelEx = [](const CuLaunchConfig* config, CuFunction function, void** parameters,
                          void**) {
    ONCHIP_FAKE_CALL("cuLaunchKernelEx");
    fake().launch = *config;
    fake().launched = function;
    if (fake().on_launch) fake().on_launch(parameters);
    return kCuSuccess;
  };
  d.cuTensorMapEncodeTiled = [](TensorMap* map, std::int32_t data_type, std::uint32_t rank,
                                void* address, const std::uint64_t* dims,
                                const std::uint64_t* strides, const std::uint32_t* box,
                                const std::uint32_t*, std::int32_t, std::int32_t swizzle,
                                std::int32_t promotion, std::int32_t) {
    ONCHIP_FAKE_CALL("cuTensorMapEncodeTiled");
    TensorMapShape shape;
    shape.address = reinterpret_cast<std::uintptr_t>(address);
    shape.dtype = data_type == 6 ? DType::f16 : data_type == 9 ? DType::bf16 : DType::f32;
    shape.rank = rank;
    for (std::uint32_t i = 0; i < rank; ++i) {
      shape.dims[i] = dims[i];
      shape.box[i] = box[i];
      if (i + 1 < rank) shape.strides[i] = strides[i];
    }
    shape.swizzle = static_cast<TensorMapSwizzle>(swizzle);
    shape.promotion = static_cast<TensorMapPromotion>(promotion);
    fake().maps.push_back(shape);
    *map = {};
    map->words[0] = fake().maps.size();
    return kCuSuccess;
  };
  d.cuMemcpyHtoDAsync = [](CuDevicePointer target, const void* source, std::size_t bytes,
                           CuStream) {
    ONCHIP_FAKE_CALL("cuMemcpyHtoDAsync");
    fake().copy_target = target;
    const char* data = static_cast<const char*>(source);
    fake().copied.assign(data, data + bytes);
    return kCuSuccess;
  };
  return d;
}

inline DeviceFacts hopper_facts(std::int32_t ordinal = 0) {
  DeviceFacts facts;
  facts.name = "fake H200";
  facts.ordinal = facts.device = ordinal;
  facts.compute_capability = 90;
  facts.multiprocessors = 132;
  facts.shared_bytes_per_block = 227 * 1024;
  facts.shared_bytes_per_multiprocessor = 228 * 1024;
  facts.l2_bytes = 50 << 20;
  return facts;
}

}  // namespace onchip::gpu::test
