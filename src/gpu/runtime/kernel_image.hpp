// A compiled kernel and the record that holds it on disk and in the archive.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "gpu/runtime/nvrtc.hpp"

namespace onchip::gpu {

struct KernelImage {
  std::string identity;  // KernelSource::identity of what was compiled
  std::string compiler;  // NVRTC's version
  KernelResources resources;
  std::string log;
  std::vector<char> cubin;
};

// Record: magic, format, total size, SHA-256 of the rest, then the fields, each with its size.
std::string write_record(const KernelImage& image);

// Returns what is wrong with the bytes, "" if `image` is filled. Never reads past them, whatever
// they hold.
std::string read_record(std::string_view bytes, KernelImage& image);

}  // namespace onchip::gpu
