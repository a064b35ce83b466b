// The environment variables the library reads, once, at the first call that needs one
// (docs/settings.md). This is the only part of the library that reads the environment.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace onchip {

struct Settings {
  std::int32_t num_threads = 0;  // ONCHIP_NUM_THREADS; 0 = as many as this process may use
  std::string cpu_isa;           // ONCHIP_CPU_ISA: "portable", "avx2", "avx512"; "" = the best

  // A variable whose text could not be used: it takes its default, and every plan of a backend it
  // concerns rejects with this text, so that a typo is never silent.
  std::string num_threads_problem;
  std::string cpu_isa_problem;
};

const Settings& settings();

struct SettingRow {
  const char* name;
  std::string value;        // what is in force
  const char* origin;       // "environment" or "default"
};

std::vector<SettingRow> setting_rows();

// As parsed from the given texts (NULL = unset): what settings() does once with the environment.
Settings parse_settings(const char* num_threads, const char* cpu_isa);

}  // namespace onchip
