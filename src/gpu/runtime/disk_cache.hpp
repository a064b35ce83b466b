// Compiled kernels in a directory of the user's own, one file each. Whatever is wrong with it
// costs a compile, never a call.
#pragma once

#include <mutex>
#include <string>

#include "gpu/runtime/file.hpp"
#include "gpu/runtime/kernel_image.hpp"

namespace onchip::gpu {

class DiskCache {
 public:
  // `directory` "" keeps nothing; `why_off` says why, where that is nobody's wish.
  explicit DiskCache(std::string directory, std::string why_off = {});

  // False where there is no entry that may be used. One that is damaged, was made for something
  // else or could be written by another user counts as none.
  bool find(const std::string& identity, const std::string& compiler, KernelImage& image);

  // Keeps the image for later processes, replacing what is there.
  void store(const KernelImage& image);

  const std::string& directory() const { return directory_; }

  // The last thing that went wrong, "" if nothing: for explain and doctor.
  std::string problem() const;

  // File name of an entry.
  static std::string entry_name(const std::string& identity, const std::string& compiler);

 private:
  // The opened directory, made if need be; invalid where it may not be used.
  FileHandle open_directory(bool create);
  void note(std::string problem);

  std::string directory_;
  mutable std::mutex mutex_;
  std::string problem_;
};

}  // namespace onchip::gpu
