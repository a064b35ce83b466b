// Files as the kernel cache and the archive need them.
#pragma once

#include <string>
#include <string_view>
#include <utility>

#include <sys/types.h>

namespace onchip::gpu {

// Owns a file descriptor.
class FileHandle {
 public:
  explicit FileHandle(int descriptor) : descriptor_(descriptor) {}
  FileHandle(FileHandle&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  FileHandle& operator=(FileHandle&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    return *this;
  }
  ~FileHandle();

  explicit operator bool() const { return descriptor_ >= 0; }
  int get() const { return descriptor_; }

  // Returns what is wrong, "" if nothing.
  std::string close();

 private:
  int descriptor_;
};

// Writes a file of that name in the directory so that readers see the old content or the new, never
// a part: temporary file, fsync, rename. Returns what is wrong, "" if nothing.
std::string replace_file(int directory, const std::string& name, std::string_view bytes,
                         mode_t mode);

// The whole file. Returns what is wrong, "" if `bytes` is filled.
std::string read_file(int file, std::string& bytes);

}  // namespace onchip::gpu
