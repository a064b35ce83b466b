// Two partial attention results into one (docs/semantics.md section 2).
#include <array>

#include "cpu/attention.hpp"
#include "ops/operators.hpp"
#include "reference/attention.hpp"

namespace onchip::ops {

namespace {

constexpr std::array<Backend<AttentionMergeProblem>, 2> kBackends = {{
    {"cpu", cpu::plan_attention_merge, cpu::run_attention_merge},
    {"reference", reference::plan_attention_merge, reference::run_attention_merge},
}};

}  // namespace

const AttentionMerge& attention_merge() {
  static const AttentionMerge op{ONCHIP_ATTENTION_MERGE, "merge", ONCHIP_ATTENTION_MERGE_ARGS_INIT,
                                 kBackends};
  return op;
}

}  // namespace onchip::ops
