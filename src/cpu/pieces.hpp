#pragma once

#include <cstddef>
#include <cstdint>

namespace onchip::cpu::ONCHIP_CPU_ISA {
namespace {

constexpr std::size_t kPieceAlignment = 64;

// Hands out pieces of memory; from no memory only their sizes.
class Pieces {
 public:
  explicit Pieces(std::byte* base) : base_(base) {}

  template <typename T>
  T* take(std::int64_t count) {
    T* piece = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + bytes_);
    const std::size_t bytes = static_cast<std::size_t>(count) * sizeof(T);
    bytes_ += (bytes + kPieceAlignment - 1) / kPieceAlignment * kPieceAlignment;
    return piece;
  }

  std::size_t bytes() const { return bytes_; }

 private:
  std::byte* base_;
  std::size_t bytes_ = 0;
};

}  // namespace
}  // namespace onchip::cpu::ONCHIP_CPU_ISA
