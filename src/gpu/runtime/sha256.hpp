// SHA-256 (FIPS 180-4): names of cached kernels and proof that their bytes are whole.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace onchip::gpu {

using Digest = std::array<std::uint8_t, 32>;

Digest sha256(std::string_view bytes);
std::string hex(const Digest& digest);

}  // namespace onchip::gpu
