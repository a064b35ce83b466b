// Two partial attention results into one (docs/semantics.md section 2).
#include <array>

#include "ops/operators.hpp"
#include "reference/attention.hpp"

namespace onchip::ops {

namespace {

constexpr std::array<Backend<AttentionMergeProblem>, 1> kBackends = {{
    {"reference", reference::plan_attention_merge, reference::run_attention_merge},
}};

}  // namespace

const AttentionMerge& attention_merge() {
  static const AttentionMerge op{ONCHIP_ATTENTION_MERGE, "merge", ONCHIP_ATTENTION_MERGE_ARGS_INIT, kBackends};
  return op;
}

}  // namespace onchip::ops
