// What the ways to cut delta_rule's backward share: the tensors of a chunk's gradients, and those
// of its gates and of constants.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/backend.hpp"
#include "cpu/linear_delta_host.hpp"
#include "cpu/linear_delta_windows.hpp"

namespace onchip::cpu {

// Gradients of constants are summed over chunks and sequences: one row of these a (sequence, value
// head).
struct DeltaConstants {
  explicit DeltaConstants(const LinearBackwardProblem& problem)
      : rate(gate + (problem.gate_per_head ? 1 : 0)),
        dt_bias(rate + (has_raw_gates(problem) ? 1 : 0)),
        width(dt_bias + (has_raw_gates(problem) ? problem.decay_width : 0)) {}

  std::int64_t gate = 0;
  std::int64_t rate, dt_bias, width;
};

// Sums over the heads that read one key head, [row][dk] each; NULL: there is one head.
struct DeltaSums {
  std::byte* q = nullptr;
  std::byte* k = nullptr;
  std::byte* a = nullptr;
};

// The gradients of one chunk's rows: `chunk` for the unit, whose gate gradients are then stored.
// `rows` is the head's; `constants` [width] is of the chunk alone.
class DeltaChunkGradients {
 public:
  DeltaChunkGradients(const LinearBackwardProblem& problem, const TokenRange& tokens,
                      std::int64_t head, const DeltaSequence& rows, const DeltaChunk& forward,
                      std::int64_t first, const DeltaSums& sums, double* constants);
  DeltaChunkGradients(const DeltaChunkGradients&) = delete;
  DeltaChunkGradients& operator=(const DeltaChunkGradients&) = delete;

  const DeltaBackwardChunk& chunk() const { return chunk_; }
  void store_gates();

 private:
  const LinearBackwardProblem& problem_;
  const TokenRange& tokens_;
  std::int64_t head_;
  const DeltaSequence& rows_;
  std::int64_t first_;
  double* constants_;
  DeltaBackwardChunk chunk_;
  double d_decay_[kDeltaRows] = {};
  double d_beta_[kDeltaRows] = {};
};

// Value heads that read one key head.
std::int64_t delta_group(const LinearProblem& problem);

// States that a walk forward keeps at most, of a sequence's heads.
std::int64_t kept_delta_states(const LinearBackwardProblem& problem);

// Bytes of one of DeltaSums; 0 where there is one head.
std::size_t delta_sums_bytes(const LinearBackwardProblem& problem, const DeltaUnit& unit);

// Windows of chunks side by side, where there are few (sequence, key head) pairs: the value heads
// of each one after the other. `totals`: of DeltaConstants, [num_seqs][heads][width].
std::size_t delta_backward_windows_bytes(const LinearBackwardProblem& problem,
                                         const DeltaUnit& unit, const DeltaCut& cut,
                                         std::int32_t workers);
void run_delta_backward_windows(const LinearBackwardProblem& problem, const DeltaUnit& unit,
                                const DeltaCut& cut, std::int32_t workers, double* totals,
                                std::byte* memory);

}  // namespace onchip::cpu
