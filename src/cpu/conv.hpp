// Short causal convolution on the CPU: one unit per instruction set, threads over blocks of
// channels and strips of tokens.
#pragma once

#include "core/backend.hpp"
#include "core/conv.hpp"
#include "core/settings.hpp"

namespace onchip::cpu {

PlanResult plan_conv_forward(const ConvForwardProblem& problem);
void run_conv_forward(const BackendPlan& plan, const ConvForwardProblem& problem,
                      const RunContext& context);

PlanResult plan_conv_backward(const ConvBackwardProblem& problem);
void run_conv_backward(const BackendPlan& plan, const ConvBackwardProblem& problem,
                       const RunContext& context);

PlanResult plan_conv_step(const ConvStepProblem& problem);
void run_conv_step(const BackendPlan& plan, const ConvStepProblem& problem,
                   const RunContext& context);

// As above under other settings than the process's own: the instruction set they force.
PlanResult plan_conv_forward(const ConvForwardProblem& problem, const Settings& settings);
PlanResult plan_conv_backward(const ConvBackwardProblem& problem, const Settings& settings);
PlanResult plan_conv_step(const ConvStepProblem& problem, const Settings& settings);

}  // namespace onchip::cpu
