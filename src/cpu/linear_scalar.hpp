// One chunk of the engine scalar_decay, S_t = alpha_t S_{t-1} + w_t k_t x_t^T: what the host hands
// to the units. States in scratch memory are opaque here (linear_tiles.hpp has their form), of the
// arithmetic's type: fp32, for fp64 inputs fp64.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/linear_unit.hpp"

namespace onchip::cpu {

// A sequence shorter than this runs token by token.
constexpr std::int64_t kRecurrentRows = 8;

struct ScalarChunk {
  LinearShape shape;
  double scale = 1.0;
  ReadForm read = ReadForm::plain;
  double eps = 0.0;
  bool detach_normalizer = false;
  const ChunkGates* gates = nullptr;
  UnitRow q, k, v, z, o;
  DType z_dtype = DType::f32;       // dz has it too; q, k, v and o have the shape's
  const std::byte* skip = nullptr;  // D of the head; NULL: absent
  DType skip_dtype = DType::f32;
  std::int64_t skip_width = 0;
  bool weighs = false;     // gates->write is not 1
  bool empty = false;      // the state before the chunk is 0: it is not read
  bool recurrent = false;  // token by token
};

// Backward of a chunk, beside the chunk itself (whose `o` is not used).
struct ScalarGradients {
  UnitRow d_o;
  UnitRow dq, dk;  // of the key head; data NULL: not wanted
  UnitRow dv, dz;
  bool first_head = false;    // of those that read one key head: nothing has been summed yet
  bool last_head = false;     // all have: dq and dk are stored
  double* d_decay = nullptr;  // [rows], of the log decays; NULL: not wanted
  double* d_write = nullptr;  // [rows], of the weights; NULL: not wanted
  double* d_skip = nullptr;   // [skip_width], added to
};

#define ONCHIP_CPU_DECLARE_LINEAR_SCALAR(isa)                                                      \
  namespace isa {                                                                                  \
  std::size_t linear_state_bytes(const LinearShape& shape);                                        \
  /* Absent parts are 0. Whether anything in it is not. */                                         \
  bool linear_load_state(const LinearShape& shape, const UnitState& matrix,                        \
                         const UnitState& normaliser, std::byte* state);                           \
  void linear_store_state(const LinearShape& shape, const std::byte* state,                        \
                          const UnitState& matrix, const UnitState& normaliser);                   \
  std::size_t scalar_forward_scratch_bytes(const LinearShape& shape);                              \
  /* The chunk's outputs, and the state after it where `after` is not NULL; it may be `before`. */ \
  void scalar_outputs(const ScalarChunk& chunk, const std::byte* before, std::byte* after,         \
                      std::byte* scratch);                                                         \
  /* The state that the chunk alone leaves, from 0. */                                             \
  void scalar_local_state(const ScalarChunk& chunk, std::byte* local, std::byte* scratch);         \
  /* after = decay of the chunk * before + local, with the bits of scalar_outputs, for one of */   \
  /* `slices` slices of the state's rows; `after` may be `before` or `local`. */                   \
  void scalar_join(const LinearShape& shape, const ChunkGates& gates, bool empty,                  \
                   std::int64_t slice, std::int64_t slices, const std::byte* before,               \
                   const std::byte* local, std::byte* after);                                      \
  /* <a, b> of two states. */                                                                      \
  double linear_state_dot(const LinearShape& shape, const std::byte* a, const std::byte* b);       \
  std::size_t scalar_backward_scratch_bytes(const LinearShape& shape);                             \
  /* Of a chunk's rows [rows][width]: the gradients of what they read. */                          \
  std::size_t scalar_read_bytes(const LinearShape& shape);                                         \
  /* From d_o to `d_read`, with dz and d_skip; `before` as in scalar_outputs. */                   \
  void scalar_pull_read(const ScalarChunk& chunk, const ScalarGradients& gradients,                \
                        const std::byte* before, std::byte* d_read, std::byte* scratch);           \
  /* What the chunk alone adds to the gradient of the state before it. */                          \
  void scalar_local_gradient(const ScalarChunk& chunk, const std::byte* d_read, std::byte* local,  \
                             std::byte* scratch);                                                  \
  /* The rows' gradients from the state before the chunk and the gradient of the one after. */     \
  void scalar_gradients(const ScalarChunk& chunk, const ScalarGradients& gradients,                \
                        const std::byte* before, const std::byte* d_after,                         \
                        const std::byte* d_read, std::byte* scratch);                              \
  }

ONCHIP_CPU_DECLARE_LINEAR_SCALAR(portable)
ONCHIP_CPU_DECLARE_LINEAR_SCALAR(avx2)
ONCHIP_CPU_DECLARE_LINEAR_SCALAR(avx512)
ONCHIP_CPU_DECLARE_LINEAR_SCALAR(avx512_bf16)
#undef ONCHIP_CPU_DECLARE_LINEAR_SCALAR

}  // namespace onchip::cpu
