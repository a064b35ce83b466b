// What concerns the library as a whole: explain by operator number, describe.
#include <string>

#include "core/settings.hpp"
#include "core/thread_pool.hpp"
#include "cpu/cpu_features.hpp"
#include "gpu/kernels/catalog.hpp"
#include "ops/json.hpp"
#include "ops/kernels.hpp"
#include "ops/operators.hpp"

namespace onchip::ops {

std::string explain(onchip_operator op, const void* args) {
  switch (op) {
    case ONCHIP_ATTENTION_FORWARD:
      return attention_forward().explain(args);
    case ONCHIP_ATTENTION_BACKWARD:
      return attention_backward().explain(args);
    case ONCHIP_ATTENTION_MERGE:
      return attention_merge().explain(args);
    case ONCHIP_ATTENTION_DECODE:
      return attention_decode().explain(args);
    case ONCHIP_LINEAR_FORWARD:
      return linear_forward().explain(args);
    case ONCHIP_LINEAR_BACKWARD:
      return linear_backward().explain(args);
    case ONCHIP_LINEAR_STEP:
      return linear_step().explain(args);
    case ONCHIP_CONV_FORWARD:
      return conv_forward().explain(args);
    case ONCHIP_CONV_BACKWARD:
      return conv_backward().explain(args);
    case ONCHIP_CONV_STEP:
      return conv_step().explain(args);
    case ONCHIP_NORM_FORWARD:
      return norm_forward().explain(args);
    case ONCHIP_NORM_BACKWARD:
      return norm_backward().explain(args);
    default:
      throw_invalid("explain", "op", std::to_string(op),
                    "an onchip_operator (1..4, 16..18, 20..22, 24, 25)");
  }
}

std::string describe() {
  std::string json = "{\"version\": ";
  json += json_string(onchip_version());
#if defined(__clang__)
  json += ", \"compiler\": " + json_string("clang " __clang_version__);
#elif defined(__GNUC__)
  json += ", \"compiler\": " + json_string("gcc " __VERSION__);
#endif
  json += ", \"threads\": {\"in_use\": " + std::to_string(num_threads()) +
          ", \"available_cpus\": " + std::to_string(available_cpus()) + "}";
  const cpu::IsaChoice isa = cpu::choose_isa(settings());
  const gpu::GpuReport report = gpu::gpu_report();
  json += ", \"backends\": [" + describe_gpu_backends(report);
  json += ", {\"name\": \"cpu\", \"available\": ";
  json += isa.problem.empty() ? "true" : "false";
  json += ", \"detail\": " +
          json_string(isa.problem.empty() ? cpu::isa_name(isa.isa) : isa.problem.c_str()) + "}";
  json += ", {\"name\": \"reference\", \"available\": true, \"detail\": " +
          json_string("fp64 loops on the CPU") + "}]";
  json += ", \"gpu\": " + describe_gpu(report);
  json += ", \"settings\": [";
  bool first = true;
  for (const SettingRow& row : setting_rows()) {
    if (!first) json += ", ";
    first = false;
    json += "{\"name\": " + json_string(row.name) + ", \"value\": " + json_string(row.value) +
            ", \"origin\": " + json_string(row.origin) + "}";
  }
  json += "], \"setting_problems\": [";
  first = true;
  for (const std::string& problem : {settings().num_threads_problem, settings().cpu_isa_problem}) {
    if (problem.empty()) continue;
    if (!first) json += ", ";
    first = false;
    json += json_string(problem);
  }
  return json + "]}";
}

}  // namespace onchip::ops
