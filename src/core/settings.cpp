#include "core/settings.hpp"

#include <charconv>
#include <cstdlib>
#include <cstring>

namespace onchip {

namespace {

std::string text_of(const char* value) { return value == nullptr ? std::string() : value; }

void parse_gpu(const GpuEnvironment& gpu, Settings& result) {
  result.nvrtc = text_of(gpu.nvrtc);
  result.cuda_home = text_of(gpu.cuda_home);
  if (result.cuda_home.empty()) result.cuda_home = text_of(gpu.cuda_path);

  const std::string cache_dir = text_of(gpu.cache_dir);
  const std::string xdg_cache_home = text_of(gpu.xdg_cache_home);
  const std::string home = text_of(gpu.home);
  result.cache_dir_set = !cache_dir.empty();
  if (cache_dir == "off") return;
  if (result.cache_dir_set) {
    if (cache_dir.front() == '/') {
      result.cache_dir = cache_dir;
    } else {
      result.cache_dir_problem =
          "ONCHIP_CACHE_DIR: got \"" + cache_dir + "\", wanted an absolute path or off";
    }
  } else if (!xdg_cache_home.empty() && xdg_cache_home.front() == '/') {
    result.cache_dir = xdg_cache_home + "/onchip";
  } else if (!home.empty() && home.front() == '/') {
    result.cache_dir = home + "/.cache/onchip";
  } else {
    result.cache_dir_problem =
        "none of ONCHIP_CACHE_DIR, XDG_CACHE_HOME and HOME is an absolute path";
  }
}

// NULL in a process that runs with more rights than its caller: these variables name code to load.
const char* trusted_variable(const char* name) { return secure_getenv(name); }

}  // namespace

Settings parse_settings(const char* num_threads, const char* cpu_isa, const GpuEnvironment& gpu) {
  Settings result;
  if (num_threads != nullptr && *num_threads != '\0') {
    const char* end = num_threads + std::strlen(num_threads);
    std::int32_t value = 0;
    const auto [stop, error] = std::from_chars(num_threads, end, value);
    if (error == std::errc{} && stop == end && value >= 1 && value <= 1024) {
      result.num_threads = value;
    } else {
      result.num_threads_problem =
          "ONCHIP_NUM_THREADS: got \"" + std::string(num_threads) + "\", wanted 1..1024";
    }
  }
  if (cpu_isa != nullptr && *cpu_isa != '\0') {
    const std::string text = cpu_isa;
    if (text == "portable" || text == "avx2" || text == "avx512" || text == "avx512_bf16") {
      result.cpu_isa = text;
    } else {
      result.cpu_isa_problem =
          "ONCHIP_CPU_ISA: got \"" + text + "\", wanted portable, avx2, avx512 or avx512_bf16";
    }
  }
  parse_gpu(gpu, result);
  return result;
}

const Settings& settings() {
  static const Settings parsed =
      parse_settings(std::getenv("ONCHIP_NUM_THREADS"), std::getenv("ONCHIP_CPU_ISA"),
                     {trusted_variable("ONCHIP_NVRTC"), trusted_variable("ONCHIP_CACHE_DIR"),
                      trusted_variable("XDG_CACHE_HOME"), trusted_variable("HOME"),
                      trusted_variable("CUDA_HOME"), trusted_variable("CUDA_PATH")});
  return parsed;
}

std::vector<SettingRow> setting_rows() {
  const Settings& now = settings();
  return {
      {"ONCHIP_NUM_THREADS",
       now.num_threads == 0 ? std::string("all available CPUs") : std::to_string(now.num_threads),
       now.num_threads == 0 ? "default" : "environment"},
      {"ONCHIP_CPU_ISA", now.cpu_isa.empty() ? std::string("best available") : now.cpu_isa,
       now.cpu_isa.empty() ? "default" : "environment"},
      {"ONCHIP_NVRTC", now.nvrtc.empty() ? std::string("found by search") : now.nvrtc,
       now.nvrtc.empty() ? "default" : "environment"},
      {"ONCHIP_CACHE_DIR", now.cache_dir.empty() ? std::string("off") : now.cache_dir,
       now.cache_dir_set ? "environment" : "default"},
  };
}

}  // namespace onchip
