#include "gpu/runtime/driver.hpp"

#include <gtest/gtest.h>

#include <set>
#include <string>

#include "gpu_test_support.hpp"

namespace onchip::gpu::test {
namespace {

// A driver library as bind_driver sees one.
struct FakeLibrary {
  std::int32_t version = 12080;
  std::set<std::string> missing = {};
  CuResult init = kCuSuccess;
  bool old_lookup = false;
};
FakeLibrary library;

CuResult any_call() { return kCuSuccess; }
CuResult fake_init(std::uint32_t) { return library.init; }
CuResult fake_version(std::int32_t* version) {
  *version = library.version;
  return kCuSuccess;
}
CuResult fake_error_name(CuResult, const char** text) {
  *text = "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH";
  return kCuSuccess;
}
CuResult fake_error_string(CuResult, const char** text) {
  *text = "system has unsupported display driver / cuda driver combination";
  return kCuSuccess;
}
CuResult fake_get(const char* name, void** address, std::int32_t, std::uint64_t, std::int32_t*) {
  const std::string wanted = name;
  if (library.missing.count(wanted) != 0) return 500;
  if (wanted == "cuInit") {
    *address = reinterpret_cast<void*>(&fake_init);
  } else if (wanted == "cuGetErrorName") {
    *address = reinterpret_cast<void*>(&fake_error_name);
  } else if (wanted == "cuGetErrorString") {
    *address = reinterpret_cast<void*>(&fake_error_string);
  } else {
    *address = reinterpret_cast<void*>(&any_call);
  }
  return kCuSuccess;
}
void* fake_find(void*, const char* name) {
  const std::string wanted = name;
  if (wanted == "cuDriverGetVersion") return reinterpret_cast<void*>(&fake_version);
  if (wanted == "cuGetProcAddress_v2" && !library.old_lookup) {
    return reinterpret_cast<void*>(&fake_get);
  }
  return nullptr;
}

std::string bind(const FakeLibrary& with) {
  library = with;
  Driver driver;
  return bind_driver(fake_find, nullptr, driver);
}

TEST(Driver, BindsEverythingItUses) {
  library = {};
  Driver driver;
  EXPECT_EQ(bind_driver(fake_find, nullptr, driver), "");
  EXPECT_EQ(driver.version, 12080);
#define ONCHIP_EXPECT(name, version, parameters) EXPECT_NE(driver.name, nullptr) << #name;
  ONCHIP_DRIVER_FUNCTIONS(ONCHIP_EXPECT)
  ONCHIP_OPTIONAL_DRIVER_FUNCTIONS(ONCHIP_EXPECT)
#undef ONCHIP_EXPECT
}

TEST(Driver, MissingLibraryIsOneReason) {
  Driver driver;
  const std::string problem = load_driver("libonchip_no_such_driver.so.1", driver);
  EXPECT_TRUE(contains(problem, "no CUDA driver (libonchip_no_such_driver.so.1")) << problem;
}

TEST(Driver, ALibraryThatIsNoDriver) {
  Driver driver;
  const std::string problem = load_driver("libm.so.6", driver);
  EXPECT_TRUE(contains(problem, "it is no CUDA driver")) << problem;
}

TEST(Driver, TooOld) {
  const std::string problem = bind({.version = 11080});
  EXPECT_EQ(problem, "the CUDA driver is too old: got CUDA 11.8, wanted 12.0 or newer");
}

TEST(Driver, NamesMissingFunctions) {
  FakeLibrary lacking;
  lacking.missing = {"cuTensorMapEncodeTiled", "cuLaunchKernelEx"};
  const std::string problem = bind(lacking);
  EXPECT_EQ(problem, "the CUDA driver (CUDA 12.8) lacks cuLaunchKernelEx, cuTensorMapEncodeTiled");
  FakeLibrary old_lookup;
  old_lookup.old_lookup = true;
  EXPECT_TRUE(contains(bind(old_lookup), "cuGetProcAddress_v2"));
}

TEST(Driver, OptionalFunctionsMayBeMissing) {
  library = {};
  library.missing = {"cuFuncLoad"};
  Driver driver;
  EXPECT_EQ(bind_driver(fake_find, nullptr, driver), "");
  EXPECT_EQ(driver.cuFuncLoad, nullptr);
  // Newer than the driver says it is: not asked for.
  library = {.version = 12000};
  Driver older;
  EXPECT_EQ(bind_driver(fake_find, nullptr, older), "");
  EXPECT_EQ(older.cuFuncLoad, nullptr);
}

TEST(Driver, NoDeviceAndFailingStart) {
  EXPECT_EQ(bind({.init = kCuNoDevice}), "no CUDA device (cuInit: CUDA_ERROR_NO_DEVICE)");
  const std::string problem = bind({.init = 803});
  EXPECT_TRUE(contains(problem, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803): system has unsupported"))
      << problem;
}

TEST(Driver, ErrorsCarryWhatFailedAndTheDriversWords) {
  const Driver driver = fake_driver();
  const Thrown device = thrown_by([&] { check_driver(driver, 719, "cuSomething"); });
  EXPECT_EQ(device.code, ONCHIP_DEVICE_ERROR);
  EXPECT_EQ(device.text, "cuSomething: CUDA_ERROR_FAKE (719): a planned failure");
  EXPECT_EQ(thrown_by([&] { check_driver(driver, kCuOutOfMemory, "cuSomething"); }).code,
            ONCHIP_OUT_OF_MEMORY);
  EXPECT_EQ(thrown_by([&] { check_driver(driver, kCuSuccess, "cuSomething"); }).code, ONCHIP_OK);
}

// In a child: a process whose parent started the driver cannot use it, and later tests fork.
TEST(Driver, FactsOfThisProcess) {
  const std::string answer = in_child([]() -> std::string {
    const DriverState& state = driver_state();
    const DeviceResult none = device_facts(100000);
    if (none.facts != nullptr || none.problem.empty()) return "a device 100000";
    if (state.driver == nullptr) {
      const bool same = device_facts(0).problem == state.problem && !state.problem.empty();
      return same ? "skip: " + state.problem : "two reasons";
    }
    const DeviceResult first = device_facts(0);
    if (first.facts == nullptr) return first.problem;
    const bool sane = first.facts->compute_capability >= 50 && first.facts->multiprocessors > 0 &&
                      first.facts->shared_bytes_per_block >= 48 * 1024;
    return sane && device_facts(0).facts == first.facts ? "sane" : "not sane";
  });
  if (answer.starts_with("skip: ")) GTEST_SKIP() << answer.substr(6);
  EXPECT_EQ(answer, "sane");
}

// ---- contexts

TEST(ContextScope, UsesTheCallersContextOfTheSameDevice) {
  const Driver driver = fake_driver();
  const CuContext own = fake_context(5);  // of device 0, not its primary one
  fake().stack = {own};
  {
    const ContextScope scope(driver, hopper_facts(0));
    EXPECT_EQ(scope.id(), 1005u);
    EXPECT_EQ(fake().stack, std::vector<CuContext>{own});
  }
  EXPECT_EQ(fake().calls["cuCtxPushCurrent"], 0);
  EXPECT_EQ(fake().stack, std::vector<CuContext>{own});
}

TEST(ContextScope, TakesThePrimaryOneForAnotherDeviceAndGivesTheCallersBack) {
  const Driver driver = fake_driver();
  fake().stack = {fake_context(5)};
  {
    const ContextScope scope(driver, hopper_facts(2));
    EXPECT_EQ(scope.id(), 1033u);
    EXPECT_EQ(fake().stack.back(), fake_context(33));
  }
  EXPECT_EQ(fake().stack, std::vector<CuContext>{fake_context(5)});
}

TEST(ContextScope, LeavesAThreadWithoutContextWithoutOne) {
  const Driver driver = fake_driver();
  {
    const ContextScope scope(driver, hopper_facts(3));
    EXPECT_EQ(fake().stack, std::vector<CuContext>{fake_context(49)});
  }
  EXPECT_TRUE(fake().stack.empty());
}

TEST(ContextScope, RestoresWhereItFails) {
  const Driver driver = fake_driver();
  fake().fails["cuCtxGetId"] = FakeDriver::kFailure;
  const Thrown thrown = thrown_by([&] { const ContextScope scope(driver, hopper_facts(2)); });
  EXPECT_EQ(thrown.code, ONCHIP_DEVICE_ERROR);
  EXPECT_TRUE(fake().stack.empty());
}

TEST(RelaxedCapture, LastsAsLongAsTheScope) {
  const Driver driver = fake_driver();
  {
    const RelaxedCaptureScope scope(driver);
    EXPECT_EQ(fake().capture_mode, CuCaptureMode::relaxed);
  }
  EXPECT_EQ(fake().capture_mode, CuCaptureMode::global);
}

TEST(Capture, AnErrorCountsAsCapturing) {
  const Driver driver = fake_driver();
  EXPECT_FALSE(is_capturing(driver, nullptr));
  fake().capture_status = CuCaptureStatus::active;
  EXPECT_TRUE(is_capturing(driver, nullptr));
  fake().capture_status = CuCaptureStatus::none;
  fake().fails["cuStreamIsCapturing"] = 906;
  EXPECT_TRUE(is_capturing(driver, nullptr));
}

}  // namespace
}  // namespace onchip::gpu::test
