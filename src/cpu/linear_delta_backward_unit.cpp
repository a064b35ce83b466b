// delta_rule backward, one chunk of one head (linear_delta_backward_chunk.hpp), whole or in parts.
// Compiled once per instruction set.
#include "cpu/linear_delta_backward_chunk.hpp"

namespace onchip::cpu::ONCHIP_CPU_ISA {

std::size_t delta_backward_record_bytes(const DeltaShape& shape) {
  std::size_t bytes = 0;
  with_delta_arithmetic(shape, [&](auto number) {
    bytes = DeltaBackwardRecord<decltype(number)>(shape, nullptr).pieces.bytes();
  });
  return bytes;
}

std::size_t delta_backward_scratch_bytes(const DeltaShape& shape) {
  std::size_t bytes = 0;
  with_delta_arithmetic(shape, [&](auto number) {
    using T = decltype(number);
    Pieces pieces(nullptr);
    bytes = DeltaBackwardScratch<T>(DeltaTiles<T>(shape, pieces), nullptr).pieces.bytes();
  });
  return bytes;
}

std::size_t delta_sum_row_bytes(const DeltaShape& shape) {
  std::size_t bytes = 0;
  with_delta_arithmetic(shape, [&](auto number) {
    using T = decltype(number);
    bytes = static_cast<std::size_t>(tile_stride<T>(shape.linear.head_dim_k)) * sizeof(T);
  });
  return bytes;
}

void delta_backward(const DeltaBackwardChunk& chunk, const std::byte* state, std::byte* d_state,
                    std::byte* record, std::byte* scratch) {
  with_delta_arithmetic(chunk.forward.shape, [&](auto number) {
    using T = decltype(number);
    DeltaBackward<T>(chunk, record, scratch)
        .run(reinterpret_cast<const T*>(state), reinterpret_cast<T*>(d_state));
  });
}

bool delta_backward_prepare(const DeltaBackwardChunk& chunk, std::byte* record) {
  bool finite = true;
  with_delta_arithmetic(chunk.forward.shape, [&](auto number) {
    finite = DeltaBackward<decltype(number)>(chunk, record, nullptr).prepare();
  });
  return finite;
}

void delta_backward_advance(const DeltaBackwardChunk& chunk, const DeltaColumns& columns,
                            const std::byte* before, std::byte* after, std::byte* record) {
  with_delta_arithmetic(chunk.forward.shape, [&](auto number) {
    using T = decltype(number);
    DeltaBackward<T>(chunk, record, nullptr)
        .advance(columns, reinterpret_cast<const T*>(before), reinterpret_cast<T*>(after));
  });
}

void delta_backward_values(const DeltaBackwardChunk& chunk, const DeltaColumns& columns,
                           const std::byte* d_after, std::byte* d_before, std::byte* record) {
  with_delta_arithmetic(chunk.forward.shape, [&](auto number) {
    using T = decltype(number);
    DeltaBackward<T>(chunk, record, nullptr)
        .pull_values(columns, reinterpret_cast<const T*>(d_after), reinterpret_cast<T*>(d_before));
  });
}

void delta_backward_rows(const DeltaBackwardChunk& chunk, const std::byte* before,
                         const std::byte* d_after, std::byte* record, std::byte* scratch) {
  with_delta_arithmetic(chunk.forward.shape, [&](auto number) {
    using T = decltype(number);
    DeltaBackward<T>(chunk, record, scratch)
        .pull_rows(reinterpret_cast<const T*>(before), reinterpret_cast<const T*>(d_after));
  });
}

}  // namespace onchip::cpu::ONCHIP_CPU_ISA
