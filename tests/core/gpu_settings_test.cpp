#include <gtest/gtest.h>

#include "core/settings.hpp"

namespace onchip {
namespace {

Settings with(const GpuEnvironment& gpu) { return parse_settings(nullptr, nullptr, gpu); }

TEST(GpuSettings, KernelCacheFolder) {
  EXPECT_EQ(with({.home = "/home/u"}).cache_dir, "/home/u/.cache/onchip");
  EXPECT_EQ(with({.xdg_cache_home = "/x", .home = "/home/u"}).cache_dir, "/x/onchip");
  EXPECT_EQ(with({.xdg_cache_home = "relative", .home = "/home/u"}).cache_dir,
            "/home/u/.cache/onchip");
  EXPECT_FALSE(with({.home = "/home/u"}).cache_dir_set);

  const Settings own = with({.cache_dir = "/own", .xdg_cache_home = "/x", .home = "/home/u"});
  EXPECT_EQ(own.cache_dir, "/own");
  EXPECT_TRUE(own.cache_dir_set);
  EXPECT_EQ(own.cache_dir_problem, "");
  EXPECT_EQ(with({.cache_dir = "", .home = "/home/u"}).cache_dir, "/home/u/.cache/onchip");
}

TEST(GpuSettings, NoKernelCacheHasAReasonUnlessAskedFor) {
  const Settings off = with({.cache_dir = "off", .home = "/home/u"});
  EXPECT_EQ(off.cache_dir, "");
  EXPECT_EQ(off.cache_dir_problem, "");
  EXPECT_TRUE(off.cache_dir_set);

  const Settings relative = with({.cache_dir = "here", .home = "/home/u"});
  EXPECT_EQ(relative.cache_dir, "");
  EXPECT_EQ(relative.cache_dir_problem,
            "ONCHIP_CACHE_DIR: got \"here\", wanted an absolute path or off");

  const Settings homeless = with({});
  EXPECT_EQ(homeless.cache_dir, "");
  EXPECT_NE(homeless.cache_dir_problem, "");
}

TEST(GpuSettings, CompilerPlaces) {
  EXPECT_EQ(with({.nvrtc = "/n/libnvrtc.so.13"}).nvrtc, "/n/libnvrtc.so.13");
  EXPECT_EQ(with({.cuda_home = "/a", .cuda_path = "/b"}).cuda_home, "/a");
  EXPECT_EQ(with({.cuda_path = "/b"}).cuda_home, "/b");
  EXPECT_EQ(with({}).cuda_home, "");
}

}  // namespace
}  // namespace onchip
