// Exact attention, forward (docs/semantics.md section 2).
#include <array>

#include "cpu/attention.hpp"
#include "gpu/kernels/sm90/attention_forward.hpp"
#include "ops/operators.hpp"
#include "reference/attention.hpp"

namespace onchip::ops {

namespace {

constexpr std::array<Backend<AttentionForwardProblem>, 3> kBackends = {{
    {"cuda.sm90", sm90::plan_attention_forward, sm90::run_attention_forward},
    {"cpu", cpu::plan_attention_forward, cpu::run_attention_forward},
    {"reference", reference::plan_attention_forward, reference::run_attention_forward},
}};

}  // namespace

const AttentionForward& attention_forward() {
  static const AttentionForward op{ONCHIP_ATTENTION_FORWARD, "attention_forward",
                                   ONCHIP_ATTENTION_FORWARD_ARGS_INIT, kBackends};
  return op;
}

}  // namespace onchip::ops
