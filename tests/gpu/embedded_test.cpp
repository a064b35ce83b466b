#include "gpu/runtime/embedded.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>

namespace onchip::gpu {
namespace {

std::string read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

TEST(Embedded, HoldsTheFilesAsTheyAre) {
  ASSERT_GT(embedded_file_count, 0u);
  for (std::size_t i = 0; i < embedded_file_count; ++i) {
    const EmbeddedFile& file = embedded_files[i];
    EXPECT_EQ(std::strlen(file.text), file.size) << file.path;
    const std::string source = read(std::string(ONCHIP_SOURCE_DIR "/src/") + file.path);
    EXPECT_FALSE(source.empty()) << file.path;
    EXPECT_EQ(std::string_view(file.text, file.size), source) << file.path;
  }
}

TEST(Embedded, IsSortedAndHoldsDeviceTextOnly) {
  for (std::size_t i = 0; i < embedded_file_count; ++i) {
    const std::string_view path = embedded_files[i].path;
    EXPECT_TRUE(path.ends_with(".cuh") || path.ends_with("_plan.hpp")) << path;
    if (i > 0) {
      EXPECT_LT(std::string_view(embedded_files[i - 1].path), path);
    }
  }
}

}  // namespace
}  // namespace onchip::gpu
