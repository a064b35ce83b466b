#include "gpu/runtime/disk_cache.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "gpu/runtime/sha256.hpp"

namespace onchip::gpu {

namespace {

// Machine code is run as it is found: only what this user (or the administrator) alone could have
// written is. "" if that holds.
std::string why_untrusted(const struct stat& status) {
  if (status.st_uid != geteuid() && status.st_uid != 0) {
    return "it belongs to user " + std::to_string(status.st_uid) + ", not to user " +
           std::to_string(geteuid());
  }
  if ((status.st_mode & (S_IWGRP | S_IWOTH)) != 0) return "other users may write it";
  return {};
}

// mkdir -p, private.
std::string make_directories(const std::string& path) {
  for (std::size_t at = path.find('/', 1);; at = path.find('/', at + 1)) {
    const std::string part = path.substr(0, at);
    if (mkdir(part.c_str(), 0700) != 0 && errno != EEXIST) {
      // EROFS or EACCES on the way is no fault where the rest exists.
      struct stat status{};
      const int why = errno;
      if (stat(part.c_str(), &status) != 0) return part + ": " + std::strerror(why);
    }
    if (at == std::string::npos) return {};
  }
}

}  // namespace

DiskCache::DiskCache(std::string directory, std::string why_off)
    : directory_(std::move(directory)), problem_(std::move(why_off)) {}

std::string DiskCache::entry_name(const std::string& identity, const std::string& compiler) {
  return hex(sha256(identity + "nvrtc " + compiler + "\n")) + ".kernel";
}

void DiskCache::note(std::string problem) {
  const std::lock_guard lock(mutex_);
  problem_ = std::move(problem);
}

std::string DiskCache::problem() const {
  const std::lock_guard lock(mutex_);
  return problem_;
}

FileHandle DiskCache::open_directory(bool create) {
  if (directory_.empty()) return FileHandle(-1);
  FileHandle directory(open(directory_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!directory && errno == ENOENT) {
    if (!create) return FileHandle(-1);
    const std::string problem = make_directories(directory_);
    if (!problem.empty()) {
      note("cannot make the kernel cache: " + problem);
      return FileHandle(-1);
    }
    directory = FileHandle(open(directory_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  }
  struct stat status{};
  if (!directory || fstat(directory.get(), &status) != 0) {
    note("cannot open the kernel cache " + directory_ + ": " + std::strerror(errno));
    return FileHandle(-1);
  }
  const std::string untrusted = why_untrusted(status);
  if (!untrusted.empty()) {
    note("the kernel cache " + directory_ + " is not used: " + untrusted);
    return FileHandle(-1);
  }
  return directory;
}

bool DiskCache::find(const std::string& identity, const std::string& compiler, KernelImage& image) {
  const FileHandle directory = open_directory(false);
  if (!directory) return false;
  const std::string name = entry_name(identity, compiler);
  const auto reject = [&](const std::string& why) {
    note("the entry " + name + " of the kernel cache is not used: " + why);
    return false;
  };
  // O_NONBLOCK: a pipe of that name must not hang the caller.
  const FileHandle file(
      openat(directory.get(), name.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  if (!file) return errno == ENOENT ? false : reject(std::strerror(errno));
  struct stat status{};
  if (fstat(file.get(), &status) != 0) return reject(std::strerror(errno));
  if (!S_ISREG(status.st_mode)) return reject("it is no regular file");
  const std::string untrusted = why_untrusted(status);
  if (!untrusted.empty()) return reject(untrusted);

  std::string bytes;
  std::string problem = read_file(file.get(), bytes);
  if (problem.empty()) problem = read_record(bytes, image);
  if (problem.empty() && (image.identity != identity || image.compiler != compiler)) {
    problem = "it was made for something else";
  }
  return problem.empty() || reject(problem);
}

void DiskCache::store(const KernelImage& image) {
  const FileHandle directory = open_directory(true);
  if (!directory) return;
  const std::string name = entry_name(image.identity, image.compiler);
  const std::string problem = replace_file(directory.get(), name, write_record(image), 0600);
  if (!problem.empty()) note("cannot write the kernel cache " + directory_ + ": " + problem);
}

}  // namespace onchip::gpu
