// The environment variables the library reads, once, at the first call that needs one
// (docs/settings.md). This is the only part of the library that reads the environment.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace onchip {

struct Settings {
  std::int32_t num_threads = 0;  // ONCHIP_NUM_THREADS; 0 = as many as this process may use
  std::string cpu_isa;           // ONCHIP_CPU_ISA: a name of cpu::Isa; "" = the best
  std::string nvrtc;             // ONCHIP_NVRTC: the NVRTC library to load; "" = look for one
  std::string cache_dir;  // ONCHIP_CACHE_DIR: where compiled GPU kernels are kept; "" = nowhere
  bool cache_dir_set = false;  // by ONCHIP_CACHE_DIR, not by default
  std::string cuda_home;       // CUDA_HOME or else CUDA_PATH: a place to look for NVRTC; "" = none

  // A variable whose text could not be used: it takes its default, and every plan of a backend it
  // concerns rejects with this text, so that a typo is never silent.
  std::string num_threads_problem;
  std::string cpu_isa_problem;
  std::string cache_dir_problem;  // why cache_dir is "" although nobody asked for that
};

const Settings& settings();

struct SettingRow {
  const char* name;
  std::string value;   // what is in force
  const char* origin;  // "environment" or "default"
};

std::vector<SettingRow> setting_rows();

// What GPU backends read: ONCHIP_* and the variables that others already set.
struct GpuEnvironment {
  const char* nvrtc = nullptr;
  const char* cache_dir = nullptr;
  const char* xdg_cache_home = nullptr;
  const char* home = nullptr;
  const char* cuda_home = nullptr;
  const char* cuda_path = nullptr;
};

// As parsed from the given texts (NULL = unset): what settings() does once with the environment.
Settings parse_settings(const char* num_threads, const char* cpu_isa,
                        const GpuEnvironment& gpu = {});

}  // namespace onchip
