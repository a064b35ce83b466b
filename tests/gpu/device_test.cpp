// The runtime on a real device: compile, load, launch, contexts, threads, capture. Each test runs
// in a process of its own, since a forked process cannot use a driver that its parent started.
#include <dlfcn.h>

#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <vector>

#include "gpu/runtime/kernel_cache.hpp"
#include "gpu/runtime/launch.hpp"
#include "gpu/runtime/tensor_map.hpp"
#include "gpu_test_support.hpp"

namespace onchip::gpu::test {
namespace {

using CuGraph = struct CuGraphObject*;
using CuGraphExec = struct CuGraphExecObject*;

// What only the tests need of the driver.
#define ONCHIP_TEST_FUNCTIONS(X)                                                                  \
  X(cuMemAlloc, cuMemAlloc_v2, (CuDevicePointer*, std::size_t))                                   \
  X(cuMemFree, cuMemFree_v2, (CuDevicePointer))                                                   \
  X(cuMemcpyHtoD, cuMemcpyHtoD_v2, (CuDevicePointer, const void*, std::size_t))                   \
  X(cuMemcpyDtoH, cuMemcpyDtoH_v2, (void*, CuDevicePointer, std::size_t))                         \
  X(cuCtxCreate, cuCtxCreate_v2, (CuContext*, unsigned, CuDevice))                                \
  X(cuCtxDestroy, cuCtxDestroy_v2, (CuContext))                                                   \
  X(cuCtxSynchronize, cuCtxSynchronize, ())                                                       \
  X(cuStreamCreate, cuStreamCreate, (CuStream*, unsigned))                                        \
  X(cuStreamSynchronize, cuStreamSynchronize, (CuStream))                                         \
  X(cuStreamBeginCapture, cuStreamBeginCapture_v2, (CuStream, CuCaptureMode))                     \
  X(cuStreamEndCapture, cuStreamEndCapture, (CuStream, CuGraph*))                                 \
  X(cuGraphInstantiate, cuGraphInstantiateWithFlags, (CuGraphExec*, CuGraph, unsigned long long)) \
  X(cuGraphLaunch, cuGraphLaunch, (CuGraphExec, CuStream))

struct TestFunctions {
#define ONCHIP_DECLARE(name, symbol, parameters) CuResult(*name) parameters = nullptr;
  ONCHIP_TEST_FUNCTIONS(ONCHIP_DECLARE)
#undef ONCHIP_DECLARE
};

constexpr unsigned kNonBlocking = 1;
constexpr std::size_t kCount = 128;
constexpr std::size_t kBytes = kCount * sizeof(float);

// The test kernel, for whatever device there is.
const KernelDefinition& device_kernel() {
  static const KernelDefinition kernel = [] {
    KernelDefinition k = test_kernel();
    k.shared_bytes = [](const KernelSpec&) { return std::int32_t{64 * 1024}; };
    k.architecture_for = [](std::int32_t compute_capability) {
      return Architecture{static_cast<std::int16_t>(compute_capability), false};
    };
    return k;
  }();
  return kernel;
}

KernelSpec device_spec(std::int32_t add) {
  KernelSpec spec = test_spec(64, add);
  spec.kernel = &device_kernel();
  return spec;
}

class Machine {
 public:
  explicit Machine(const std::string& nvrtc)
      : compiler_(open_nvrtc(nvrtc)),
        driver(*driver_state().driver),
        cache({{test_files()}, "", "", "", [this] { return CompilerState{&compiler_, {}}; }}) {
    void* library = dlopen("libcuda.so.1", RTLD_NOW);
#define ONCHIP_BIND(name, symbol, parameters) \
  use.name = reinterpret_cast<decltype(use.name)>(dlsym(library, #symbol));
    ONCHIP_TEST_FUNCTIONS(ONCHIP_BIND)
#undef ONCHIP_BIND
  }

  void check(CuResult result, const char* what) const { check_driver(driver, result, what); }

  // Launches the kernel on `data`, as a backend does.
  void launch_on(const DeviceFacts& device, CuDevicePointer data, std::int32_t add, CuStream stream,
                 std::uint32_t block = kCount) {
    const ContextScope scope(driver, device);
    CuFunction function = cache.function(driver, device, scope, device_spec(add), stream);
    void* parameters[] = {&data};
    launch(driver, function, {.grid = 1, .block = block, .dynamic_shared_bytes = 64 * 1024}, stream,
           parameters, "test/kernel");
  }

  // Data 0, 1, 2, ... in the current context.
  CuDevicePointer upload() const {
    std::vector<float> values(kCount);
    for (std::size_t i = 0; i < kCount; ++i) values[i] = static_cast<float>(i);
    CuDevicePointer data = 0;
    check(use.cuMemAlloc(&data, kBytes), "cuMemAlloc");
    check(use.cuMemcpyHtoD(data, values.data(), kBytes), "cuMemcpyHtoD");
    return data;
  }
  // "right" if the kernel ran `times` times: pairs swapped each time, `add` added.
  std::string verdict(CuDevicePointer data, int times, int add) const {
    std::vector<float> values(kCount);
    check(use.cuMemcpyDtoH(values.data(), data, kBytes), "cuMemcpyDtoH");
    for (std::size_t i = 0; i < kCount; ++i) {
      const std::size_t from = times % 2 == 0 ? i : i ^ 1;
      if (values[i] != static_cast<float>(from) + static_cast<float>(times * add)) {
        return "element " + std::to_string(i) + " is " + std::to_string(values[i]);
      }
    }
    return "right";
  }
  // The whole of it on one device, in whatever context serves there.
  std::string compute(const DeviceFacts& device, std::int32_t add, CuStream stream) {
    CuDevicePointer data = 0;
    {
      const ContextScope scope(driver, device);
      data = upload();
    }
    launch_on(device, data, add, stream);
    const ContextScope scope(driver, device);
    check(use.cuCtxSynchronize(), "cuCtxSynchronize");
    const std::string answer = verdict(data, 1, add);
    check(use.cuMemFree(data), "cuMemFree");
    return answer;
  }
  CuContext current() const {
    CuContext context = nullptr;
    check(driver.cuCtxGetCurrent(&context), "cuCtxGetCurrent");
    return context;
  }

 private:
  Compiler compiler_;

 public:
  const Driver& driver;
  KernelCache cache;
  TestFunctions use;
};

// What body says in a child that has a device; "skip: why" where there is none.
std::string on_device(const std::string& nvrtc,
                      const std::function<std::string(Machine&, const DeviceFacts&)>& body) {
  return in_child([&]() -> std::string {
    const DeviceResult device = device_facts(0);
    if (device.facts == nullptr) return "skip: " + device.problem;
    Machine machine(nvrtc);
    return body(machine, *device.facts);
  });
}

#define ONCHIP_EXPECT_ON_DEVICE(wanted, body)                         \
  ONCHIP_REQUIRE_NVRTC(nvrtc)                                         \
  const std::string answer = on_device(nvrtc, body);                  \
  if (answer.starts_with("skip: ")) GTEST_SKIP() << answer.substr(6); \
  EXPECT_EQ(answer, wanted)

TEST(OnDevice, CompilesLoadsAndLaunches) {
  ONCHIP_EXPECT_ON_DEVICE("right right, compiled 2", ([](Machine& m, const DeviceFacts& device) {
                            const std::string first = m.compute(device, 0, nullptr);
                            const std::string second = m.compute(device, 1, nullptr);
                            return first + " " + second + ", compiled " +
                                   std::to_string(m.cache.counts().compiled);
                          }));
}

TEST(OnDevice, LeavesAThreadWithoutContextWithoutOne) {
  ONCHIP_EXPECT_ON_DEVICE("right, none", ([](Machine& m, const DeviceFacts& device) {
                            const std::string answer = m.compute(device, 0, nullptr);
                            return answer + (m.current() == nullptr ? ", none" : ", another");
                          }));
}

TEST(OnDevice, WorksInTheCallersOwnContext) {
  ONCHIP_EXPECT_ON_DEVICE("right right, own, loaded 2", ([](Machine& m, const DeviceFacts& device) {
                            const std::string shared = m.compute(device, 0, nullptr);
                            CuContext own = nullptr;
                            m.check(m.use.cuCtxCreate(&own, 0, device.device), "cuCtxCreate");
                            // Statements of their own: operands of + have no order.
                            std::string answer = shared + " " + m.compute(device, 0, nullptr);
                            answer += m.current() == own ? ", own" : ", another";
                            answer += ", loaded " + std::to_string(m.cache.counts().loaded);
                            m.check(m.use.cuCtxDestroy(own), "cuCtxDestroy");
                            return answer;
                          }));
}

TEST(OnDevice, EveryDeviceFromOneThread) {
  ONCHIP_EXPECT_ON_DEVICE("right", ([](Machine& m, const DeviceFacts&) -> std::string {
                            for (int round = 0; round < 2; ++round) {
                              for (std::int32_t i = 0; i < device_count(m.driver); ++i) {
                                const std::string answer =
                                    m.compute(*device_facts(i).facts, 1, nullptr);
                                if (answer != "right")
                                  return "cuda:" + std::to_string(i) + ": " + answer;
                              }
                            }
                            return "right";
                          }));
}

TEST(OnDevice, ManyThreads) {
  ONCHIP_EXPECT_ON_DEVICE("200 right, loaded 2", ([](Machine& m, const DeviceFacts& device) {
                            std::atomic<int> right{0};
                            std::vector<std::thread> threads;
                            for (int t = 0; t < 4; ++t) {
                              threads.emplace_back([&, t] {
                                for (int i = 0; i < 50; ++i)
                                  right += m.compute(device, (t + i) % 2, nullptr) == "right";
                              });
                            }
                            for (std::thread& thread : threads) thread.join();
                            return std::to_string(right) + " right, loaded " +
                                   std::to_string(m.cache.counts().loaded);
                          }));
}

// The kernel's first use lies in a capture: it is compiled and loaded there.
TEST(OnDevice, FirstUseUnderCaptureThenReplay) {
  ONCHIP_EXPECT_ON_DEVICE(
      "right right", ([](Machine& m, const DeviceFacts& device) {
        const ContextScope scope(m.driver, device);
        const CuDevicePointer data = m.upload();
        CuStream stream = nullptr;
        m.check(m.use.cuStreamCreate(&stream, kNonBlocking), "cuStreamCreate");
        m.check(m.use.cuStreamBeginCapture(stream, CuCaptureMode::global), "cuStreamBeginCapture");
        const bool seen = is_capturing(m.driver, stream);
        m.launch_on(device, data, 1, stream);
        CuGraph graph = nullptr;
        m.check(m.use.cuStreamEndCapture(stream, &graph), "cuStreamEndCapture");
        const std::string before = m.verdict(data, 0, 1);
        CuGraphExec executable = nullptr;
        m.check(m.use.cuGraphInstantiate(&executable, graph, 0), "cuGraphInstantiate");
        for (int i = 0; i < 3; ++i)
          m.check(m.use.cuGraphLaunch(executable, stream), "cuGraphLaunch");
        m.check(m.use.cuStreamSynchronize(stream), "cuStreamSynchronize");
        return (seen ? before : std::string("not seen as capturing")) + " " + m.verdict(data, 3, 1);
      }));
}

TEST(OnDevice, ARefusedLaunchSaysWhyAndHarmsNothing) {
  ONCHIP_EXPECT_ON_DEVICE(
      "refused, right", ([](Machine& m, const DeviceFacts& device) {
        CuDevicePointer data = 0;
        {
          const ContextScope scope(m.driver, device);
          data = m.upload();
        }
        const Thrown thrown = thrown_by([&] { m.launch_on(device, data, 0, nullptr, 4096); });
        const bool named = thrown.code == ONCHIP_DEVICE_ERROR &&
                           contains(thrown.text, "launch of test/kernel (grid 1, block 4096") &&
                           contains(thrown.text, "CUDA_ERROR_");
        return (named ? std::string("refused, ") : thrown.text + ", ") +
               m.compute(device, 0, nullptr);
      }));
}

TEST(OnDevice, TakesTensorMaps) {
  ONCHIP_EXPECT_ON_DEVICE("encoded", ([](Machine& m, const DeviceFacts& device) -> std::string {
                            if (device.compute_capability < 90)
                              return "skip: no tensor maps before 9.0";
                            const ContextScope scope(m.driver, device);
                            TensorMapShape shape;
                            shape.address = m.upload();
                            shape.dtype = DType::bf16;
                            shape.rank = 2;
                            shape.dims[0] = 64;
                            shape.dims[1] = 4;
                            shape.strides[0] = 128;
                            shape.box[0] = 64;
                            shape.box[1] = 4;
                            TensorMap map{};
                            encode_tensor_map(m.driver, shape, map);
                            for (const std::uint64_t word : map.words) {
                              if (word != 0) return "encoded";
                            }
                            return "all zero";
                          }));
}

}  // namespace
}  // namespace onchip::gpu::test
