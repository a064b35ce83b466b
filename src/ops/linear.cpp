// Linear attention, every engine and operator: forward, backward, step (docs/semantics.md section
// 3).
#include <array>

#include "cpu/linear.hpp"
#include "ops/operators.hpp"
#include "reference/linear.hpp"

namespace onchip::ops {

namespace {

constexpr std::array<Backend<LinearForwardProblem>, 2> kForwardBackends = {{
    {"cpu", cpu::plan_linear_forward, cpu::run_linear_forward},
    {"reference", reference::plan_linear_forward, reference::run_linear_forward},
}};
constexpr std::array<Backend<LinearBackwardProblem>, 2> kBackwardBackends = {{
    {"cpu", cpu::plan_linear_backward, cpu::run_linear_backward},
    {"reference", reference::plan_linear_backward, reference::run_linear_backward},
}};
constexpr std::array<Backend<LinearStepProblem>, 2> kStepBackends = {{
    {"cpu", cpu::plan_linear_step, cpu::run_linear_step},
    {"reference", reference::plan_linear_step, reference::run_linear_step},
}};

}  // namespace

const LinearForward& linear_forward() {
  static const LinearForward op{ONCHIP_LINEAR_FORWARD, "linear_forward",
                                ONCHIP_LINEAR_FORWARD_ARGS_INIT, kForwardBackends};
  return op;
}

const LinearBackward& linear_backward() {
  static const LinearBackward op{ONCHIP_LINEAR_BACKWARD, "linear_backward",
                                 ONCHIP_LINEAR_BACKWARD_ARGS_INIT, kBackwardBackends};
  return op;
}

const LinearStepOperator& linear_step() {
  static const LinearStepOperator op{ONCHIP_LINEAR_STEP, "linear_step",
                                     ONCHIP_LINEAR_STEP_ARGS_INIT, kStepBackends};
  return op;
}

}  // namespace onchip::ops
