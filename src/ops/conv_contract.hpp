// The contracts of short causal convolution and of the norms (docs/semantics.md sections 1 and 3):
// C argument structs in, normalised problems out, or an Error that names operator, argument, got
// and wanted.
#pragma once

#include <onchip/onchip.h>

#include "core/conv.hpp"
#include "ops/call.hpp"

namespace onchip::ops {

ConvForwardProblem normalise(const onchip_conv_forward_args& args, CallFacts& facts);
ConvBackwardProblem normalise(const onchip_conv_backward_args& args, CallFacts& facts);
ConvStepProblem normalise(const onchip_conv_step_args& args, CallFacts& facts);
NormForwardProblem normalise(const onchip_norm_forward_args& args, CallFacts& facts);
NormBackwardProblem normalise(const onchip_norm_backward_args& args, CallFacts& facts);

}  // namespace onchip::ops
