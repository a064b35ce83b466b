// The contract of exact attention (docs/semantics.md sections 1 and 2): C argument structs in,
// normalised problems out, or an Error that names operator, argument, got and wanted.
#pragma once

#include <onchip/onchip.h>

#include "core/attention.hpp"
#include "core/attention_decode.hpp"
#include "ops/call.hpp"

namespace onchip::ops {

AttentionForwardProblem normalise(const onchip_attention_forward_args& args, CallFacts& facts);
AttentionBackwardProblem normalise(const onchip_attention_backward_args& args, CallFacts& facts);
AttentionDecodeProblem normalise(const onchip_attention_decode_args& args, CallFacts& facts);
AttentionMergeProblem normalise(const onchip_attention_merge_args& args, CallFacts& facts);

}  // namespace onchip::ops
