// Linear attention, forward, backward and step, as the recurrences of docs/semantics.md section 3
// in double precision, token by token. The oracle of every test.
#pragma once

#include "core/backend.hpp"
#include "core/linear.hpp"

namespace onchip::reference {

PlanResult plan_linear_forward(const LinearForwardProblem& problem);
void run_linear_forward(const BackendPlan& plan, const LinearForwardProblem& problem,
                        const RunContext& context);

// Recomputes the states: keeps one every chunk_len tokens, and those between one chunk at a time.
PlanResult plan_linear_backward(const LinearBackwardProblem& problem);
void run_linear_backward(const BackendPlan& plan, const LinearBackwardProblem& problem,
                         const RunContext& context);

PlanResult plan_linear_step(const LinearStepProblem& problem);
void run_linear_step(const BackendPlan& plan, const LinearStepProblem& problem,
                     const RunContext& context);

}  // namespace onchip::reference
