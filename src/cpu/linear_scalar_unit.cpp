// scalar_decay forward, one chunk of L rows of one head (linear attention as chunks: Hua et al.
// 2022; Sun et al. 2023; Yang et al. 2023). With b_i the sum of log decays up to row i:
//   O = diag(scale e^b) Q S + P X,  P_ij = scale (q_i . k_j) e^(b_i - b_j) for j <= i,
//   S' = e^(b_L) S + K^T diag(e^(b_L - b)) X.
// Compiled once per instruction set. Only sums that every way of cutting the work shares are made:
// the state after a chunk is e^(b_L) S + (the chunk's own sum), so that chunks may be computed in
// order or side by side with the same bits.
#include "cpu/linear_scalar_forward.hpp"

namespace onchip::cpu::ONCHIP_CPU_ISA {

std::size_t linear_state_bytes(const LinearShape& shape) {
  std::size_t bytes = 0;
  with_arithmetic(shape.dtype, [&](auto number) {
    using T = decltype(number);
    bytes = static_cast<std::size_t>(StateTile<T>(shape).size()) * sizeof(T);
  });
  return bytes;
}

bool linear_load_state(const LinearShape& shape, const UnitState& matrix,
                       const UnitState& normaliser, std::byte* state) {
  bool any = false;
  with_arithmetic(shape.dtype, [&](auto number) {
    using T = decltype(number);
    any = load_state_tile<T>(StateTile<T>(shape), matrix, normaliser, reinterpret_cast<T*>(state));
  });
  return any;
}

void linear_store_state(const LinearShape& shape, const std::byte* state, const UnitState& matrix,
                        const UnitState& normaliser) {
  with_arithmetic(shape.dtype, [&](auto number) {
    using T = decltype(number);
    store_state_tile<T>(StateTile<T>(shape), reinterpret_cast<const T*>(state), matrix, normaliser);
  });
}

std::size_t scalar_forward_scratch_bytes(const LinearShape& shape) {
  std::size_t bytes = 0;
  with_arithmetic(shape.dtype, [&](auto number) {
    bytes = ForwardScratch<decltype(number)>(shape, nullptr).bytes;
  });
  return bytes;
}

void scalar_outputs(const ScalarChunk& chunk, const std::byte* before, std::byte* after,
                    std::byte* scratch) {
  with_stored(chunk.shape.dtype, [&](auto stored) {
    constexpr DType kStored = decltype(stored)::kDType;
    using T = Arithmetic<kStored>::T;
    ForwardChunk<kStored>(chunk, scratch)
        .outputs(reinterpret_cast<const T*>(before), reinterpret_cast<T*>(after));
  });
}

void scalar_local_state(const ScalarChunk& chunk, std::byte* local, std::byte* scratch) {
  with_stored(chunk.shape.dtype, [&](auto stored) {
    constexpr DType kStored = decltype(stored)::kDType;
    using T = Arithmetic<kStored>::T;
    ForwardChunk<kStored>(chunk, scratch).local_state(reinterpret_cast<T*>(local));
  });
}

void scalar_join(const LinearShape& shape, const ChunkGates& gates, bool empty, std::int64_t slice,
                 std::int64_t slices, const std::byte* before, const std::byte* local,
                 std::byte* after) {
  with_arithmetic(shape.dtype, [&](auto number) {
    using T = decltype(number);
    const StateTile<T> tile(shape);
    join_states<T>(tile, tile.rows * slice / slices, tile.rows * (slice + 1) / slices,
                   empty ? T{0} : whole_decay<T>(gates), reinterpret_cast<const T*>(before),
                   reinterpret_cast<const T*>(local), reinterpret_cast<T*>(after));
  });
}

}  // namespace onchip::cpu::ONCHIP_CPU_ISA
