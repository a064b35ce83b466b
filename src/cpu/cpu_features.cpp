#include "cpu/cpu_features.hpp"

#include <cstddef>
#include <iterator>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace onchip::cpu {

namespace {

struct Features {
  bool avx2 = false;
  bool avx512 = false;
  bool avx512_bf16 = false;
};

#if defined(__x86_64__)

// The register state that the operating system saves (XCR0).
std::uint64_t saved_state() {
  std::uint32_t low = 0;
  std::uint32_t high = 0;
  // NOLINTNEXTLINE(portability-no-assembler): the builtin wants all of the file compiled for AVX.
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (std::uint64_t{high} << 32) | low;
}

Features detect() {
  constexpr unsigned kFma = 1u << 12, kOsxsave = 1u << 27, kAvx = 1u << 28, kF16c = 1u << 29;
  constexpr unsigned kAvx2 = 1u << 5;
  constexpr unsigned kAvx512 = (1u << 16) | (1u << 17) | (1u << 30) | (1u << 31);  // F, DQ, BW, VL
  constexpr std::uint64_t kYmmState = 0x06, kZmmState = 0xe6;

  Features features;
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0) return features;
  constexpr unsigned kBase = kFma | kOsxsave | kAvx | kF16c;
  if ((ecx & kBase) != kBase) return features;
  const std::uint64_t state = saved_state();
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return features;
  features.avx2 = (ebx & kAvx2) != 0 && (state & kYmmState) == kYmmState;
  features.avx512 = features.avx2 && (ebx & kAvx512) == kAvx512 && (state & kZmmState) == kZmmState;
  constexpr unsigned kBf16 = 1u << 5;
  if (__get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0) {
    features.avx512_bf16 = features.avx512 && (eax & kBf16) != 0;
  }
  return features;
}

#else

Features detect() { return {}; }

#endif

bool is_built(Isa isa) {
  return isa == Isa::portable || (isa == Isa::avx2 && ONCHIP_CPU_HAS_AVX2 != 0) ||
         (isa == Isa::avx512 && ONCHIP_CPU_HAS_AVX512 != 0) ||
         (isa == Isa::avx512_bf16 && ONCHIP_CPU_HAS_AVX512_BF16 != 0);
}

bool is_offered(Isa isa) {
  static const Features features = detect();
  switch (isa) {
    case Isa::portable:
      return true;
    case Isa::avx2:
      return features.avx2;
    case Isa::avx512:
      return features.avx512;
    case Isa::avx512_bf16:
      return features.avx512_bf16;
  }
  return false;
}

}  // namespace

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::portable:
      return "portable";
    case Isa::avx2:
      return "avx2";
    case Isa::avx512:
      return "avx512";
    case Isa::avx512_bf16:
      return "avx512_bf16";
  }
  return "unknown";
}

std::string isa_problem(Isa isa) {
  if (!is_built(isa)) return std::string(isa_name(isa)) + " is not built into this library";
  if (!is_offered(isa)) return "this CPU does not offer " + std::string(isa_name(isa));
  return "";
}

bool isa_available(Isa isa) { return isa_problem(isa).empty(); }

IsaChoice choose_isa(const Settings& settings) {
  if (!settings.cpu_isa_problem.empty()) return {Isa::portable, settings.cpu_isa_problem};
  for (std::size_t i = std::size(kIsas); i-- > 0;) {  // best first
    const Isa isa = kIsas[i];
    if (settings.cpu_isa.empty()) {
      if (isa_available(isa)) return {isa, ""};
    } else if (settings.cpu_isa == isa_name(isa)) {
      const std::string problem = isa_problem(isa);
      return {isa, problem.empty() ? "" : "ONCHIP_CPU_ISA = " + settings.cpu_isa + ": " + problem};
    }
  }
  return {Isa::portable, "ONCHIP_CPU_ISA: no instruction set called " + settings.cpu_isa};
}

}  // namespace onchip::cpu
