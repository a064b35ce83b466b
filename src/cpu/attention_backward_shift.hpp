// What backward subtracts from dP in every row, from o and dO.
#pragma once

#include "cpu/attention_rows.hpp"
#include "cpu/attention_unit.hpp"
#include "cpu/score_adjustments.hpp"
#include "cpu/simd.hpp"

namespace onchip::cpu::ONCHIP_CPU_ISA {
namespace {

// shift = d_lse - sum(o dO). The sum runs in the order of dP's: where one key has all the weight, o
// is v, and dP + shift is exactly d_lse.
template <DType kStored>
void find_shifts(const BackwardTask& task) {
  using T = Arithmetic<kStored>::T;
  constexpr int kCount = kLanes<T>;
  constexpr std::int64_t kSize = sizeof(typename Arithmetic<kStored>::Element);
  for (std::int64_t first = task.row_begin; first < task.row_end; first += kCount) {
    const int rows = static_cast<int>(smaller(kCount, task.row_end - first));
    std::int64_t head[kCount];
    std::int64_t position[kCount];
    for (int i = 0; i < kCount; ++i) {
      const std::int64_t row = first + smaller(i, rows - 1);
      head[i] = row / task.seqlen_q;
      position[i] = row - head[i] * task.seqlen_q;
    }
    const auto at = [&](const UnitRows& from, int i) {
      return from.data + head[i] * from.head_stride + position[i] * from.row_stride;
    };
    Vec<T> sum{};
    for (std::int64_t d = 0; d < task.head_dim_v; d += kCount) {
      const int width = static_cast<int>(smaller(kCount, task.head_dim_v - d));
      Vec<T> o[kCount];
      Vec<T> d_o[kCount];
      for (int i = 0; i < kCount; ++i) {
        o[i] = load_vector<kStored>(at(task.o, i) + d * kSize, width);
        d_o[i] = load_vector<kStored>(at(task.d_o, i) + d * kSize, width);
      }
      transpose<T>(o);
      transpose<T>(d_o);
      for (int i = 0; i < width; ++i) sum = Simd<T>::fma(o[i], d_o[i], sum);
    }
    for (int i = 0; i < rows; ++i) {
      const T d_lse = task.d_lse.data == nullptr ? T{0} : load_as<T>(at(task.d_lse, i));
      const T shift = d_lse - sum[i];
      std::memcpy(at(task.shift, i), &shift, sizeof(shift));
    }
  }
}

}  // namespace
}  // namespace onchip::cpu::ONCHIP_CPU_ISA
