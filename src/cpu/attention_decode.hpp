// Decoding on the CPU: append, then attention over parts of the keys, one unit per instruction set,
// threads over (sequence, kv heads, query rows, part).
#pragma once

#include "core/attention_decode.hpp"
#include "core/backend.hpp"
#include "core/settings.hpp"

namespace onchip::cpu {

PlanResult plan_attention_decode(const AttentionDecodeProblem& problem);
void run_attention_decode(const BackendPlan& plan, const AttentionDecodeProblem& problem,
                          const RunContext& context);

// Under other settings than the process's own: the instruction set they force.
PlanResult plan_attention_decode(const AttentionDecodeProblem& problem, const Settings& settings);

}  // namespace onchip::cpu
