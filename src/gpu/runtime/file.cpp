#include "gpu/runtime/file.hpp"

#include <fcntl.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>

namespace onchip::gpu {

FileHandle::~FileHandle() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

std::string FileHandle::close() {
  return ::close(std::exchange(descriptor_, -1)) == 0 ? std::string() : std::strerror(errno);
}

namespace {

std::string write_all(int file, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(file, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return std::strerror(written < 0 ? errno : ENOSPC);
    bytes.remove_prefix(static_cast<std::size_t>(written));
  }
  return {};
}

}  // namespace

std::string replace_file(int directory, const std::string& name, std::string_view bytes,
                         mode_t mode) {
  // Writing past the limit would raise SIGXFSZ, which ends a process that does not expect it.
  rlimit limit{};
  if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
      limit.rlim_cur < bytes.size()) {
    return "the process's file size limit is " + std::to_string(limit.rlim_cur) +
           " bytes, wanted " + std::to_string(bytes.size());
  }
  // Process ids are no names: containers that share the directory have the same ones.
  std::uint64_t random = 0;
  if (getrandom(&random, sizeof(random), 0) != sizeof(random)) return std::strerror(errno);
  const std::string temporary = "." + name + "." + std::to_string(random) + ".tmp";
  FileHandle file(openat(directory, temporary.c_str(),
                         O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, mode));
  if (!file) return std::strerror(errno);
  std::string problem = write_all(file.get(), bytes);
  if (problem.empty() && fsync(file.get()) != 0) problem = std::strerror(errno);
  const std::string close_problem = file.close();
  if (problem.empty()) problem = close_problem;
  if (problem.empty() && renameat(directory, temporary.c_str(), directory, name.c_str()) != 0) {
    problem = std::strerror(errno);
  }
  if (!problem.empty()) {
    unlinkat(directory, temporary.c_str(), 0);
    return problem;
  }
  // The name is durable once the directory is; a loss costs one more compile, no more.
  static_cast<void>(fsync(directory));
  return {};
}

std::string read_file(int file, std::string& bytes) {
  struct stat status{};
  if (fstat(file, &status) != 0) return std::strerror(errno);
  bytes.resize(static_cast<std::size_t>(status.st_size));
  std::size_t have = 0;
  while (have < bytes.size()) {
    const ssize_t got = ::read(file, bytes.data() + have, bytes.size() - have);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return std::strerror(errno);
    if (got == 0) break;
    have += static_cast<std::size_t>(got);
  }
  bytes.resize(have);
  return {};
}

}  // namespace onchip::gpu
