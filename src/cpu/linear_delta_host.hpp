// What the host sides of delta_rule's forward, step and backward share: the unit, how a sequence's
// rows are cut into chunks, their gates in double precision and the gates' gradients.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/linear.hpp"
#include "cpu/cpu_features.hpp"
#include "cpu/linear_delta.hpp"
#include "cpu/linear_host.hpp"

namespace onchip::cpu {

struct DeltaUnit {
  std::size_t (*state_bytes)(const DeltaShape& shape);
  StateContent (*load_state)(const DeltaShape& shape, const UnitState& matrix, std::byte* state);
  void (*store_state)(const DeltaShape& shape, const std::byte* state, const UnitState& matrix);
  std::size_t (*forward_scratch_bytes)(const DeltaShape& shape);
  bool (*forward)(const DeltaChunk& chunk, std::byte* state, std::byte* scratch);
  bool (*prepare)(const DeltaChunk& chunk, std::byte* scratch);
  void (*advance)(const DeltaChunk& chunk, const DeltaColumns& columns, const std::byte* before,
                  std::byte* after, std::byte* scratch);
  void (*read)(const DeltaChunk& chunk, const std::byte* before, std::byte* scratch);
  std::size_t (*backward_record_bytes)(const DeltaShape& shape);
  std::size_t (*backward_scratch_bytes)(const DeltaShape& shape);
  std::size_t (*sum_row_bytes)(const DeltaShape& shape);
  void (*backward)(const DeltaBackwardChunk& chunk, const std::byte* state, std::byte* d_state,
                   std::byte* record, std::byte* scratch);
  bool (*backward_prepare)(const DeltaBackwardChunk& chunk, std::byte* record);
  void (*backward_advance)(const DeltaBackwardChunk& chunk, const DeltaColumns& columns,
                           const std::byte* before, std::byte* after, std::byte* record);
  void (*backward_values)(const DeltaBackwardChunk& chunk, const DeltaColumns& columns,
                          const std::byte* d_after, std::byte* d_before, std::byte* record);
  void (*backward_rows)(const DeltaBackwardChunk& chunk, const std::byte* before,
                        const std::byte* d_after, std::byte* record, std::byte* scratch);
  const char* forward_name;
  const char* backward_name;
  const char* step_name;
};

// Only of an instruction set that is available.
DeltaUnit delta_unit(Isa isa);

DeltaShape delta_shape(const LinearProblem& problem);

// Whether log decays are made of raw gates.
inline bool has_raw_gates(const LinearProblem& problem) {
  return problem.traits.gate == GateForm::raw || problem.traits.gate == GateForm::bounded;
}

// Rows of a chunk at most.
std::int64_t longest_delta_chunk(const LinearProblem& problem);

// The rows of one value head of a sequence: row r is row r % rows_per_token of its token.
class DeltaSequence {
 public:
  DeltaSequence(const LinearProblem& problem, const TokenRange& tokens, std::int64_t head);

  std::int64_t rows() const { return tokens_.length * problem_.rows_per_token; }

  // The chunk that begins at row `first`: as long as a chunk may be, but ending before the next row
  // whose decay resets the state.
  void load(std::int64_t first, DeltaGates& gates) const;

  // Rows of that chunk alone.
  std::int64_t chunk_rows(std::int64_t first) const;

  // Everything but o; valid as long as this object.
  DeltaChunk chunk(const DeltaShape& shape, std::int64_t first, const DeltaGates& gates) const;
  UnitRow reads(const RowsView& rows, std::int64_t first, std::int64_t head) const;

  // Gradients of the raw gate at the row's token from that of its log decay, where a row has one.
  struct RawGate {
    double gate = 0.0;
    double rate = 0.0;
  };
  RawGate pull_gate(std::int64_t row, double d_log) const;
  double pull_beta(std::int64_t row, double d_beta) const;

  bool decays(std::int64_t row) const {
    return problem_.traits.gate != GateForm::none && row % problem_.rows_per_token == 0;
  }

 private:
  double raw_gate(std::int64_t row, std::int64_t d) const;
  double dt_bias(std::int64_t d) const;
  double log_decay(std::int64_t row, std::int64_t d) const;
  bool resets(std::int64_t row) const;
  double raw_beta(std::int64_t row) const;
  double beta(std::int64_t row) const;

  const LinearProblem& problem_;
  TokenRange tokens_;
  std::int64_t head_;
  DeltaRawGates raw_gates_;
};

}  // namespace onchip::cpu
