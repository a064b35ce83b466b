#include <gtest/gtest.h>

#include <string>

#include "core/settings.hpp"

namespace onchip {
namespace {

TEST(Settings, UnsetAndEmptyAreDefaults) {
  for (const char* nothing : {static_cast<const char*>(nullptr), ""}) {
    const Settings parsed = parse_settings(nothing, nothing);
    EXPECT_EQ(parsed.num_threads, 0);
    EXPECT_EQ(parsed.cpu_isa, "");
    EXPECT_EQ(parsed.num_threads_problem, "");
    EXPECT_EQ(parsed.cpu_isa_problem, "");
  }
}

TEST(Settings, Threads) {
  EXPECT_EQ(parse_settings("1", nullptr).num_threads, 1);
  EXPECT_EQ(parse_settings("1024", nullptr).num_threads, 1024);
  for (const char* bad : {"0", "-1", "1025", "two", "2x", " 2", "2 ", "1e3", "99999999999"}) {
    const Settings parsed = parse_settings(bad, nullptr);
    EXPECT_EQ(parsed.num_threads, 0) << bad;
    EXPECT_NE(parsed.num_threads_problem.find(bad), std::string::npos) << bad;
    EXPECT_NE(parsed.num_threads_problem.find("wanted 1..1024"), std::string::npos) << bad;
  }
}

TEST(Settings, InstructionSets) {
  for (const char* isa : {"portable", "avx2", "avx512", "avx512_bf16"}) {
    EXPECT_EQ(parse_settings(nullptr, isa).cpu_isa, isa);
    EXPECT_EQ(parse_settings(nullptr, isa).cpu_isa_problem, "");
  }
  const Settings parsed = parse_settings(nullptr, "AVX2");
  EXPECT_EQ(parsed.cpu_isa, "");
  EXPECT_NE(parsed.cpu_isa_problem.find("\"AVX2\""), std::string::npos);
}

TEST(Settings, RowsNameEveryVariableOnce) {
  int threads = 0;
  int isa = 0;
  for (const SettingRow& row : setting_rows()) {
    threads += std::string(row.name) == "ONCHIP_NUM_THREADS" ? 1 : 0;
    isa += std::string(row.name) == "ONCHIP_CPU_ISA" ? 1 : 0;
    const std::string origin = row.origin;
    EXPECT_TRUE(origin == "environment" || origin == "default") << row.name;
    EXPECT_NE(row.value, "") << row.name;
  }
  EXPECT_EQ(threads, 1);
  EXPECT_EQ(isa, 1);
}

}  // namespace
}  // namespace onchip
