// What the host side of CPU linear attention hands to the code compiled once per instruction set:
// plain data only, as in attention_unit.hpp. Every engine works on chunks of kChunkRows tokens of
// one (sequence, value head).
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/dtype.hpp"
#include "core/linear.hpp"

namespace onchip::cpu {

// Tokens of a chunk: the tile of every engine, whatever the call's chunk_len. A sequence's chunks
// start at its first token, so its bits depend on nothing else in the call.
constexpr std::int64_t kChunkRows = 64;

// Row t of a chunk; strides in bytes. data is NULL where there is no such tensor.
struct UnitRow {
  std::byte* data = nullptr;
  std::int64_t row_stride = 0;
};

// One part of a state, of one head; strides in bytes. data NULL: absent.
struct UnitState {
  std::byte* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t row_stride = 0;     // along dk
  std::int64_t column_stride = 0;  // along dv
};

// What a chunk's rows have besides channels, in double precision. `cumulative` counts a reset as 0:
// differences are only used inside a segment, and with doubles none needs an anchor. Where the
// state before the chunk does not reach row i, or row j does not reach the end, the segments say
// so.
struct ChunkGates {
  std::int64_t rows = 0;
  double decay[kChunkRows];       // log of the decay in front of row i; below -104 a reset
  double cumulative[kChunkRows];  // sum of decay from the chunk's first row to row i, base 2
  std::int32_t
      segment[kChunkRows];   // the last reset at or before row i, or -1: the state's segment
  double write[kChunkRows];  // the weight of k x^T
  double floor[kChunkRows];  // mlstm: what |denominator| is at least
};

// Of one (sequence, value head), everything but the rows.
struct LinearShape {
  DType dtype = DType::f32;
  std::int64_t head_dim_k = 0;
  std::int64_t head_dim_v = 0;
  bool normalised = false;  // the state has one more column: the normaliser
};

constexpr std::size_t kLinearAlignment = 64;

}  // namespace onchip::cpu
