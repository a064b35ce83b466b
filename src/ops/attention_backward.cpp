// Exact attention, backward (docs/semantics.md section 2).
#include <array>

#include "cpu/attention.hpp"
#include "ops/operators.hpp"
#include "reference/attention.hpp"

namespace onchip::ops {

namespace {

constexpr std::array<Backend<AttentionBackwardProblem>, 2> kBackends = {{
    {"cpu", cpu::plan_attention_backward, cpu::run_attention_backward},
    {"reference", reference::plan_attention_backward, reference::run_attention_backward},
}};

}  // namespace

const AttentionBackward& attention_backward() {
  static const AttentionBackward op{ONCHIP_ATTENTION_BACKWARD, "attention_backward",
                                    ONCHIP_ATTENTION_BACKWARD_ARGS_INIT, kBackends};
  return op;
}

}  // namespace onchip::ops
