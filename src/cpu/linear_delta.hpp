// One chunk of the engine delta_rule, S_t = S' - k_t (e_t^T S'') + k_t x_t^T: what the host hands
// to the units. States in scratch memory are opaque here (linear_tiles.hpp has their form), of the
// arithmetic's type: fp32, for fp64 inputs fp64.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/linear_unit.hpp"

namespace onchip::cpu {

// Rows of a chunk at most. Short chunks keep the triangular systems small beside the products with
// the state; where channels decay, every pair of rows has a product of its own.
constexpr std::int64_t kDeltaRows = 32;
constexpr std::int64_t kDeltaChannelRows = 16;
// A chunk this short runs row by row.
constexpr std::int64_t kDeltaRowByRow = 4;

// Of one value head, whatever the chunk.
struct DeltaShape {
  LinearShape linear;
  EraseForm erase = EraseForm::keys;
  bool channels = false;   // the decay has dk numbers a row
  bool exclusive = false;  // e reads the state before the decay
  bool l2norm = false;     // of q and k
  double scale = 1.0;
  std::int64_t rows_per_token = 1;  // the last one reads
};

// What a chunk's rows have besides channels, in double precision. A reset is always the first row
// of its chunk, so that no pair of rows has one between.
struct DeltaGates {
  std::int64_t rows = 0;
  bool reset = false;             // nothing of the state before passes the first decay
  double first = 0.0;             // log of the first row's decay, base 2
  double cumulative[kDeltaRows];  // sum of log decays after the first row up to row i, base 2
  double beta[kDeltaRows];        // what erases and writes; 1 where channels do
};

// How the log decay of channel d is made of a raw gate x, x' = x + dt_bias[d]:
// -factor softplus(x'), or lower_bound / (1 + e^(-factor x')).
struct DeltaRawGates {
  bool bounded = false;
  double factor = 0.0;
  double lower_bound = 0.0;
  UnitRow dt_bias;  // [dk]; data NULL: 0
  DType dt_bias_dtype = DType::f32;
};

struct DeltaChunk {
  DeltaShape shape;
  const DeltaGates* gates = nullptr;
  std::int64_t first_read = 0;  // the first row that reads; every rows_per_token-th from there does
  UnitRow q, o;                 // of the rows that read
  UnitRow k, v, a, b;
  DType a_dtype = DType::f32;
  DType b_dtype = DType::f32;
  // Of channels: log decays, or the gates that they are made of.
  UnitRow gate;
  DType gate_dtype = DType::f32;
  const DeltaRawGates* raw = nullptr;
  bool empty = false;       // the state before is 0: it is not read
  bool row_by_row = false;  // the state before, or a row, is not finite
};

// Columns of values, of states and outputs: what a task of its own computes.
struct DeltaColumns {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

// What backward has besides. Gradients of rows that several value heads share are summed in scratch
// memory, [row][dk] of the arithmetic's type, and stored with the last head; NULL: there is one
// head.
struct DeltaBackwardChunk {
  DeltaChunk forward;
  UnitRow d_o, dq;  // of the rows that read
  UnitRow dk, dv, da, db;
  UnitRow d_gate;  // of channels
  std::byte* q_sums = nullptr;
  std::byte* k_sums = nullptr;
  std::byte* a_sums = nullptr;
  bool first_head = true;
  bool last_head = true;
  double* d_decay = nullptr;    // [rows] of the log decay, where it is one number
  double* d_rate = nullptr;     // of raw gates, added to: of log(factor)
  double* d_dt_bias = nullptr;  // [dk]
  double* d_beta = nullptr;     // [rows]
};

// What a state holds.
struct StateContent {
  bool empty = true;
  bool finite = true;
};

#define ONCHIP_CPU_DECLARE_LINEAR_DELTA(isa)                                                       \
  namespace isa {                                                                                  \
  std::size_t delta_state_bytes(const DeltaShape& shape);                                          \
  /* Absent: 0. */                                                                                 \
  StateContent delta_load_state(const DeltaShape& shape, const UnitState& matrix,                  \
                                std::byte* state);                                                 \
  void delta_store_state(const DeltaShape& shape, const std::byte* state,                          \
                         const UnitState& matrix);                                                 \
  std::size_t delta_forward_scratch_bytes(const DeltaShape& shape);                                \
  /* The chunk's outputs, where o has memory, and the state after it in place of the one */        \
  /* before. Whether all that was read is finite. */                                               \
  bool delta_forward(const DeltaChunk& chunk, std::byte* state, std::byte* scratch);               \
  /* The same in three parts, which leave what they find in `scratch` to the next one. First */    \
  /* what needs no state; whether all that was read is finite. */                                  \
  bool delta_prepare(const DeltaChunk& chunk, std::byte* scratch);                                 \
  /* Then columns of the state after the chunk; */                                                 \
  void delta_advance(const DeltaChunk& chunk, const DeltaColumns& columns,                         \
                     const std::byte* before, std::byte* after, std::byte* scratch);               \
  void delta_read(const DeltaChunk& chunk, const std::byte* before, std::byte* scratch);           \
  std::size_t delta_backward_record_bytes(const DeltaShape& shape);                                \
  std::size_t delta_backward_scratch_bytes(const DeltaShape& shape);                               \
  std::size_t delta_sum_row_bytes(const DeltaShape& shape);                                        \
  /* From the state before the chunk and the gradient of that after it to the gradient of */       \
  /* the one before, in place. */                                                                  \
  void delta_backward(const DeltaBackwardChunk& chunk, const std::byte* state, std::byte* d_state, \
                      std::byte* record, std::byte* scratch);                                      \
  /* The same in parts, with a record each chunk: what needs no state, as above; */                \
  bool delta_backward_prepare(const DeltaBackwardChunk& chunk, std::byte* record);                 \
  /* columns of the state after the chunk and of what backward keeps of forward; */                \
  void delta_backward_advance(const DeltaBackwardChunk& chunk, const DeltaColumns& columns,        \
                              const std::byte* before, std::byte* after, std::byte* record);       \
  /* columns of the gradient of the state before it; */                                            \
  void delta_backward_values(const DeltaBackwardChunk& chunk, const DeltaColumns& columns,         \
                             const std::byte* d_after, std::byte* d_before, std::byte* record);    \
  /* the rows' gradients. */                                                                       \
  void delta_backward_rows(const DeltaBackwardChunk& chunk, const std::byte* before,               \
                           const std::byte* d_after, std::byte* record, std::byte* scratch);       \
  }

ONCHIP_CPU_DECLARE_LINEAR_DELTA(portable)
ONCHIP_CPU_DECLARE_LINEAR_DELTA(avx2)
ONCHIP_CPU_DECLARE_LINEAR_DELTA(avx512)
ONCHIP_CPU_DECLARE_LINEAR_DELTA(avx512_bf16)
#undef ONCHIP_CPU_DECLARE_LINEAR_DELTA

}  // namespace onchip::cpu
