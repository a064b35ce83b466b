// Exact attention over cached keys and values (docs/semantics.md section 2).
#include <array>

#include "ops/operators.hpp"
#include "reference/attention_decode.hpp"

namespace onchip::ops {

namespace {

constexpr std::array<Backend<AttentionDecodeProblem>, 1> kBackends = {{
    {"reference", reference::plan_attention_decode, reference::run_attention_decode},
}};

}  // namespace

const AttentionDecode& attention_decode() {
  static const AttentionDecode op{ONCHIP_ATTENTION_DECODE, "attention_decode",
                                  ONCHIP_ATTENTION_DECODE_ARGS_INIT, kBackends};
  return op;
}

}  // namespace onchip::ops
