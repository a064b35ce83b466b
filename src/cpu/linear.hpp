// Linear attention on the CPU: chunks of tokens as matrix products, one unit per instruction set,
// threads over (sequence, value head) and, where there are few of those, over chunks.
#pragma once

#include "core/backend.hpp"
#include "core/linear.hpp"
#include "core/settings.hpp"

namespace onchip::cpu {

PlanResult plan_linear_forward(const LinearForwardProblem& problem);
void run_linear_forward(const BackendPlan& plan, const LinearForwardProblem& problem,
                        const RunContext& context);

// Keeps a state every chunk_len tokens and computes those between again.
PlanResult plan_linear_backward(const LinearBackwardProblem& problem);
void run_linear_backward(const BackendPlan& plan, const LinearBackwardProblem& problem,
                         const RunContext& context);

PlanResult plan_linear_step(const LinearStepProblem& problem);
void run_linear_step(const BackendPlan& plan, const LinearStepProblem& problem,
                     const RunContext& context);

// As above under other settings than the process's own: the instruction set they force.
PlanResult plan_linear_forward(const LinearForwardProblem& problem, const Settings& settings);
PlanResult plan_linear_backward(const LinearBackwardProblem& problem, const Settings& settings);
PlanResult plan_linear_step(const LinearStepProblem& problem, const Settings& settings);

}  // namespace onchip::cpu
