// L2 norm and gated RMS norm on the CPU: one unit per instruction set, threads over rows.
#pragma once

#include "core/backend.hpp"
#include "core/conv.hpp"
#include "core/settings.hpp"

namespace onchip::cpu {

PlanResult plan_norm_forward(const NormForwardProblem& problem);
void run_norm_forward(const BackendPlan& plan, const NormForwardProblem& problem,
                      const RunContext& context);

PlanResult plan_norm_backward(const NormBackwardProblem& problem);
void run_norm_backward(const BackendPlan& plan, const NormBackwardProblem& problem,
                       const RunContext& context);

// As above under other settings than the process's own: the instruction set they force.
PlanResult plan_norm_forward(const NormForwardProblem& problem, const Settings& settings);
PlanResult plan_norm_backward(const NormBackwardProblem& problem, const Settings& settings);

}  // namespace onchip::cpu
