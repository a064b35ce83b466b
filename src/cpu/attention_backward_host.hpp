// What the host side of attention backward shares: what a call asks for, how its rows and keys are
// tiled, and a (sequence, kv head) as the unit sees it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/attention_host.hpp"

namespace onchip::cpu {

inline std::int64_t arithmetic_size(DType dtype) { return dtype == DType::f64 ? 8 : 4; }

bool wants_dq(const AttentionBackwardProblem& problem);
bool wants_dk(const AttentionBackwardProblem& problem);
bool wants_dv(const AttentionBackwardProblem& problem);
bool wants_dbias(const AttentionBackwardProblem& problem);
bool wants_dsink(const AttentionBackwardProblem& problem);
bool has_output(const AttentionBackwardProblem& problem);

// Sequences with anything to go through.
std::int64_t live_sequences(const AttentionProblem& problem);

// K, V and their gradients of a chunk, and a block's rows in both layouts, share the outer private
// cache of a core; wide heads take smaller ones.
BackwardShape backward_shape(const AttentionBackwardProblem& problem);

// All rows and all keys of one (sequence, kv head), no output yet. `shift` has the numbers of all
// rows: [batch][head][row].
BackwardTask backward_task(const AttentionBackwardProblem& problem, const BackwardShape& shape,
                           std::byte* shift, std::int64_t n, const SequenceRange& s,
                           std::int64_t kv_head);

}  // namespace onchip::cpu
