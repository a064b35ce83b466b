// The contract of exact attention (docs/semantics.md sections 1 and 2): C argument structs in,
// normalised problems out, or an Error that names operator, argument, got and wanted.
#pragma once

#include <onchip/onchip.h>

#include <string>

#include "core/attention.hpp"

namespace onchip::ops {

// What dispatch needs besides the problem.
struct CallFacts {
  std::string forced_backend;     // "" = pick
  std::uint64_t fingerprint = 0;  // of everything a plan may depend on
};

AttentionForwardProblem normalise(const onchip_attention_forward_args& args, CallFacts& facts);
AttentionBackwardProblem normalise(const onchip_attention_backward_args& args, CallFacts& facts);
AttentionMergeProblem normalise(const onchip_attention_merge_args& args, CallFacts& facts);

}  // namespace onchip::ops
