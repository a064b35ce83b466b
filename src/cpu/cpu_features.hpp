// Which instruction sets this processor and operating system offer to the CPU units.
#pragma once

#include <cstdint>
#include <string>

#include "core/settings.hpp"

namespace onchip::cpu {

// avx512_bf16 is avx512 with dot products of bf16 pairs.
enum class Isa : std::uint8_t { portable, avx2, avx512, avx512_bf16 };
inline constexpr Isa kIsas[] = {Isa::portable, Isa::avx2, Isa::avx512, Isa::avx512_bf16};

const char* isa_name(Isa isa);

// Built into the library and offered by this machine. Portable always is.
bool isa_available(Isa isa);

// Why `isa` cannot be used here; "" if it can.
std::string isa_problem(Isa isa);

struct IsaChoice {
  Isa isa = Isa::portable;
  std::string problem;  // not empty: no instruction set may be used
};

// The best one, or the one that the settings force.
IsaChoice choose_isa(const Settings& settings);

}  // namespace onchip::cpu
