// Exact attention on the CPU: forward over tiles of keys with an online softmax, backward by
// recomputation from lse; one unit per instruction set, threads over sequences, kv heads and
// blocks.
#pragma once

#include "core/attention.hpp"
#include "core/backend.hpp"
#include "core/settings.hpp"

namespace onchip::cpu {

PlanResult plan_attention_forward(const AttentionForwardProblem& problem);
void run_attention_forward(const BackendPlan& plan, const AttentionForwardProblem& problem,
                           const RunContext& context);

PlanResult plan_attention_backward(const AttentionBackwardProblem& problem);
void run_attention_backward(const BackendPlan& plan, const AttentionBackwardProblem& problem,
                            const RunContext& context);

PlanResult plan_attention_merge(const AttentionMergeProblem& problem);
void run_attention_merge(const BackendPlan& plan, const AttentionMergeProblem& problem,
                         const RunContext& context);

// As above under other settings than the process's own: the instruction set they force.
PlanResult plan_attention_forward(const AttentionForwardProblem& problem, const Settings& settings);
PlanResult plan_attention_backward(const AttentionBackwardProblem& problem,
                                   const Settings& settings);
PlanResult plan_attention_merge(const AttentionMergeProblem& problem, const Settings& settings);

}  // namespace onchip::cpu
