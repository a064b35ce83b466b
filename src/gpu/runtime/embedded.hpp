// The text of the GPU kernels and their headers, as it was when the library was built. The table is
// written by cmake/embed_sources.cmake.
#pragma once

#include <cstddef>

namespace onchip::gpu {

struct EmbeddedFile {
  const char* path;  // relative to src/, as #include lines write it: "gpu/tile/mma.cuh"
  const char* text;  // ends with a NUL that size does not count
  std::size_t size;
};

extern const EmbeddedFile embedded_files[];  // sorted by path
extern const std::size_t embedded_file_count;

}  // namespace onchip::gpu
