// Exact attention over cached keys and values (docs/semantics.md section 2).
#include <array>

#include "cpu/attention_decode.hpp"
#include "ops/operators.hpp"
#include "reference/attention_decode.hpp"

namespace onchip::ops {

namespace {

constexpr std::array<Backend<AttentionDecodeProblem>, 2> kBackends = {{
    {"cpu", cpu::plan_attention_decode, cpu::run_attention_decode},
    {"reference", reference::plan_attention_decode, reference::run_attention_decode},
}};

}  // namespace

const AttentionDecode& attention_decode() {
  static const AttentionDecode op{ONCHIP_ATTENTION_DECODE, "attention_decode",
                                  ONCHIP_ATTENTION_DECODE_ARGS_INIT, kBackends};
  return op;
}

}  // namespace onchip::ops
