// Decoding as the equations of docs/semantics.md section 2 in double precision: append, then each
// query row over all keys of its cache.
#pragma once

#include "core/attention_decode.hpp"
#include "core/backend.hpp"

namespace onchip::reference {

PlanResult plan_attention_decode(const AttentionDecodeProblem& problem);
void run_attention_decode(const BackendPlan& plan, const AttentionDecodeProblem& problem,
                          const RunContext& context);

}  // namespace onchip::reference
