// What the host sides of scalar_decay's forward, step and backward share: the unit, and a chunk of
// a problem.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/linear.hpp"
#include "cpu/cpu_features.hpp"
#include "cpu/linear_host.hpp"
#include "cpu/linear_scalar.hpp"

namespace onchip::cpu {

struct ScalarUnit {
  std::size_t (*state_bytes)(const LinearShape& shape);
  bool (*load_state)(const LinearShape& shape, const UnitState& matrix, const UnitState& normaliser,
                     std::byte* state);
  void (*store_state)(const LinearShape& shape, const std::byte* state, const UnitState& matrix,
                      const UnitState& normaliser);
  std::size_t (*forward_scratch_bytes)(const LinearShape& shape);
  void (*outputs)(const ScalarChunk& chunk, const std::byte* before, std::byte* after,
                  std::byte* scratch);
  void (*local_state)(const ScalarChunk& chunk, std::byte* local, std::byte* scratch);
  void (*join)(const LinearShape& shape, const ChunkGates& gates, bool empty, std::int64_t slice,
               std::int64_t slices, const std::byte* before, const std::byte* local,
               std::byte* after);
  double (*state_dot)(const LinearShape& shape, const std::byte* a, const std::byte* b);
  std::size_t (*backward_scratch_bytes)(const LinearShape& shape);
  std::size_t (*read_bytes)(const LinearShape& shape);
  void (*pull_read)(const ScalarChunk& chunk, const ScalarGradients& gradients,
                    const std::byte* before, std::byte* d_read, std::byte* scratch);
  void (*local_gradient)(const ScalarChunk& chunk, const std::byte* d_read, std::byte* local,
                         std::byte* scratch);
  void (*gradients)(const ScalarChunk& chunk, const ScalarGradients& gradients,
                    const std::byte* before, const std::byte* d_after, const std::byte* d_read,
                    std::byte* scratch);
  const char* forward_name;
  const char* step_name;
  const char* backward_name;
};

// Only of an instruction set that is available.
ScalarUnit scalar_unit(Isa isa);

// Everything of a chunk but its output and gates, which are `gates` once filled: tokens first .. of
// a sequence.
ScalarChunk scalar_chunk(const LinearProblem& problem, const TokenRange& tokens, std::int64_t head,
                         std::int64_t first, const ChunkGates& gates);

}  // namespace onchip::cpu
