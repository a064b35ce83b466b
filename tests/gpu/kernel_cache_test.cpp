#include "gpu/runtime/kernel_cache.hpp"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <string>
#include <thread>
#include <vector>

#include "gpu_test_support.hpp"

namespace onchip::gpu::test {
namespace {

constexpr Architecture kSm90a = kTestArchitectures[0];

KernelCache::Config config(const FakeCompiler& compiler, const std::string& directory = "",
                           const std::string& archive = "") {
  return {{test_files()}, directory, "", archive, [&compiler] { return compiler.state(); }};
}

CompilerState no_compiler() { return {nullptr, "no NVRTC to be found"}; }

std::string only_entry(const std::string& directory) {
  const auto names = names_in(directory);
  return names.size() == 1 ? directory + "/" + names[0] : std::to_string(names.size()) + " entries";
}

// ---- images

TEST(KernelCache, CompilesOnceForManyCallsAndThreads) {
  FakeCompiler compiler;
  compiler.during = [] { usleep(20000); };
  KernelCache cache(config(compiler));
  std::vector<std::thread> threads;
  std::atomic<int> right{0};
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&, i] {
      const KernelSpec spec = test_spec(64, i % 2);
      for (int k = 0; k < 50; ++k) {
        right += code_of(*cache.image(spec, kSm90a)) == code_for(spec);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(right, 400);
  EXPECT_EQ(compiler.count, 2) << "one for each of two specs";
  EXPECT_EQ(cache.counts().compiled, 2u);
}

TEST(KernelCache, LaterProcessesFindItOnDisk) {
  const TempDir dir;
  FakeCompiler compiler;
  KernelCache first(config(compiler, dir.file("cache")));
  EXPECT_EQ(first.image(test_spec(), kSm90a)->origin, ImageOrigin::compiler);
  KernelCache second(config(compiler, dir.file("cache")));
  const auto image = second.image(test_spec(), kSm90a);
  EXPECT_EQ(image->origin, ImageOrigin::disk);
  EXPECT_EQ(code_of(*image), code_for(test_spec()));
  EXPECT_EQ(image->image.resources.registers, 42);
  EXPECT_EQ(compiler.count, 1);
}

TEST(KernelCache, AnotherCompilerArchitectureOrTextIsAnotherKernel) {
  const TempDir dir;
  FakeCompiler compiler;
  KernelCache(config(compiler, dir.file("cache"))).image(test_spec(), kSm90a);
  compiler.set_version("13.1");
  KernelCache(config(compiler, dir.file("cache"))).image(test_spec(), kSm90a);
  EXPECT_EQ(compiler.count, 2);
  KernelCache(config(compiler, dir.file("cache"))).image(test_spec(), {100, true});
  EXPECT_EQ(compiler.count, 3);
  std::vector<EmbeddedFile> changed = test_files();
  changed[1] = embedded("gpu/tile/test.cuh", "constexpr int twice(int x) { return x + x; }\n");
  KernelCache::Config other = config(compiler, dir.file("cache"));
  other.text = {changed};
  KernelCache(other).image(test_spec(), kSm90a);
  EXPECT_EQ(compiler.count, 4);
}

TEST(KernelCache, RacingProcessesAllGetTheRightKernel) {
  const TempDir dir;
  std::vector<Child> children;
  for (int i = 0; i < 6; ++i) {
    children.push_back(start_child([&] {
      FakeCompiler compiler;
      compiler.during = [] { usleep(30000); };
      KernelCache cache(config(compiler, dir.file("cache")));
      for (int k = 0; k < 20; ++k) {
        // A fresh object each time: a reader while others write.
        KernelCache again(config(compiler, dir.file("cache")));
        if (code_of(*again.image(test_spec(), kSm90a)) != code_for(test_spec())) return "wrong";
        if (!again.disk().problem().empty()) return "a problem";
      }
      return compiler.count <= 1 ? "right" : "compiled again";
    }));
  }
  for (const Child& child : children) EXPECT_EQ(finish_child(child), "right");
  EXPECT_TRUE(only_entry(dir.file("cache")).ends_with(".kernel"));
  FakeCompiler compiler;
  KernelCache cache(config(compiler, dir.file("cache")));
  EXPECT_EQ(cache.image(test_spec(), kSm90a)->origin, ImageOrigin::disk);
}

TEST(KernelCache, BadEntriesAreRebuiltNotFatal) {
  const TempDir dir;
  FakeCompiler compiler;
  KernelCache(config(compiler, dir.file("cache"))).image(test_spec(), kSm90a);
  const std::string entry = only_entry(dir.file("cache"));
  const std::string good = read_all(entry);
  std::string flipped = good;
  flipped[good.size() / 2] = static_cast<char>(flipped[good.size() / 2] ^ 4);
  int compiles = 1;
  for (const std::string& bad :
       {std::string(), good.substr(0, good.size() / 2), flipped, std::string(4096, 'x')}) {
    write_all(entry, bad);
    KernelCache cache(config(compiler, dir.file("cache")));
    const auto image = cache.image(test_spec(), kSm90a);
    EXPECT_EQ(code_of(*image), code_for(test_spec()));
    EXPECT_EQ(image->origin, ImageOrigin::compiler);
    EXPECT_TRUE(contains(cache.disk().problem(), "is not used")) << cache.disk().problem();
    EXPECT_EQ(compiler.count, ++compiles);
    EXPECT_EQ(read_all(entry), good) << "replaced";
  }
}

TEST(KernelCache, ALegalEntryOfAnotherKernelIsNotRun) {
  const TempDir dir;
  FakeCompiler compiler;
  KernelCache(config(compiler, dir.file("cache"))).image(test_spec(), kSm90a);
  const std::string entry = only_entry(dir.file("cache"));
  KernelCache(config(compiler, dir.file("other"))).image(test_spec(128), kSm90a);
  write_all(entry, read_all(only_entry(dir.file("other"))));
  KernelCache cache(config(compiler, dir.file("cache")));
  EXPECT_EQ(code_of(*cache.image(test_spec(), kSm90a)), code_for(test_spec()));
  EXPECT_TRUE(contains(cache.disk().problem(), "it was made for something else"));
}

TEST(KernelCache, WorksFromMemoryWhereTheFolderCannotBeUsed) {
  const TempDir dir;
  write_all(dir.file("file"), "");
  FakeCompiler compiler;
  KernelCache cache(config(compiler, dir.file("file/cache")));
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(code_of(*cache.image(test_spec(), kSm90a)), code_for(test_spec()));
  }
  EXPECT_EQ(compiler.count, 1);
  EXPECT_TRUE(contains(cache.disk().problem(), "Not a directory")) << cache.disk().problem();
}

TEST(KernelCache, FailedCompileSaysWhyAndLeavesNothing) {
  const TempDir dir;
  FakeCompiler compiler;
  compiler.fail = true;
  compiler.log = "kernel.cuh(7): error: planned";
  KernelCache cache(config(compiler, dir.file("cache")));
  const Thrown thrown = thrown_by([&] { cache.image(test_spec(), kSm90a); });
  EXPECT_EQ(thrown.code, ONCHIP_COMPILE_FAILED);
  EXPECT_EQ(thrown.text,
            "test/kernel[width=64,add=0] for sm_90a: NVRTC 13.0 (/fake/libnvrtc.so.13) fails: "
            "kernel.cuh(7): error: planned");
  EXPECT_FALSE(std::filesystem::exists(dir.file("cache")));
  EXPECT_EQ(cache.counts().compiled, 0u);

  compiler.log = std::string(100000, 'x');
  EXPECT_LT(thrown_by([&] { cache.image(test_spec(), kSm90a); }).text.size(), 9000u);

  compiler.fail = false;
  EXPECT_EQ(code_of(*cache.image(test_spec(), kSm90a)), code_for(test_spec()));
}

TEST(KernelCache, MissingCompiler) {
  const TempDir dir;
  FakeCompiler compiler;
  KernelCache(config(compiler, dir.file("cache"))).image(test_spec(), kSm90a);
  KernelCache cache({{test_files()}, dir.file("cache"), "", "", no_compiler});
  EXPECT_EQ(cache.why_unobtainable(test_spec(), kSm90a), "no NVRTC to be found");
  const Thrown thrown = thrown_by([&] { cache.image(test_spec(), kSm90a); });
  EXPECT_EQ(thrown.code, ONCHIP_COMPILE_FAILED);
  EXPECT_EQ(thrown.text, "test/kernel[width=64,add=0] for sm_90a: no NVRTC to be found");
}

TEST(KernelCache, MissingText) {
  FakeCompiler compiler;
  KernelCache::Config without = config(compiler);
  without.text = {};
  KernelCache cache(without);
  EXPECT_TRUE(contains(cache.why_unobtainable(test_spec(), kSm90a), "is not in the library"));
}

TEST(KernelCache, TheArchiveNeedsNoCompiler) {
  const TempDir dir;
  FakeCompiler compiler;
  KernelCache maker(config(compiler));
  const std::vector<KernelImage> images = {maker.image(test_spec(64), kSm90a)->image,
                                           maker.image(test_spec(128), kSm90a)->image};
  write_archive(dir.file("archive"), images);

  KernelCache cache({{test_files()}, "", "", dir.file("archive"), no_compiler});
  EXPECT_EQ(cache.archive_problem(), "");
  EXPECT_EQ(cache.why_unobtainable(test_spec(128), kSm90a), "");
  const auto image = cache.image(test_spec(128), kSm90a);
  EXPECT_EQ(image->origin, ImageOrigin::archive);
  EXPECT_EQ(code_of(*image), code_for(test_spec(128)));
  EXPECT_EQ(cache.why_unobtainable(test_spec(192), kSm90a), "no NVRTC to be found");
}

TEST(KernelCache, AnArchiveOfOtherTextIsNotUsed) {
  const TempDir dir;
  FakeCompiler compiler;
  KernelCache maker(config(compiler));
  write_archive(dir.file("archive"),
                std::vector<KernelImage>{maker.image(test_spec(), kSm90a)->image});
  std::vector<EmbeddedFile> changed = test_files();
  changed[1] = embedded("gpu/tile/test.cuh", "constexpr int twice(int x) { return x + x; }\n");
  KernelCache::Config other = config(compiler, "", dir.file("archive"));
  other.text = {changed};
  KernelCache cache(other);
  EXPECT_EQ(cache.image(test_spec(), kSm90a)->origin, ImageOrigin::compiler);
}

TEST(KernelCache, ADamagedArchiveCostsACompile) {
  const TempDir dir;
  FakeCompiler compiler;
  KernelCache maker(config(compiler));
  write_archive(dir.file("archive"),
                std::vector<KernelImage>{maker.image(test_spec(), kSm90a)->image});
  std::string bytes = read_all(dir.file("archive"));
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  write_all(dir.file("record"), bytes);
  write_all(dir.file("header"), bytes.substr(0, 20));
  for (const char* name : {"record", "header", "none"}) {
    KernelCache cache(config(compiler, "", dir.file(name)));
    EXPECT_EQ(code_of(*cache.image(test_spec(), kSm90a)), code_for(test_spec())) << name;
    EXPECT_NE(cache.archive_problem(), "") << name;
  }
}

TEST(KernelCache, RealCompilerThroughTheWholeChain) {
  ONCHIP_REQUIRE_NVRTC(nvrtc)
  const TempDir dir;
  // "origin shared-memory machine-code", in a process that loads the compiler.
  const auto make = [&] {
    return in_child([&] {
      const Compiler compiler = open_nvrtc(nvrtc);
      KernelCache cache({{test_files()}, dir.file("cache"), "", "", [&] {
                           return CompilerState{&compiler, {}};
                         }});
      const auto image = cache.image(test_spec(), kSm90a);
      return std::string(origin_name(image->origin)) + " " +
             std::to_string(image->image.resources.static_shared_bytes) + " " + code_of(*image);
    });
  };
  const std::string elf =
      "\x7f"
      "ELF";
  const std::string first = make();
  const std::string second = make();
  EXPECT_TRUE(first.starts_with("compiler 512 " + elf)) << first.substr(0, 300);
  EXPECT_TRUE(second.starts_with("disk 512 " + elf)) << second.substr(0, 300);
  EXPECT_EQ(first.substr(first.find(elf)), second.substr(second.find(elf)));
}

// ---- functions

struct Loading {
  Driver driver = fake_driver();
  FakeCompiler compiler;
  KernelCache cache{config(compiler)};

  CuFunction function(std::int32_t device, const KernelSpec& spec = test_spec()) {
    const DeviceFacts facts = hopper_facts(device);
    const ContextScope scope(driver, facts);
    return cache.function(driver, facts, scope, spec, nullptr);
  }
};

TEST(KernelCache, LoadsOnceForEachContext) {
  Loading loading;
  const CuFunction first = loading.function(0);
  EXPECT_EQ(loading.function(0), first);
  EXPECT_NE(loading.function(1), first);
  fake().stack = {fake_context(7)};  // another context of device 0
  EXPECT_NE(loading.function(0), first);
  EXPECT_EQ(loading.cache.counts().loaded, 3u);
  EXPECT_EQ(loading.compiler.count, 1);
  EXPECT_EQ(fake().max_dynamic_shared, kTestSharedBytes);
  EXPECT_EQ(fake().loaded[0], code_for(test_spec()).substr(0, 8));
}

TEST(KernelCache, LoadsWithRelaxedCaptureModeOnly) {
  Loading loading;
  loading.function(0);
  EXPECT_EQ(fake().mode_at_load, std::vector<CuCaptureMode>{CuCaptureMode::relaxed});
  EXPECT_EQ(fake().capture_mode, CuCaptureMode::global);
  const int exchanges = fake().calls["cuThreadExchangeStreamCaptureMode"];
  loading.function(0);
  EXPECT_EQ(fake().calls["cuThreadExchangeStreamCaptureMode"], exchanges);
}

TEST(KernelCache, FailedLoadSaysWhyAndIsTriedAgain) {
  for (const char* name : {"cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute",
                           "cuFuncLoad", "cuThreadExchangeStreamCaptureMode"}) {
    Loading loading;
    fake().fails[name] = FakeDriver::kFailure;
    const Thrown thrown = thrown_by([&] { loading.function(0); });
    EXPECT_EQ(thrown.code, ONCHIP_DEVICE_ERROR) << name;
    EXPECT_TRUE(contains(thrown.text, "test/kernel[width=64,add=0]: " + std::string(name)))
        << thrown.text;
    EXPECT_TRUE(contains(thrown.text, "CUDA_ERROR_FAKE")) << thrown.text;
    EXPECT_FALSE(contains(thrown.text, "kernels warm")) << thrown.text;
    EXPECT_EQ(fake().unloaded, static_cast<int>(fake().loaded.size())) << name;
    EXPECT_EQ(fake().capture_mode, CuCaptureMode::global) << name;
    EXPECT_TRUE(fake().stack.empty()) << name;
    fake().fails.clear();
    EXPECT_NE(loading.function(0), nullptr) << name;
  }
}

TEST(KernelCache, FailedLoadUnderCaptureNamesTheWayOut) {
  Loading loading;
  fake().fails["cuModuleLoadData"] = 900;
  fake().capture_status = CuCaptureStatus::active;
  const Thrown thrown = thrown_by([&] { loading.function(0); });
  EXPECT_TRUE(contains(thrown.text, "the stream is being captured")) << thrown.text;
  EXPECT_TRUE(contains(thrown.text, "onchip kernels warm")) << thrown.text;
}

// An archive whose one kernel the driver refuses as long as `fails` says so.
struct ForeignArchive {
  TempDir dir;
  FakeCompiler compiler;

  std::string path() {
    KernelCache maker(config(compiler));
    const std::vector<KernelImage> images = {maker.image(test_spec(), {90, true})->image};
    write_archive(dir.file("archive"), images);
    return dir.file("archive");
  }
};

TEST(KernelCache, WhatTheDriverRefusesOfTheArchiveIsCompiled) {
  for (const CuResult refusal : {kCuInvalidImage, kCuNoBinaryForGpu}) {
    ForeignArchive foreign;
    KernelCache cache(config(foreign.compiler, "", foreign.path()));
    const Driver driver = fake_driver();
    const DeviceFacts facts = hopper_facts(0);
    fake().fails_once["cuModuleLoadData"] = refusal;
    {
      const ContextScope scope(driver, facts);
      EXPECT_NE(cache.function(driver, facts, scope, test_spec(), nullptr), nullptr);
    }
    EXPECT_EQ(fake().calls["cuModuleLoadData"], 2);
    EXPECT_EQ(cache.counts().compiled, 1u);
    EXPECT_EQ(cache.image(test_spec(), {90, true})->origin, ImageOrigin::compiler);
    EXPECT_TRUE(contains(cache.archive_problem(), "is not loaded by this driver: CUDA_ERROR_FAKE"))
        << cache.archive_problem();
  }
}

TEST(KernelCache, WhatTheDriverRefusesOfTheArchiveIsAnErrorWithoutACompiler) {
  ForeignArchive foreign;
  const std::string path = foreign.path();
  KernelCache cache(
      {{test_files()}, "", "", path, [] { return CompilerState{nullptr, "no NVRTC here"}; }});
  const Driver driver = fake_driver();
  const DeviceFacts facts = hopper_facts(0);
  fake().fails["cuModuleLoadData"] = kCuInvalidImage;
  const ContextScope scope(driver, facts);
  const Thrown thrown =
      thrown_by([&] { cache.function(driver, facts, scope, test_spec(), nullptr); });
  EXPECT_EQ(thrown.code, ONCHIP_COMPILE_FAILED);
  EXPECT_TRUE(contains(thrown.text, "is not loaded by this driver")) << thrown.text;
  EXPECT_TRUE(contains(thrown.text, "no NVRTC here")) << thrown.text;
}

TEST(KernelCache, OtherFailuresOfAnArchivedKernelAreNotCompiledAround) {
  ForeignArchive foreign;
  KernelCache cache(config(foreign.compiler, "", foreign.path()));
  const int compiled = foreign.compiler.count;
  const Driver driver = fake_driver();
  const DeviceFacts facts = hopper_facts(0);
  fake().fails["cuModuleLoadData"] = FakeDriver::kFailure;
  const ContextScope scope(driver, facts);
  EXPECT_EQ(thrown_by([&] { cache.function(driver, facts, scope, test_spec(), nullptr); }).code,
            ONCHIP_DEVICE_ERROR);
  EXPECT_EQ(foreign.compiler.count, compiled);
}

TEST(FunctionTable, FindsEachOfManyWhileOthersAdd) {
  FunctionTable table;
  constexpr std::int32_t kCount = 2000;
  const auto value = [](std::int32_t i) {
    return reinterpret_cast<CuFunction>(static_cast<std::uintptr_t>(i + 1));
  };
  std::atomic<std::int32_t> added{0};
  std::atomic<int> wrong{0};
  std::vector<std::thread> readers;
  for (int r = 0; r < 3; ++r) {
    readers.emplace_back([&] {
      for (std::int32_t seen = 0; seen < kCount;) {
        seen = added.load();
        for (std::int32_t i = 0; i < seen; i += 37) {
          wrong += table.find(test_spec(i), 5) != value(i);
          wrong += table.find(test_spec(i), 6) != nullptr;
        }
      }
    });
  }
  for (std::int32_t i = 0; i < kCount; ++i) {
    table.insert(test_spec(i), 5, value(i));
    added.store(i + 1);
  }
  for (std::thread& reader : readers) reader.join();
  EXPECT_EQ(wrong, 0);
  for (std::int32_t i = 0; i < kCount; ++i) ASSERT_EQ(table.find(test_spec(i), 5), value(i));
  EXPECT_EQ(table.find(test_spec(kCount), 5), nullptr);
}

}  // namespace
}  // namespace onchip::gpu::test
