// The contract of linear attention (docs/semantics.md sections 1 and 3), one check for every row of
// the table of operators: C argument structs in, normalised problems out, or an Error that names
// operator, argument, got and wanted.
#pragma once

#include <onchip/onchip.h>

#include "core/linear.hpp"
#include "ops/call.hpp"

namespace onchip::ops {

LinearForwardProblem normalise(const onchip_linear_forward_args& args, CallFacts& facts);
LinearBackwardProblem normalise(const onchip_linear_backward_args& args, CallFacts& facts);
LinearStepProblem normalise(const onchip_linear_step_args& args, CallFacts& facts);

}  // namespace onchip::ops
