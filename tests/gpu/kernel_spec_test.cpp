#include "gpu/runtime/kernel_spec.hpp"

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

#include "gpu_test_support.hpp"

namespace onchip::gpu::test {
namespace {

std::string identity(const KernelText& text, const KernelSpec& spec, Architecture architecture) {
  return kernel_source(text, spec, architecture).identity;
}

std::vector<std::string> closure_paths(const KernelText& text, const std::string& path) {
  std::vector<std::string> paths;
  for (const EmbeddedFile* file : source_closure(text, path)) paths.emplace_back(file->path);
  return paths;
}

TEST(KernelSpec, Texts) {
  EXPECT_EQ(spec_text(test_spec(96, 1)), "test/kernel[width=96,add=1]");
  EXPECT_EQ(architecture_text({90, true}), "sm_90a");
  EXPECT_EQ(architecture_text({120, false}), "sm_120");
  const KernelSource source = kernel_source({test_files()}, test_spec(96, 1), {90, true});
  EXPECT_EQ(source.request.text,
            "#define ONCHIP_TEST_SPEC 96, 1\n#include \"gpu/kernels/test/kernel.cuh\"\n");
  EXPECT_EQ(source.request.flags.front(), "--gpu-architecture=sm_90a");
}

TEST(KernelSpec, HashTellsSpecsApart) {
  std::set<std::uint64_t> hashes;
  for (std::int32_t width = 0; width < 100; ++width) {
    for (std::int32_t add = 0; add < 100; ++add) hashes.insert(hash_spec(test_spec(width, add)));
  }
  EXPECT_EQ(hashes.size(), 10000u);
  EXPECT_EQ(hash_spec(test_spec(7, 8)), hash_spec(test_spec(7, 8)));
}

TEST(SourceClosure, EachFileOnceAndNoOther) {
  const std::vector<EmbeddedFile> files = {
      embedded("a.cuh", "#include \"b.cuh\"\n  #  include \"c.cuh\" // why\n"),
      embedded("b.cuh", "#include \"d.cuh\"\n#include <not_ours>\n// #include \"e.cuh\"\n"),
      embedded("c.cuh", "#include \"d.cuh\"\n#include \"a.cuh\""),
      embedded("d.cuh", ""),
      embedded("e.cuh", ""),
  };
  EXPECT_EQ(closure_paths({files}, "a.cuh"),
            (std::vector<std::string>{"a.cuh", "b.cuh", "c.cuh", "d.cuh"}));
}

TEST(SourceClosure, NamesWhatIsMissing) {
  const std::vector<EmbeddedFile> files = {embedded("a.cuh", "#include \"gone.cuh\"\n")};
  const Thrown thrown = thrown_by([&] { source_closure({files}, "a.cuh"); });
  EXPECT_EQ(thrown.code, ONCHIP_COMPILE_FAILED);
  EXPECT_EQ(thrown.text, "kernel text \"gone.cuh\", which a.cuh includes, is not in the library");
}

TEST(Identity, FollowsEverythingTheCompilerSees) {
  const std::string base = identity({test_files()}, test_spec(), {90, true});
  EXPECT_EQ(identity({test_files()}, test_spec(), {90, true}), base);
  EXPECT_NE(identity({test_files()}, test_spec(65), {90, true}), base);
  EXPECT_NE(identity({test_files()}, test_spec(64, 1), {90, true}), base);
  EXPECT_NE(identity({test_files()}, test_spec(), {90, false}), base);

  const auto with = [&](std::size_t file, const std::string& extra) {
    std::vector<EmbeddedFile> files = test_files();
    const std::string text = files[file].text + extra;
    files[file] = {files[file].path, text.c_str(), text.size()};
    return identity({files}, test_spec(), {90, true});
  };
  EXPECT_NE(with(0, "\n"), base) << "the kernel's own text";
  EXPECT_NE(with(1, "\n"), base) << "a header it includes";
  EXPECT_EQ(with(2, "\n"), base) << "a header it does not include";
  EXPECT_TRUE(contains(base, "onchip " + std::string(onchip_version()) + "\n")) << base;
}

TEST(EmbeddedText, EveryKernelsTextIsComplete) {
  const KernelText text = embedded_text();
  for (const EmbeddedFile& file : text.files) {
    EXPECT_EQ(thrown_by([&] { source_closure(text, file.path); }).text, "") << file.path;
  }
}

}  // namespace
}  // namespace onchip::gpu::test
