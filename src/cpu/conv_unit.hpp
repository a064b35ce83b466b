// What the host side of CPU short causal convolution hands to the code compiled once per
// instruction set: plain data only. A unit works on a block of channels of one sequence.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/dtype.hpp"
#include "cpu/linear_unit.hpp"

namespace onchip::cpu {

// Channels of a block, a multiple of every vector: what a block stages stays in the first cache.
constexpr std::int64_t kConvChannels = 128;
constexpr std::int64_t kConvWidth = 4096;  // widest convolution
constexpr std::size_t kConvAlignment = 64;

// Numbers [channel][width] of a block: weights, states and their gradients; the stride in bytes.
// data NULL: zeros, or not wanted.
struct UnitTaps {
  std::byte* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t channel_stride = 0;
};

struct ConvBlock {
  DType dtype = DType::f32;  // of x and all that is shaped like it, and of states
  bool silu = false;
  std::int64_t width = 1;
  std::int64_t channels = 0;  // at most kConvChannels
  UnitTaps weight;
  const std::byte* bias = nullptr;  // NULL: 0
  DType bias_dtype = DType::f32;
};

// The block's channels of one sequence. Rows begin at its first token.
struct ConvSequence {
  UnitRow x;
  UnitTaps state;  // before the first token
  std::int64_t length = 0;
};

struct ConvGradients {
  UnitRow d_y;
  UnitRow dx;                 // data NULL: not wanted
  UnitTaps d_final_state;     // data NULL: 0
  std::byte* sums = nullptr;  // [width + 1][kConvChannels]: dweight, dbias, added to; NULL: neither
};

#define ONCHIP_CPU_DECLARE_CONV(isa)                                                              \
  namespace isa {                                                                                 \
  std::size_t conv_scratch_bytes(DType dtype, std::int64_t width);                                \
  std::size_t conv_sums_bytes(DType dtype, std::int64_t width);                                   \
  /* Weights and bias into scratch, where the functions below find them. */                       \
  void conv_load_block(const ConvBlock& block, std::byte* scratch);                               \
  /* Of tokens begin .. end; y begins at the first token too. */                                  \
  void conv_outputs(const ConvBlock& block, const ConvSequence& sequence, std::int64_t begin,     \
                    std::int64_t end, const UnitRow& y, std::byte* scratch);                      \
  /* dx and sums of tokens begin .. end. */                                                       \
  void conv_gradients(const ConvBlock& block, const ConvSequence& sequence,                       \
                      const ConvGradients& gradients, std::int64_t begin, std::int64_t end,       \
                      std::byte* scratch);                                                        \
  /* The gradient of the state before the first token. */                                         \
  void conv_state_gradient(const ConvBlock& block, const ConvSequence& sequence,                  \
                           const ConvGradients& gradients, const UnitTaps& to,                    \
                           std::byte* scratch);                                                   \
  /* One token; the state is read and written. */                                                 \
  void conv_step(const ConvBlock& block, const UnitTaps& state, const std::byte* x, std::byte* y, \
                 std::byte* scratch);                                                             \
  /* The sum of `count` sums, `stride` bytes apart, as dweight and dbias; either may be NULL. */  \
  void conv_store_sums(const ConvBlock& block, const std::byte* sums, std::size_t stride,         \
                       std::int64_t count, const UnitTaps& dweight, std::byte* dbias);            \
  }

ONCHIP_CPU_DECLARE_CONV(portable)
ONCHIP_CPU_DECLARE_CONV(avx2)
ONCHIP_CPU_DECLARE_CONV(avx512)
ONCHIP_CPU_DECLARE_CONV(avx512_bf16)
#undef ONCHIP_CPU_DECLARE_CONV

}  // namespace onchip::cpu
