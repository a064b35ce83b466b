// One row of a merge: o = weight1 o1 + weight2 o2. Compiled once per instruction set.
#include "cpu/attention_unit.hpp"
#include "cpu/simd.hpp"

namespace onchip::cpu::ONCHIP_CPU_ISA {
namespace {

template <DType kStored>
void merge_row(std::int64_t head_dim, const MergeRow& row) {
  using T = Arithmetic<kStored>::T;
  using S = Simd<T>;
  constexpr std::int64_t kSize = sizeof(typename Arithmetic<kStored>::Element);
  const Vec<T> weight1 = S::broadcast(static_cast<T>(row.weight1));
  const Vec<T> weight2 = S::broadcast(static_cast<T>(row.weight2));
  for (std::int64_t d = 0; d < head_dim; d += kLanes<T>) {
    const auto width =
        static_cast<int>(head_dim - d < kLanes<T> ? head_dim - d : std::int64_t{kLanes<T>});
    Vec<T> o{};
    if (row.has1) o = weight1 * load_vector<kStored>(row.o1 + d * kSize, width);
    if (row.has2) o = S::fma(weight2, load_vector<kStored>(row.o2 + d * kSize, width), o);
    store_vector<kStored>(row.o + d * kSize, o, width);
  }
}

}  // namespace

void attention_merge_row(DType dtype, std::int64_t head_dim, const MergeRow& row) {
  switch (dtype) {
    case DType::f64:
      merge_row<DType::f64>(head_dim, row);
      return;
    case DType::f32:
      merge_row<DType::f32>(head_dim, row);
      return;
    case DType::bf16:
      merge_row<DType::bf16>(head_dim, row);
      return;
    case DType::f16:
      merge_row<DType::f16>(head_dim, row);
      return;
    default:
      return;
  }
}

}  // namespace onchip::cpu::ONCHIP_CPU_ISA
