#include "cpu/linear_scalar_host.hpp"
#include "cpu/isa_table.hpp"

namespace onchip::cpu {

#define ONCHIP_CPU_UNIT(isa)                                                             \
  ScalarUnit {                                                                           \
    isa::linear_state_bytes, isa::linear_load_state, isa::linear_store_state,            \
        isa::scalar_forward_scratch_bytes, isa::scalar_outputs, isa::scalar_local_state, \
        isa::scalar_join, isa::linear_state_dot, isa::scalar_backward_scratch_bytes,     \
        isa::scalar_read_bytes, isa::scalar_pull_read, isa::scalar_local_gradient,       \
        isa::scalar_gradients, "linear_forward/scalar_decay/" #isa,                      \
        "linear_step/scalar_decay/" #isa, "linear_backward/scalar_decay/" #isa           \
  }

ScalarUnit scalar_unit(Isa isa) { ONCHIP_CPU_RETURN_TABLE(isa, ONCHIP_CPU_UNIT); }

#undef ONCHIP_CPU_UNIT

ScalarChunk scalar_chunk(const LinearProblem& problem, const TokenRange& tokens, std::int64_t head,
                         std::int64_t first, const ChunkGates& gates) {
  const LinearTensors& in = problem.inputs;
  const std::int64_t row = tokens.begin + first;
  const std::int64_t key_head = problem.key_head(head);
  ScalarChunk chunk;
  chunk.shape = linear_shape(problem);
  chunk.scale = problem.head_dim_k == 0 ? 0.0 : problem.scale;  // its default is infinite there
  chunk.read = problem.traits.read;
  chunk.eps = problem.eps;
  chunk.detach_normalizer = problem.detach_normalizer;
  chunk.gates = &gates;
  chunk.q = unit_row(in.q, tokens.batch, row, key_head);
  chunk.k = unit_row(in.k, tokens.batch, row, key_head);
  chunk.v = unit_row(in.v, tokens.batch, row, head);
  chunk.z = unit_row(in.z, tokens.batch, row, head);
  chunk.z_dtype = in.z.dtype;
  if (in.skip.wanted) {
    chunk.skip = in.skip.at(0, 0, head);
    chunk.skip_dtype = in.skip.dtype;
    chunk.skip_width = problem.skip_width;
  }
  chunk.weighs = problem.traits.write != WriteForm::plain;
  chunk.recurrent = tokens.length < kRecurrentRows;
  return chunk;
}

}  // namespace onchip::cpu
