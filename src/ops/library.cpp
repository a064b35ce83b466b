// What concerns the library as a whole: explain by operator number, describe.
#include <string>

#include "core/settings.hpp"
#include "core/thread_pool.hpp"
#include "ops/operators.hpp"

namespace onchip::ops {

namespace {

std::string quoted(std::string_view text) {
  constexpr char kHex[] = "0123456789abcdef";
  std::string result = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      result += '\\';
      result += c;
    } else if (byte < 0x20 || byte == 0x7f) {
      result += "\\u00";
      result += kHex[byte >> 4];
      result += kHex[byte & 15];
    } else {
      result += c;
    }
  }
  return result + "\"";
}

}  // namespace

std::string explain(onchip_operator op, const void* args) {
  switch (op) {
    case ONCHIP_ATTENTION_FORWARD:
      return attention_forward().explain(args);
    case ONCHIP_ATTENTION_BACKWARD:
      return attention_backward().explain(args);
    case ONCHIP_ATTENTION_MERGE:
      return attention_merge().explain(args);
    default:
      throw_invalid("explain", "op", std::to_string(op), "an onchip_operator (1..3)");
  }
}

std::string describe() {
  std::string json = "{\"version\": ";
  json += quoted(onchip_version());
#if defined(__clang__)
  json += ", \"compiler\": " + quoted("clang " __clang_version__);
#elif defined(__GNUC__)
  json += ", \"compiler\": " + quoted("gcc " __VERSION__);
#endif
  json += ", \"threads\": {\"in_use\": " + std::to_string(num_threads()) +
          ", \"available_cpus\": " + std::to_string(available_cpus()) + "}";
  json += ", \"backends\": [{\"name\": \"reference\", \"available\": true, \"detail\": " +
          quoted("fp64 loops on the CPU") + "}]";
  json += ", \"settings\": [";
  bool first = true;
  for (const SettingRow& row : setting_rows()) {
    if (!first) json += ", ";
    first = false;
    json += "{\"name\": " + quoted(row.name) + ", \"value\": " + quoted(row.value) +
            ", \"origin\": " + quoted(row.origin) + "}";
  }
  json += "], \"setting_problems\": [";
  first = true;
  for (const std::string& problem :
       {settings().num_threads_problem, settings().cpu_isa_problem}) {
    if (problem.empty()) continue;
    if (!first) json += ", ";
    first = false;
    json += quoted(problem);
  }
  return json + "]}";
}

}  // namespace onchip::ops
