// Exact attention, forward, backward and merge, as the equations of docs/semantics.md section 2 in
// double precision: two loops over (i, j), no tiles, no rescaling. The oracle of every test.
#pragma once

#include "core/attention.hpp"
#include "core/backend.hpp"

namespace onchip::reference {

PlanResult plan_attention_forward(const AttentionForwardProblem& problem);
void run_attention_forward(const BackendPlan& plan, const AttentionForwardProblem& problem,
                           const RunContext& context);

// Uses the given o and lse, so that a caller who holds one part of the keys may pass those of all
// keys: P = exp(S - lse), delta = rowsum(dO O).
PlanResult plan_attention_backward(const AttentionBackwardProblem& problem);
void run_attention_backward(const BackendPlan& plan, const AttentionBackwardProblem& problem,
                            const RunContext& context);

PlanResult plan_attention_merge(const AttentionMergeProblem& problem);
void run_attention_merge(const BackendPlan& plan, const AttentionMergeProblem& problem,
                         const RunContext& context);

}  // namespace onchip::reference
