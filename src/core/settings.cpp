#include "core/settings.hpp"

#include <charconv>
#include <cstdlib>
#include <cstring>

namespace onchip {

Settings parse_settings(const char* num_threads, const char* cpu_isa) {
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
    if (text == "portable" || text == "avx2" || text == "avx512") {
      result.cpu_isa = text;
    } else {
      result.cpu_isa_problem =
          "ONCHIP_CPU_ISA: got \"" + text + "\", wanted portable, avx2 or avx512";
    }
  }
  return result;
}

const Settings& settings() {
  static const Settings parsed =
      parse_settings(std::getenv("ONCHIP_NUM_THREADS"), std::getenv("ONCHIP_CPU_ISA"));
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
  };
}

}  // namespace onchip
