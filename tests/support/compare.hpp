// Section 5 of docs/semantics.md: the only place in the C++ tests that holds tolerances. Each judge
// reads a finished call's tensors through the structs of the C ABI and returns "" or what is wrong.
#pragma once

#include <onchip/onchip.h>

#include <string>
#include <vector>

#include "support/attention_case.hpp"
#include "support/plain_attention.hpp"

namespace onchip::test {

// |got - wanted| <= bound everywhere, with NaN, +inf and -inf in the same places.
std::string disagreement(const std::string& name, const std::vector<double>& got,
                         const std::vector<double>& wanted, double bound);

std::string judge(const onchip_attention_forward_args& args);
// `saved`: whether the truth is the gradient of the forward, or what follows from the given o and
// lse.
std::string judge(const onchip_attention_backward_args& args, Saved saved = Saved::own);
std::string judge(const onchip_attention_merge_args& args);

// The reference backend's results for a compact float64 copy of the call.
PlainForward reference_forward(const AttentionCase& attention);
PlainGradients reference_backward(const AttentionCase& attention, Saved saved);

}  // namespace onchip::test
