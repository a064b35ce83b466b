// Workspace and threads of the reference backend: sizes in doubles, one piece a worker, one shared.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/backend.hpp"
#include "core/settings.hpp"
#include "core/tensor.hpp"
#include "core/thread_pool.hpp"

namespace onchip::reference {

constexpr std::size_t kWorkspaceAlignment = 64;

// Workspace in doubles. Its size follows from shapes alone: a plan outlives the lengths it saw.
class Layout {
 public:
  void add(std::int64_t count, std::int64_t width = 1, std::int64_t depth = 1) {
    const Wide area = std::min(Wide{count} * width, kBeyond);
    doubles_ = std::min(doubles_ + std::min(area * depth, kBeyond), kBeyond);
  }

  // Rounded up so that what follows starts on its own cache line.
  void finish_line() {
    constexpr Wide kLine = kWorkspaceAlignment / sizeof(double);
    doubles_ = (doubles_ + kLine - 1) / kLine * kLine;
  }
  void repeat(std::int64_t times) { doubles_ = std::min(doubles_ * times, kBeyond); }

  bool fits() const { return doubles_ <= kLimit; }
  std::int64_t doubles() const { return static_cast<std::int64_t>(doubles_); }

 private:
  __extension__ using Wide = __int128;
  static constexpr Wide kLimit = Wide{1} << 56;   // more than any address space holds
  static constexpr Wide kBeyond = Wide{1} << 60;  // where sums and products stop growing
  Wide doubles_ = 0;
};

// Hands out consecutive pieces of a worker's workspace.
class Scratch {
 public:
  explicit Scratch(double* next) : next_(next) {}

  double* take(std::int64_t count, std::int64_t width = 1) {
    double* piece = next_;
    next_ += count * width;
    return piece;
  }

 private:
  double* next_;
};

inline double* as_doubles(std::byte* workspace) { return reinterpret_cast<double*>(workspace); }

// Which of the plan's words says what.
enum Word : std::size_t { kWorkers, kWorkerDoubles, kSharedDoubles, kFirstFreeWord };

inline std::int32_t planned_workers(const BackendPlan& plan) {
  return static_cast<std::int32_t>(plan.words[kWorkers]);
}

inline PlanResult plan_with(std::int64_t tasks, Layout worker, Layout shared) {
  BackendPlan plan;
  plan.kernel = "fp64 loops";
  const auto workers =
      static_cast<std::int32_t>(std::clamp<std::int64_t>(tasks, 1, std::max(num_threads(), 1)));
  Layout all = worker;
  all.repeat(workers);
  if (!worker.fits() || !shared.fits() || !all.fits()) {
    return Reject{"the workspace would not fit in any address space"};
  }
  plan.words[kWorkers] = static_cast<std::uint64_t>(workers);
  plan.words[kWorkerDoubles] = static_cast<std::uint64_t>(worker.doubles());
  plan.words[kSharedDoubles] = static_cast<std::uint64_t>(shared.doubles());
  plan.workspace_bytes =
      static_cast<std::size_t>(all.doubles() + shared.doubles()) * sizeof(double);
  plan.workspace_alignment = kWorkspaceAlignment;
  return plan;
}

template <typename Problem>
const char* unsupported(const Problem& problem) {
  if (problem.device.type != ONCHIP_DEVICE_CPU) return "works on CPU tensors only";
  if (!is_float(problem.dtype)) return "takes float64, float32, float16 and bfloat16 only";
  if (const std::string& reason = settings().num_threads_problem; !reason.empty()) {
    return reason.c_str();
  }
  return nullptr;
}

}  // namespace onchip::reference
