// The states of linear attention between the caller's tensors and an engine's memory.
#pragma once

#include <cstdint>

#include "core/linear_rows.hpp"
#include "reference/workspace.hpp"

namespace onchip::reference {

// An engine's state in doubles: row-major [dk, value_width], whose last column is the normaliser;
// of slots [dk, M], then [M, dv].
std::int64_t state_doubles(const LinearProblem& problem);

// What an engine may use besides.
std::int64_t scratch_doubles(const LinearProblem& problem);

void add_states(const LinearProblem& problem, Layout& layout, std::int64_t count);

// Absent parts are zero.
void load_state(const LinearProblem& problem, const StateViews& parts, std::int64_t slot,
                std::int64_t head, double* state);
// Absent: 0; -inf for rwkv4, whose empty state weighs nothing.
double load_stabiliser(const LinearProblem& problem, const StateViews& parts, std::int64_t slot,
                       std::int64_t head);

// `third`: the stabiliser, or its gradient.
void store_state(const LinearProblem& problem, const StateViews& parts, std::int64_t slot,
                 std::int64_t head, const double* state, double third);

}  // namespace onchip::reference
