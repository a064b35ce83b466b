#include "gpu/runtime/nvrtc.hpp"

#include <dlfcn.h>

#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "gpu_test_support.hpp"

namespace onchip::gpu::test {
namespace {

namespace fs = std::filesystem;

// Libraries stay loaded, so every search that may find one runs in a process of its own. The answer
// is "version path", or the problem.
std::string found(const NvrtcSearch& search, const std::function<void()>& before = {}) {
  return in_child([&] {
    if (before) before();
    Compiler compiler;
    const std::string problem = load_nvrtc(search, compiler);
    return problem.empty() ? compiler.version + " " + compiler.path : problem;
  });
}

NvrtcSearch nothing() {
  NvrtcSearch search;
  search.loaded_copy = search.system = false;
  return search;
}

// Links to the library of `nvrtc`, and to its builtins if wanted, in a folder.
void link_nvrtc(const std::string& nvrtc, const std::string& folder, bool builtins) {
  fs::create_directories(folder);
  for (const auto& entry : fs::directory_iterator(fs::path(nvrtc).parent_path())) {
    const std::string name = entry.path().filename().string();
    if (builtins && name.starts_with("libnvrtc-builtins.so")) {
      fs::create_symlink(entry.path(), fs::path(folder) / name);
    }
  }
  fs::create_symlink(nvrtc, fs::path(folder) / fs::path(nvrtc).filename());
}

CompileRequest request_for(const KernelSpec& spec) {
  return kernel_source({test_files()}, spec, kTestArchitectures[0]).request;
}

// Compiles the test kernel: "registers shared" or the log.
std::string compiled(const Compiler& compiler, const CompileRequest& request) {
  const CompileResult result = compiler.compile(request);
  if (result.cubin.empty()) return "failed: " + result.log;
  const KernelResources resources = parse_ptxas_log(result.log, "onchip_test_kernel");
  return std::to_string(resources.registers > 0) + " " +
         std::to_string(resources.static_shared_bytes);
}

TEST(Nvrtc, SettingThatPointsNowhereIsTheOnlyPlaceTried) {
  NvrtcSearch search;
  search.setting = "/nowhere/libnvrtc.so.13";
  search.cuda_home = "/also/nowhere";
  const std::string problem = found(search);
  EXPECT_TRUE(contains(problem, "no NVRTC to compile GPU kernels with (ONCHIP_NVRTC: /nowhere/"))
      << problem;
  EXPECT_FALSE(contains(problem, "CUDA_HOME:")) << problem;
  EXPECT_TRUE(contains(problem, "pip install nvidia-cuda-nvrtc")) << problem;
}

TEST(Nvrtc, ALibraryThatIsNotNvrtc) {
  NvrtcSearch search;
  search.setting = "libm.so.6";
  const std::string problem = found(search);
  EXPECT_TRUE(contains(problem, "it lacks nvrtcVersion")) << problem;
}

TEST(Nvrtc, ListsThePlacesWhereItWasNotFound) {
  NvrtcSearch search = nothing();
  search.package_roots = {"/no/site-packages"};
  search.cuda_home = "/no/cuda";
  const std::string problem = found(search);
  EXPECT_TRUE(contains(problem, "CUDA_HOME: /no/cuda holds no libnvrtc.so.13 or .12")) << problem;
}

TEST(Nvrtc, FindsItAmongPythonPackages) {
  ONCHIP_REQUIRE_NVRTC(nvrtc)
  const TempDir dir;
  const bool cu13 = contains(nvrtc, ".so.13");
  const std::string folder = dir.file(cu13 ? "nvidia/cu13/lib" : "nvidia/cuda_nvrtc/lib");
  link_nvrtc(nvrtc, folder, true);
  NvrtcSearch search = nothing();
  search.package_roots = {"/no/site-packages", dir.path()};
  search.cuda_home = "/no/cuda";
  EXPECT_TRUE(contains(found(search), " " + folder + "/libnvrtc.so.")) << found(search);
}

TEST(Nvrtc, FindsItUnderCudaHome) {
  ONCHIP_REQUIRE_NVRTC(nvrtc)
  const TempDir dir;
  link_nvrtc(nvrtc, dir.file("lib64"), true);
  NvrtcSearch search = nothing();
  search.cuda_home = dir.path();
  EXPECT_TRUE(contains(found(search), " " + dir.file("lib64/libnvrtc.so."))) << found(search);
}

TEST(Nvrtc, PrefersTheCopyThatIsLoaded) {
  ONCHIP_REQUIRE_NVRTC(nvrtc)
  NvrtcSearch search = nothing();
  search.loaded_copy = true;
  const std::string answer = found(search, [&] { dlopen(nvrtc.c_str(), RTLD_NOW | RTLD_LOCAL); });
  EXPECT_TRUE(contains(answer, " " + nvrtc)) << answer;
}

TEST(Nvrtc, OpensTheBuiltinsThatLieBesideIt) {
  ONCHIP_REQUIRE_NVRTC(nvrtc)
  const TempDir dir;
  link_nvrtc(nvrtc, dir.file("whole"), true);
  link_nvrtc(nvrtc, dir.file("alone"), false);
  const std::string name = fs::path(nvrtc).filename().string();
  const auto compile_with = [&](const std::string& library) {
    return in_child([&] {
      unsetenv("LD_LIBRARY_PATH");
      return compiled(open_nvrtc(library), request_for(test_spec()));
    });
  };
  EXPECT_EQ(compile_with(dir.file("whole/" + name)), "1 512");
  // Without them a compile fails with the reason in the log, unless the system has them elsewhere.
  const std::string alone = compile_with(dir.file("alone/" + name));
  if (alone != "1 512") {
    EXPECT_TRUE(contains(alone, "libnvrtc-builtins")) << alone;
  }
}

// In a process of its own, as all that loads the library: later tests would find it loaded.
std::string compiled_apart(const std::string& nvrtc, const CompileRequest& request) {
  return in_child([&] { return compiled(open_nvrtc(nvrtc), request); });
}

TEST(Nvrtc, CompilesForTheValuesOfTheSpec) {
  ONCHIP_REQUIRE_NVRTC(nvrtc)
  EXPECT_EQ(compiled_apart(nvrtc, request_for(test_spec(64))), "1 512");
  EXPECT_EQ(compiled_apart(nvrtc, request_for(test_spec(128, 1))), "1 1024");
}

TEST(Nvrtc, SameTextSameMachineCode) {
  ONCHIP_REQUIRE_NVRTC(nvrtc)
  const auto code = [&] {
    return in_child([&] {
      const auto cubin = open_nvrtc(nvrtc).compile(request_for(test_spec())).cubin;
      return std::string(cubin.begin(), cubin.end());
    });
  };
  const std::string once = code();
  EXPECT_GT(once.size(), 1000u);
  EXPECT_EQ(once, code());
}

TEST(Nvrtc, FailedCompileHasALogAndNoCode) {
  ONCHIP_REQUIRE_NVRTC(nvrtc)
  CompileRequest wrong = request_for(test_spec());
  wrong.text += "this is no C++\n";
  const std::string error = compiled_apart(nvrtc, wrong);
  EXPECT_TRUE(contains(error, "failed: NVRTC_ERROR_COMPILATION")) << error;
  EXPECT_TRUE(contains(error, "onchip_test_kernel.cu(3): error")) << error;

  CompileRequest unknown = request_for(test_spec());
  unknown.flags[0] = "--gpu-architecture=sm_31337";
  EXPECT_TRUE(contains(compiled_apart(nvrtc, unknown), "failed: NVRTC_ERROR_INVALID_OPTION"))
      << compiled_apart(nvrtc, unknown);
}

TEST(Nvrtc, ReadsNoFileOfTheCurrentFolder) {
  ONCHIP_REQUIRE_NVRTC(nvrtc)
  const TempDir dir;
  write_all(dir.file("stray.cuh"), "#define ONCHIP_STRAY 1\n");
  const std::string answer = in_child([&]() -> std::string {
    if (chdir(dir.path().c_str()) != 0) return "chdir fails";
    CompileRequest request = request_for(test_spec());
    request.text += "#include \"stray.cuh\"\n";
    return compiled(open_nvrtc(nvrtc), request);
  });
  EXPECT_TRUE(contains(answer, "failed: ")) << answer;
  EXPECT_TRUE(contains(answer, "stray.cuh")) << answer;
}

TEST(PackageRoots, OwnFoldersFirstThenThoseOfLoadedModules) {
  const auto roots = package_roots(
      "/home/u/src/build/lib/libonchip.so",
      {"", "linux-vdso.so.1", "/v/lib/python3.12/site-packages/numpy/_core/x.so",
       "/usr/lib/python3/dist-packages/y.so", "/v/lib/python3.12/site-packages/torch/z.so"});
  const std::vector<std::string> wanted = {"/home/u/src/build/lib",
                                           "/home/u/src/build",
                                           "/home/u/src",
                                           "/home/u",
                                           "/v/lib/python3.12/site-packages",
                                           "/usr/lib/python3/dist-packages"};
  EXPECT_EQ(roots, wanted);
}

TEST(PtxasLog, OnlyTheEntrysLines) {
  const KernelResources resources = parse_ptxas_log(
      "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are "
      "serialized due to ...\n"
      "ptxas info    : 0 bytes gmem\n"
      "ptxas info    : Compiling entry function 'other' for 'sm_90a'\n"
      "ptxas info    : Function properties for other\n"
      "ptxas         .     8 bytes stack frame, 9 bytes spill stores, 10 bytes spill loads\n"
      "ptxas info    : Used 99 registers, used 3 barriers, 77 bytes smem\n"
      "ptxas info    : Compiling entry function 'entry' for 'sm_90a'\n"
      "ptxas info    : Function properties for entry\n"
      "    16 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads\r\n"
      "ptxas info    : Used 168 registers, used 16 barriers, 16 bytes cumulative stack size, 48 "
      "bytes smem, 400 bytes cmem[0]\n",
      "entry");
  EXPECT_EQ(resources, (KernelResources{.registers = 168,
                                        .spill_store_bytes = 12,
                                        .spill_load_bytes = 20,
                                        .stack_bytes = 16,
                                        .static_shared_bytes = 48,
                                        .barriers = 16,
                                        .advisories = 1}));
  EXPECT_EQ(parse_ptxas_log("", "entry"), KernelResources{});
  EXPECT_EQ(parse_ptxas_log("Used  registers", "entry"), KernelResources{});
}

}  // namespace
}  // namespace onchip::gpu::test
