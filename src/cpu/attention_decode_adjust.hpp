// What is added to a row's scores over a tile of cached keys: bias, ALiBi, and -inf where a mask or
// segment ids exclude a key.
#pragma once

#include "cpu/attention_decode_unit.hpp"
#include "cpu/simd.hpp"

namespace onchip::cpu::ONCHIP_CPU_ISA {
namespace {

template <typename T>
class Adjustments {
 public:
  // `adjust`: of a tile's keys, and a vector more.
  Adjustments(const ForwardTask& call, T* adjust) : call_(call), adjust_(adjust) {}

  bool any() const {
    return call_.bias.data != nullptr || call_.mask.data != nullptr ||
           call_.alibi_slopes.data != nullptr || call_.q_segment_ids.data != nullptr;
  }

  // For position i of query head `head` over keys key + [begin, end). Returns how many of them are
  // left.
  int fill(std::int64_t key, std::int64_t head, std::int64_t i, int begin, int end) {
    for (int j = begin; j < end; ++j) adjust_[j] = T{0};
    if (call_.bias.data != nullptr) {
      load_bias(at(call_.bias, head, i) + key * call_.bias.column_stride, begin, end);
    }
    if (call_.alibi_slopes.data != nullptr) {
      const UnitHeadScalars& slopes = call_.alibi_slopes;
      const T slope = load_number<T>(slopes.data + head * slopes.head_stride, slopes.dtype);
      const T diagonal = static_cast<T>(i + call_.diagonal_offset - key);
      for (int j = begin; j < end; ++j) {
        const T distance = diagonal - static_cast<T>(j);
        adjust_[j] -= slope * (distance < T{0} ? -distance : distance);
      }
    }
    if (call_.mask.data != nullptr) {
      const std::byte* mask = at(call_.mask, head, i) + key * call_.mask.column_stride;
      for (int j = begin; j < end; ++j) {
        if (mask[j * call_.mask.column_stride] == std::byte{0}) adjust_[j] = -kInfinity<T>;
      }
    }
    if (call_.q_segment_ids.data != nullptr) {
      const std::int32_t q_id = segment(call_.q_segment_ids, i);
      for (int j = begin; j < end; ++j) {
        if (segment(call_.kv_segment_ids, key + j) != q_id) adjust_[j] = -kInfinity<T>;
      }
    }
    int count = 0;
    for (int j = begin; j < end; ++j) count += excludes(j) ? 0 : 1;
    return count;
  }

  bool excludes(int j) const { return adjust_[j] == -kInfinity<T>; }
  const T* data() const { return adjust_; }

 private:
  static const std::byte* at(const UnitScores& scores, std::int64_t head, std::int64_t i) {
    return scores.data + head * scores.head_stride + i * scores.row_stride;
  }

  static std::int32_t segment(const UnitSegments& ids, std::int64_t at) {
    std::int32_t id;
    std::memcpy(&id, ids.data + at * ids.row_stride, sizeof(id));
    return id;
  }

  void load_bias(const std::byte* bias, int begin, int end) {
    const UnitScores& scores = call_.bias;
    if (scores.dense_columns) {
      switch (scores.dtype) {
        case DType::f32:
          return load_dense_bias<DType::f32>(bias, begin, end);
        case DType::bf16:
          return load_dense_bias<DType::bf16>(bias, begin, end);
        case DType::f16:
          return load_dense_bias<DType::f16>(bias, begin, end);
        default:
          break;
      }
    }
    for (int j = begin; j < end; ++j) {
      adjust_[j] = load_number<T>(bias + j * scores.column_stride, scores.dtype);
    }
  }

  template <DType kBias>
  void load_dense_bias(const std::byte* bias, int begin, int end) {
    constexpr int kCount = kLanes<T>;
    constexpr std::int64_t kBiasSize = sizeof(typename Arithmetic<kBias>::Element);
    for (int j = begin; j < end; j += kCount) {
      const int width = end - j < kCount ? end - j : kCount;
      Simd<T>::store(adjust_ + j, load_numbers<kBias, T>(bias + j * kBiasSize, width));
    }
  }

  const ForwardTask& call_;
  T* adjust_;
};

}  // namespace
}  // namespace onchip::cpu::ONCHIP_CPU_ISA
