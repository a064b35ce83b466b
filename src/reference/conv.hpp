// Short causal convolution and the norms as their formulas in double precision.
#pragma once

#include "core/backend.hpp"
#include "core/conv.hpp"

namespace onchip::reference {

PlanResult plan_conv_forward(const ConvForwardProblem& problem);
void run_conv_forward(const BackendPlan& plan, const ConvForwardProblem& problem,
                      const RunContext& context);

PlanResult plan_conv_backward(const ConvBackwardProblem& problem);
void run_conv_backward(const BackendPlan& plan, const ConvBackwardProblem& problem,
                       const RunContext& context);

PlanResult plan_conv_step(const ConvStepProblem& problem);
void run_conv_step(const BackendPlan& plan, const ConvStepProblem& problem,
                   const RunContext& context);

PlanResult plan_norm_forward(const NormForwardProblem& problem);
void run_norm_forward(const BackendPlan& plan, const NormForwardProblem& problem,
                      const RunContext& context);

PlanResult plan_norm_backward(const NormBackwardProblem& problem);
void run_norm_backward(const BackendPlan& plan, const NormBackwardProblem& problem,
                       const RunContext& context);

}  // namespace onchip::reference
