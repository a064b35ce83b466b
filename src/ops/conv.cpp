// Short causal convolution and the norms: forward, backward, step (docs/semantics.md section 3).
#include <array>

#include "cpu/conv.hpp"
#include "cpu/norm.hpp"
#include "ops/operators.hpp"
#include "reference/conv.hpp"

namespace onchip::ops {

namespace {

constexpr std::array<Backend<ConvForwardProblem>, 2> kConvForward = {{
    {"cpu", cpu::plan_conv_forward, cpu::run_conv_forward},
    {"reference", reference::plan_conv_forward, reference::run_conv_forward},
}};
constexpr std::array<Backend<ConvBackwardProblem>, 2> kConvBackward = {{
    {"cpu", cpu::plan_conv_backward, cpu::run_conv_backward},
    {"reference", reference::plan_conv_backward, reference::run_conv_backward},
}};
constexpr std::array<Backend<ConvStepProblem>, 2> kConvStep = {{
    {"cpu", cpu::plan_conv_step, cpu::run_conv_step},
    {"reference", reference::plan_conv_step, reference::run_conv_step},
}};
constexpr std::array<Backend<NormForwardProblem>, 2> kNormForward = {{
    {"cpu", cpu::plan_norm_forward, cpu::run_norm_forward},
    {"reference", reference::plan_norm_forward, reference::run_norm_forward},
}};
constexpr std::array<Backend<NormBackwardProblem>, 2> kNormBackward = {{
    {"cpu", cpu::plan_norm_backward, cpu::run_norm_backward},
    {"reference", reference::plan_norm_backward, reference::run_norm_backward},
}};

}  // namespace

const ConvForward& conv_forward() {
  static const ConvForward op{ONCHIP_CONV_FORWARD, "conv_forward", ONCHIP_CONV_FORWARD_ARGS_INIT,
                              kConvForward};
  return op;
}

const ConvBackward& conv_backward() {
  static const ConvBackward op{ONCHIP_CONV_BACKWARD, "conv_backward",
                               ONCHIP_CONV_BACKWARD_ARGS_INIT, kConvBackward};
  return op;
}

const ConvStep& conv_step() {
  static const ConvStep op{ONCHIP_CONV_STEP, "conv_step", ONCHIP_CONV_STEP_ARGS_INIT, kConvStep};
  return op;
}

const NormForward& norm_forward() {
  static const NormForward op{ONCHIP_NORM_FORWARD, "norm_forward", ONCHIP_NORM_FORWARD_ARGS_INIT,
                              kNormForward};
  return op;
}

const NormBackward& norm_backward() {
  static const NormBackward op{ONCHIP_NORM_BACKWARD, "norm_backward",
                               ONCHIP_NORM_BACKWARD_ARGS_INIT, kNormBackward};
  return op;
}

}  // namespace onchip::ops
