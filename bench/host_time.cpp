// Host time of a call through the C ABI with CUDA tensors: plan and run, and run alone, as JSON.
// Device memory comes from the driver, opened here: the library's users bring their own.
#include <dlfcn.h>
#include <onchip/onchip.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

namespace {

constexpr int kSkipped = 77;  // CTest's SKIP_RETURN_CODE

[[noreturn]] void stop(int code, const std::string& text) {
  std::fprintf(stderr, "host_time: %s\n", text.c_str());
  std::exit(code);
}

class Driver {
 public:
  Driver() : library_(dlopen("libcuda.so.1", RTLD_NOW)) {
    if (library_ == nullptr) stop(kSkipped, "no CUDA driver");
    if (call<std::uint32_t>("cuInit", 0) != 0) stop(kSkipped, "no usable GPU");
    int device = 0;
    void* context = nullptr;
    require(call<int*, int>("cuDeviceGet", &device, 0), "cuDeviceGet");
    require(call<void**, int>("cuDevicePrimaryCtxRetain", &context, device),
            "cuDevicePrimaryCtxRetain");
    require(call<void*>("cuCtxSetCurrent", context), "cuCtxSetCurrent");
  }

  void* allocate(std::size_t bytes) {
    std::uint64_t address = 0;
    require(call<std::uint64_t*, std::size_t>("cuMemAlloc_v2", &address, bytes), "cuMemAlloc");
    require(call<std::uint64_t, unsigned char, std::size_t>("cuMemsetD8_v2", address, 0, bytes),
            "cuMemsetD8");
    return reinterpret_cast<void*>(static_cast<std::uintptr_t>(address));
  }

  void* stream() {
    void* made = nullptr;
    constexpr unsigned kNonBlocking = 1;
    require(call<void**, unsigned>("cuStreamCreate", &made, kNonBlocking), "cuStreamCreate");
    return made;
  }

  void synchronize(void* stream) {
    require(call<void*>("cuStreamSynchronize", stream), "cuStreamSynchronize");
  }

 private:
  template <typename... Arguments>
  int call(const char* name, Arguments... arguments) {
    void* found = dlsym(library_, name);
    if (found == nullptr) stop(1, std::string("the driver has no ") + name);
    return reinterpret_cast<int (*)(Arguments...)>(found)(arguments...);
  }
  static void require(int status, const char* what) {
    if (status != 0) stop(1, std::string(what) + ": " + std::to_string(status));
  }

  void* library_;
};

void require(onchip_status status) {
  if (status != ONCHIP_OK) stop(1, onchip_last_error());
}

onchip_tensor tensor(void* data, std::int32_t dtype, const std::vector<std::int64_t>& shape) {
  onchip_tensor made = {};
  made.data = data;
  made.dtype = dtype;
  made.rank = static_cast<std::int32_t>(shape.size());
  made.device_type = ONCHIP_DEVICE_CUDA;
  std::int64_t stride = 1;
  for (std::size_t axis = shape.size(); axis-- > 0;) {
    made.shape[axis] = shape[axis];
    made.strides[axis] = stride;
    stride *= shape[axis];
  }
  return made;
}

// Microseconds a call, one number a batch. The device takes less time for a call than the host, so
// its queue stays short; each batch begins with an empty one.
std::vector<double> measure(Driver& driver, void* stream, const std::function<void()>& call) {
  constexpr int kBatches = 31;
  constexpr int kCalls = 200;
  std::vector<double> samples;
  for (int batch = 0; batch <= kBatches; ++batch) {
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < kCalls; ++i) call();
    const std::chrono::duration<double, std::micro> spent =
        std::chrono::steady_clock::now() - begin;
    driver.synchronize(stream);
    if (batch > 0) samples.push_back(spent.count() / kCalls);  // the first one warms up
  }
  return samples;
}

void print(const char* name, const std::vector<double>& samples) {
  std::printf("\"%s\": [", name);
  for (std::size_t i = 0; i < samples.size(); ++i) {
    std::printf("%s%.4f", i == 0 ? "" : ", ", samples[i]);
  }
  std::printf("]");
}

}  // namespace

int main() {
  Driver driver;
  void* stream = driver.stream();
  constexpr std::int64_t kSeqlen = 128;
  constexpr std::int64_t kHeads = 2;
  constexpr std::int64_t kHeadDim = 128;
  const std::vector<std::int64_t> shape = {1, kSeqlen, kHeads, kHeadDim};
  const auto made = [&] {
    return tensor(driver.allocate(2 * kSeqlen * kHeads * kHeadDim), ONCHIP_BFLOAT16, shape);
  };
  const onchip_tensor q = made();
  const onchip_tensor k = made();
  const onchip_tensor v = made();
  const onchip_tensor o = made();
  onchip_attention_options options = ONCHIP_ATTENTION_OPTIONS_INIT;
  options.causal = 1;
  options.backend = "cuda.sm90";
  onchip_attention_forward_args args = ONCHIP_ATTENTION_FORWARD_ARGS_INIT;
  args.q = &q;
  args.k = &k;
  args.v = &v;
  args.o = &o;
  args.options = &options;

  onchip_plan plan = ONCHIP_PLAN_INIT;
  const onchip_status planned = onchip_attention_forward_plan(&args, &plan);
  if (planned == ONCHIP_UNSUPPORTED) stop(kSkipped, onchip_last_error());
  require(planned);
  void* workspace = plan.workspace_bytes == 0 ? nullptr : driver.allocate(plan.workspace_bytes);
  const auto run = [&] { require(onchip_attention_forward_run(&plan, &args, workspace, stream)); };
  const auto plan_and_run = [&] {
    onchip_plan fresh = ONCHIP_PLAN_INIT;
    require(onchip_attention_forward_plan(&args, &fresh));
    require(onchip_attention_forward_run(&fresh, &args, workspace, stream));
  };
  std::printf("{\"kernel\": \"%s\", ", plan.kernel);
  print("plan_and_run_us", measure(driver, stream, plan_and_run));
  std::printf(", ");
  print("run_us", measure(driver, stream, run));
  std::printf("}\n");
  return 0;
}
