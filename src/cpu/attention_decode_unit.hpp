// What the host side of CPU decoding hands to the code compiled once per instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/dtype.hpp"
#include "cpu/attention_unit.hpp"

namespace onchip::cpu {

// Element (block, row, head) of a cache; strides in bytes.
struct UnitCache {
  const std::byte* data = nullptr;  // of the task's first kv head, block 0
  std::int64_t block_stride = 0;
  std::int64_t row_stride = 0;
  std::int64_t head_stride = 0;
};

// Rows [call.row_begin, call.row_end) of each of some kv heads' lists, over keys [key_begin,
// key_end). `call` is that of the first kv head; its k and v are not used, its head strides reach
// the others' query heads too.
struct DecodeTask {
  ForwardTask call;
  std::int64_t kv_heads = 1;
  std::int64_t group = 1;  // query heads of a kv head
  UnitCache k_cache, v_cache;
  const std::byte* pages = nullptr;  // int32, of this sequence; NULL: all keys lie in block 0
  std::int64_t block_rows = 1;
  std::int64_t key_begin = 0;
  std::int64_t key_end = 0;
  bool wide = false;  // fp64 arithmetic whatever the dtype
};

// Rows of one kv head in a task at most. No result depends on how rows are cut into tasks.
constexpr std::int64_t kMaxDecodeRows = 64;

// What the sizes of a state and of a worker's scratch memory depend on.
struct DecodeShape {
  DType dtype = DType::f32;
  std::int64_t head_dim_qk = 0;
  std::int64_t head_dim_v = 0;
  std::int64_t rows = 0;  // of a task, all its kv heads
  bool wide = false;
};

// A state is the online softmax of a task's rows over some keys. part: of the task's keys, from
// nothing. start: of the sink alone. fold: of the keys of both. store: o and lse.
#define ONCHIP_CPU_DECLARE_DECODE(isa)                                                         \
  namespace isa {                                                                              \
  std::size_t attention_decode_state_bytes(const DecodeShape& shape);                          \
  std::size_t attention_decode_scratch_bytes(const DecodeShape& shape);                        \
  void attention_decode_part(const DecodeTask& task, std::byte* state, std::byte* scratch);    \
  void attention_decode_start(const DecodeTask& task, std::byte* state);                       \
  void attention_decode_fold(const DecodeTask& task, std::byte* state, const std::byte* part); \
  void attention_decode_store(const DecodeTask& task, const std::byte* state);                 \
  }

ONCHIP_CPU_DECLARE_DECODE(portable)
ONCHIP_CPU_DECLARE_DECODE(avx2)
ONCHIP_CPU_DECLARE_DECODE(avx512)
ONCHIP_CPU_DECLARE_DECODE(avx512_bf16)
#undef ONCHIP_CPU_DECLARE_DECODE

}  // namespace onchip::cpu
