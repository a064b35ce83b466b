// A backend's only entry: plan a problem or say why not; run what was planned.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
#include <variant>

namespace onchip {

struct BackendPlan {
  std::size_t workspace_bytes = 0;
  std::size_t workspace_alignment = 1;
  const char* kernel = "";                // static storage; shown by explain
  std::array<std::uint64_t, 16> words{};  // the backend's own decisions (tiles, splits, spec)
};
static_assert(std::is_trivially_copyable_v<BackendPlan>);

struct Reject {
  std::string reason;  // reads after "backend: "
  // A setting is at fault (docs/settings.md): the call is refused, no later backend steps in.
  bool by_setting = false;
};

using PlanResult = std::variant<BackendPlan, Reject>;

struct RunContext {
  std::byte* workspace = nullptr;
  void* stream = nullptr;
};

// Every name that a call may force (docs/semantics.md section 6). An operator's table has those
// that implement it.
inline constexpr std::array kBackendNames = {"cuda.sm90", "cuda.sm80", "cpu", "reference"};

// A row of an operator's ordered backend table. `plan` reads no tensor data except host-side
// lengths; `run` throws Error and leaves nothing allocated behind.
template <typename Problem>
struct Backend {
  const char* name;
  PlanResult (*plan)(const Problem& problem);
  void (*run)(const BackendPlan& plan, const Problem& problem, const RunContext& context);
};

}  // namespace onchip
