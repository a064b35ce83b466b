// The host sides of the engines, one set of functions each.
#pragma once

#include "core/backend.hpp"
#include "core/linear.hpp"
#include "core/settings.hpp"

namespace onchip::cpu {

PlanResult plan_scalar_forward(const LinearForwardProblem& problem, const Settings& settings);
void run_scalar_forward(const BackendPlan& plan, const LinearForwardProblem& problem,
                        const RunContext& context);

PlanResult plan_scalar_backward(const LinearBackwardProblem& problem, const Settings& settings);
void run_scalar_backward(const BackendPlan& plan, const LinearBackwardProblem& problem,
                         const RunContext& context);

PlanResult plan_scalar_step(const LinearStepProblem& problem, const Settings& settings);
void run_scalar_step(const BackendPlan& plan, const LinearStepProblem& problem,
                     const RunContext& context);

PlanResult plan_delta_forward(const LinearForwardProblem& problem, const Settings& settings);
void run_delta_forward(const BackendPlan& plan, const LinearForwardProblem& problem,
                       const RunContext& context);

PlanResult plan_delta_backward(const LinearBackwardProblem& problem, const Settings& settings);
void run_delta_backward(const BackendPlan& plan, const LinearBackwardProblem& problem,
                        const RunContext& context);

PlanResult plan_delta_step(const LinearStepProblem& problem, const Settings& settings);
void run_delta_step(const BackendPlan& plan, const LinearStepProblem& problem,
                    const RunContext& context);

}  // namespace onchip::cpu
