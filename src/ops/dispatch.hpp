// Walks an operator's ordered backend table; packs the choice into the caller's onchip_plan and
// unpacks it again. Shared by every operator.
#pragma once

#include <onchip/onchip.h>

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <variant>

#include "core/backend.hpp"
#include "core/status.hpp"

namespace onchip::ops {

// A plan as it travels in the caller's memory.
struct StoredPlan {
  onchip_operator op = 0;
  std::uint32_t backend = 0;  // index in the table
  std::uint64_t fingerprint = 0;
  BackendPlan plan;
};

void write_plan(std::string_view op, const StoredPlan& stored, const char* backend,
                onchip_plan* plan);
// Throws invalid_argument unless `plan` is an untouched plan of `op` made for `fingerprint`.
StoredPlan read_plan(std::string_view op_name, onchip_operator op, std::uint64_t fingerprint,
                     std::size_t num_backends, const onchip_plan* plan);

RunContext checked_context(std::string_view op, const BackendPlan& plan, bool on_cpu,
                           void* workspace, void* stream);

void check_plan_target(std::string_view op, const onchip_plan* plan);

template <typename Problem>
struct Choice {
  std::size_t index;
  BackendPlan plan;
};

// Throws invalid_argument for a name that no backend has; "" is none.
void require_known_backend(std::string_view op, std::string_view forced);

// A line for each backend without a row in the table, or only for the forced one.
template <typename Problem>
std::string absent_lines(std::string_view forced, std::span<const Backend<Problem>> table,
                         std::string_view before_reason) {
  std::string lines;
  for (const std::string_view name : kBackendNames) {
    const bool present = std::any_of(table.begin(), table.end(),
                                     [name](const auto& backend) { return name == backend.name; });
    if (present || (!forced.empty() && forced != name)) continue;
    lines.append("\n  ").append(name).append(": ").append(before_reason);
    lines += "it does not have this operator";
  }
  return lines;
}

// The first backend that takes the problem; unsupported with every reason if none does, or if a
// setting keeps an earlier one from it.
template <typename Problem>
Choice<Problem> choose(std::string_view op, std::string_view forced,
                       std::span<const Backend<Problem>> table, const Problem& problem) {
  require_known_backend(op, forced);
  std::string reasons;
  bool refused = false;
  for (std::size_t i = 0; i < table.size(); ++i) {
    if (!forced.empty() && forced != table[i].name) continue;
    PlanResult result = table[i].plan(problem);
    if (auto* plan = std::get_if<BackendPlan>(&result)) return {i, *plan};
    const Reject& reject = std::get<Reject>(result);
    reasons += "\n  " + std::string(table[i].name) + ": " + reject.reason;
    refused = reject.by_setting;
    if (refused) break;
  }
  if (!refused) reasons += absent_lines(forced, table, "");
  std::string text(op);
  text += forced.empty() ? ": no backend takes this call:"
                         : ": the forced backend does not take this call:";
  throw Error(ONCHIP_UNSUPPORTED, text + reasons);
}

// One line a backend: chosen, possible, or the reason against it.
template <typename Problem>
std::string explain_call(std::string_view name, std::string_view forced,
                         std::span<const Backend<Problem>> table, const Problem& problem) {
  require_known_backend(name, forced);
  std::string lines;
  std::string chosen;
  bool refused = false;  // by a setting
  for (const Backend<Problem>& backend : table) {
    const PlanResult result = backend.plan(problem);
    lines += "\n  " + std::string(backend.name) + ": ";
    if (const auto* reject = std::get_if<Reject>(&result)) {
      lines += "rejected: " + reject->reason;
      refused = refused || (reject->by_setting && forced.empty() && chosen.empty());
      continue;
    }
    const auto& plan = std::get<BackendPlan>(result);
    const std::string what =
        std::string(plan.kernel) + ", workspace " + std::to_string(plan.workspace_bytes) + " bytes";
    if (!forced.empty() && forced != backend.name) {
      lines += "possible, but another backend is forced: " + what;
    } else if (refused) {
      lines += "possible if forced: " + what;
    } else if (chosen.empty()) {
      chosen = backend.name;
      lines += "chosen: " + what;
    } else {
      lines += "possible: " + what;
    }
  }
  lines += absent_lines("", table, "rejected: ");
  return std::string(name) + ": " + (chosen.empty() ? "no backend takes this call" : chosen) +
         lines + "\n";
}

}  // namespace onchip::ops
