// Compiled kernels in one file with an index, made at packaging time and shipped beside the
// library. It needs no NVRTC to be used.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "gpu/runtime/kernel_image.hpp"
#include "gpu/runtime/sha256.hpp"

namespace onchip::gpu {

inline constexpr char kArchiveFileName[] = "onchip_kernels.bin";

// File: magic, format, count, file size, SHA-256 of the index; the index, sorted by key: SHA-256 of
// the record's identity, offset, size; the records.
class KernelArchive {
 public:
  KernelArchive() = default;
  ~KernelArchive();
  KernelArchive(const KernelArchive&) = delete;
  KernelArchive& operator=(const KernelArchive&) = delete;

  // Maps the file. Returns what is wrong, "" if it is in use. Once only.
  std::string open(const std::string& path);

  bool contains(std::string_view identity) const;

  // False: there is none; or there is, and `problem` says why it cannot be used.
  bool find(std::string_view identity, KernelImage& image, std::string& problem) const;

  std::size_t count() const { return count_; }

 private:
  std::string_view record(std::string_view identity) const;

  std::string_view bytes_;  // the whole file, mapped
  const char* index_ = nullptr;
  std::size_t count_ = 0;
};

// Replaces the file at once (temporary file, rename). Throws Error(internal) where it cannot.
void write_archive(const std::string& path, std::span<const KernelImage> images);

// "<folder of the onchip library>/onchip_kernels.bin"
std::string default_archive_path();

}  // namespace onchip::gpu
