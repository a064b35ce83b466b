// onchip_kernels_* and what onchip_describe says of GPUs, each in a process with its own settings.
#include <gtest/gtest.h>
#include <onchip/onchip.h>

#include <string>

#include "core/settings.hpp"
#include "gpu/kernels/registry.hpp"
#include "gpu/runtime/kernel_archive.hpp"
#include "gpu_test_support.hpp"

namespace onchip::gpu::test {
namespace {

constexpr char kNowhere[] = "/nowhere/libnvrtc.so.13";
// One registered variant.
constexpr char kOne[] = "[bf16=1,head_dim_qk=64,head_dim_v=64,causal=0,varlen=0";

std::size_t count_of(const std::string& text, const std::string& part) {
  std::size_t count = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) {
    ++count;
  }
  return count;
}

// The text, or "status: message".
template <typename Call>
std::string text_of(Call&& call) {
  std::size_t length = 0;
  onchip_status status = call(nullptr, std::size_t{0}, &length);
  std::string text(length + 1, '?');
  if (status == ONCHIP_OK) status = call(text.data(), text.size(), nullptr);
  if (status != ONCHIP_OK) {
    return std::string(onchip_status_name(status)) + ": " + onchip_last_error();
  }
  text.pop_back();
  return text;
}

std::string list(const char* filter) {
  return text_of([=](char* text, std::size_t capacity, std::size_t* length) {
    return onchip_kernels_list(filter, text, capacity, length);
  });
}
std::string resources(const char* filter) {
  return text_of([=](char* text, std::size_t capacity, std::size_t* length) {
    return onchip_kernels_resources(filter, text, capacity, length);
  });
}
std::string outcome(onchip_status status) {
  return status == ONCHIP_OK ? "ok"
                             : std::string(onchip_status_name(status)) + ": " + onchip_last_error();
}

std::string with_settings(const std::string& nvrtc, const std::string& cache_dir,
                          const std::function<std::string()>& body) {
  return in_child([&]() -> std::string {
    setenv("ONCHIP_NVRTC", nvrtc.c_str(), 1);
    setenv("ONCHIP_CACHE_DIR", cache_dir.c_str(), 1);
    if (settings().nvrtc != nvrtc) return "the settings were read before";
    return body();
  });
}

TEST(KernelsApi, ListNamesEveryRegisteredVariant) {
  std::size_t variants = 0;
  for (const KernelDefinition* kernel : kernel_definitions()) {
    variants += static_cast<std::size_t>(kernel->registered_count) * kernel->architectures.size();
  }
  const std::string all = list(nullptr);
  EXPECT_EQ(count_of(all, "{\"name\": "), variants) << all;
  EXPECT_EQ(all, list(""));
  EXPECT_EQ(count_of(list(kOne), "{\"name\": "), 1u) << list(kOne);
  EXPECT_TRUE(contains(list(kOne), "\"architecture\": \"sm_90a\"")) << list(kOne);
  EXPECT_TRUE(contains(list(kOne), "\"spec\": {\"bf16\": 1, \"head_dim_qk\": 64,")) << list(kOne);
}

TEST(KernelsApi, AFilterThatPicksNothingIsRefused) {
  const std::string answer = with_settings(kNowhere, "off", [] {
    return list("sm_31337") + "\n" + resources("sm_31337") + "\n" +
           outcome(onchip_kernels_warm("sm_31337")) + "\n" +
           outcome(onchip_kernels_build("sm_31337", "/nowhere/archive"));
  });
  EXPECT_EQ(count_of(answer, "invalid_argument: kernels_"), 4u) << answer;
  EXPECT_EQ(count_of(answer, "filter: got \"sm_31337\""), 4u) << answer;
}

TEST(KernelsApi, WithoutACompiler) {
  const TempDir dir;
  const std::string answer = with_settings(kNowhere, dir.file("cache"), [&] {
    return resources(kOne) + "\n" + outcome(onchip_kernels_warm(kOne)) + "\n" +
           outcome(onchip_kernels_build(kOne, dir.file("archive").c_str()));
  });
  EXPECT_EQ(count_of(answer, "compile_failed: cuda.sm90/attention_forward"), 3u) << answer;
  EXPECT_EQ(count_of(answer, "no NVRTC to compile GPU kernels with (ONCHIP_NVRTC: /nowhere/"), 3u)
      << answer;
  EXPECT_TRUE(names_in(dir.path()).empty());
}

TEST(KernelsApi, WarmThenResourcesThenBuild) {
  ONCHIP_REQUIRE_NVRTC(nvrtc)
  const TempDir dir;
  const auto warm = [] { return outcome(onchip_kernels_warm(kOne)); };
  ASSERT_EQ(with_settings(nvrtc, dir.file("cache"), warm), "ok");
  EXPECT_EQ(names_in(dir.file("cache")).size(), 1u);

  const std::string later = with_settings(nvrtc, dir.file("cache"), [] { return resources(kOne); });
  EXPECT_TRUE(contains(later, "\"origin\": \"disk\"")) << later;
  EXPECT_TRUE(contains(later, "\"spill_store_bytes\": 0")) << later;
  EXPECT_FALSE(contains(later, "\"registers\": 0,")) << later;

  const std::string path = dir.file("archive");
  const auto build = [&] { return outcome(onchip_kernels_build(kOne, path.c_str())); };
  ASSERT_EQ(with_settings(nvrtc, dir.file("cache"), build), "ok");
  KernelArchive archive;
  EXPECT_EQ(archive.open(path), "");
  EXPECT_EQ(archive.count(), 1u);

  // What an archive holds needs neither compiler nor cache.
  KernelCache cache({embedded_text(), "", "", path, [] { return CompilerState{nullptr, "none"}; }});
  KernelSpec spec = kernel_definitions()[0]->registered(0);
  for (std::int32_t i = 0; i < kernel_definitions()[0]->registered_count; ++i) {
    if (contains(spec_text(kernel_definitions()[0]->registered(i)), kOne)) {
      spec = kernel_definitions()[0]->registered(i);
    }
  }
  EXPECT_EQ(cache.image(spec, {90, true})->origin, ImageOrigin::archive);
}

TEST(KernelsApi, WarmingNothingIsAFailure) {
  ONCHIP_REQUIRE_NVRTC(nvrtc)
  const TempDir dir;
  write_all(dir.file("file"), "");
  const auto warm = [] { return outcome(onchip_kernels_warm(kOne)); };
  EXPECT_EQ(with_settings(nvrtc, "off", warm),
            "unsupported: kernels_warm: there is no kernel cache to warm: ONCHIP_CACHE_DIR is off");
  const std::string relative = with_settings(nvrtc, "relative", warm);
  EXPECT_TRUE(contains(relative, "wanted an absolute path or off")) << relative;
  const std::string unusable = with_settings(nvrtc, dir.file("file/cache"), warm);
  EXPECT_TRUE(contains(unusable, "what was compiled could not be kept: ")) << unusable;
  EXPECT_TRUE(contains(unusable, "Not a directory")) << unusable;
}

TEST(KernelsApi, DescribeShowsWhatIsMissing) {
  const std::string answer = with_settings(kNowhere, "relative", [] {
    return text_of([](char* text, std::size_t capacity, std::size_t* length) {
      return onchip_describe(text, capacity, length);
    });
  });
  EXPECT_TRUE(contains(answer, "\"gpu\": {\"driver\": {")) << answer;
  EXPECT_TRUE(contains(answer, "ONCHIP_NVRTC: /nowhere/")) << answer;
  EXPECT_TRUE(contains(answer, "ONCHIP_CACHE_DIR: got \\\"relative\\\", wanted an absolute"))
      << answer;
}

}  // namespace
}  // namespace onchip::gpu::test
