// Compiled once per instruction set, as the units of src/cpu are.
#include "cpu/simd_probe.hpp"

#include "cpu/logistic.hpp"
#include "cpu/simd.hpp"

namespace onchip::cpu::ONCHIP_CPU_ISA {
namespace {

template <typename T>
void exp2_all(const T* x, T* y, std::size_t count) {
  for (std::size_t i = 0; i < count; i += kLanes<T>) {
    Simd<T>::store(y + i, exp2<T>(Simd<T>::load(x + i)));
  }
}

template <typename T>
void tanh_all(const T* x, T* y, std::size_t count) {
  for (std::size_t i = 0; i < count; i += kLanes<T>) {
    Simd<T>::store(y + i, tanh<T>(Simd<T>::load(x + i)));
  }
}

template <typename T>
void softplus_all(const T* x, T* y, std::size_t count) {
  for (std::size_t i = 0; i < count; i += kLanes<T>) {
    Simd<T>::store(y + i, softplus<T>(Simd<T>::load(x + i)));
  }
}

template <typename T>
void logistic_all(const T* x, T* y, T* slope, std::size_t count) {
  for (std::size_t i = 0; i < count; i += kLanes<T>) {
    Vec<T> of_x{};
    Simd<T>::store(y + i, logistic<T>(Simd<T>::load(x + i), of_x));
    Simd<T>::store(slope + i, of_x);
  }
}

template <DType kStored>
void widen_all(const std::uint16_t* x, float* y, std::size_t count) {
  for (std::size_t i = 0; i < count; i += kLanes<float>) {
    Simd<float>::store(y + i, load_vector<kStored>(reinterpret_cast<const std::byte*>(x + i)));
  }
}

template <DType kStored>
void narrow_all(const float* x, std::uint16_t* y, std::size_t count) {
  for (std::size_t i = 0; i < count; i += kLanes<float>) {
    store_vector<kStored>(reinterpret_cast<std::byte*>(y + i), Simd<float>::load(x + i));
  }
}

template <typename T>
void max_all(const T* a, const T* b, T* y, std::size_t count) {
  for (std::size_t i = 0; i < count; i += kLanes<T>) {
    Simd<T>::store(y + i, Simd<T>::max(Simd<T>::load(a + i), Simd<T>::load(b + i)));
  }
}

template <typename T>
void select_all(const T* a, const T* b, T* y, std::size_t count) {
  using S = Simd<T>;
  for (std::size_t i = 0; i < count; i += kLanes<T>) {
    const Vec<T> left = S::load(a + i);
    const Vec<T> right = S::load(b + i);
    const auto mask = S::less(left, right);
    Vec<T> result = S::select(mask, left, right);
    // The same through the other operations on masks.
    const auto inverse = S::complement(mask);
    if (S::any(S::both(mask, inverse)) || !S::any(S::either(mask, inverse))) result = Vec<T>{};
    S::store(y + i, result);
  }
}

template <typename T>
int transpose_one(const T* x, T* y) {
  Vec<T> rows[kLanes<T>];
  for (int i = 0; i < kLanes<T>; ++i) rows[i] = Simd<T>::load(x + i * kLanes<T>);
  transpose<T>(rows);
  for (int i = 0; i < kLanes<T>; ++i) Simd<T>::store(y + i * kLanes<T>, rows[i]);
  return kLanes<T>;
}

template <DType kStored>
void copy_part(const typename Arithmetic<kStored>::Element* x,
               typename Arithmetic<kStored>::Element* y, int count) {
  store_vector<kStored>(reinterpret_cast<std::byte*>(y),
                        load_vector<kStored>(reinterpret_cast<const std::byte*>(x), count), count);
}

}  // namespace

test::SimdProbe simd_probe() {
  return {.exp2_f32 = exp2_all<float>,
          .exp2_f64 = exp2_all<double>,
          .tanh_f32 = tanh_all<float>,
          .tanh_f64 = tanh_all<double>,
          .softplus_f32 = softplus_all<float>,
          .softplus_f64 = softplus_all<double>,
          .logistic_f32 = logistic_all<float>,
          .logistic_f64 = logistic_all<double>,
          .from_bf16 = widen_all<DType::bf16>,
          .from_f16 = widen_all<DType::f16>,
          .to_bf16 = narrow_all<DType::bf16>,
          .to_f16 = narrow_all<DType::f16>,
          .max_f32 = max_all<float>,
          .max_f64 = max_all<double>,
          .select_f32 = select_all<float>,
          .select_f64 = select_all<double>,
          .transpose_f32 = transpose_one<float>,
          .transpose_f64 = transpose_one<double>,
          .copy_f32 = copy_part<DType::f32>,
          .copy_bf16 = copy_part<DType::bf16>};
}

}  // namespace onchip::cpu::ONCHIP_CPU_ISA
