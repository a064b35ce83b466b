#include "gpu/runtime/kernel_archive.hpp"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "core/status.hpp"
#include "gpu/runtime/byte_stream.hpp"
#include "gpu/runtime/file.hpp"

namespace onchip::gpu {

namespace {

constexpr std::string_view kMagic("ONCHIPA\n", 8);
constexpr std::uint32_t kFormat = 1;
constexpr std::size_t kHeadSize = 8 + 4 + 8 + 8 + sizeof(Digest);
constexpr std::size_t kEntrySize = sizeof(Digest) + 8 + 8;

std::string_view view(const Digest& digest) {
  return {reinterpret_cast<const char*>(digest.data()), digest.size()};
}

}  // namespace

KernelArchive::~KernelArchive() {
  if (!bytes_.empty()) munmap(const_cast<char*>(bytes_.data()), bytes_.size());
}

std::string KernelArchive::open(const std::string& path) {
  const FileHandle file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file) return path + ": " + std::strerror(errno);
  struct stat status{};
  if (fstat(file.get(), &status) != 0) return path + ": " + std::strerror(errno);
  const auto size = static_cast<std::size_t>(status.st_size);
  if (!S_ISREG(status.st_mode) || size < kHeadSize) return path + ": it is no kernel archive";
  void* address = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.get(), 0);
  if (address == MAP_FAILED) return path + ": " + std::strerror(errno);
  bytes_ = {static_cast<const char*>(address), size};

  ByteReader head(bytes_);
  if (head.raw(kMagic.size()) != kMagic || head.number<std::uint32_t>() != kFormat) {
    return path + ": it is no kernel archive of this format";
  }
  const auto count = head.number<std::uint64_t>();
  if (head.number<std::uint64_t>() != size || count > size / kEntrySize) {
    return path + ": it is truncated or too long";
  }
  const std::string_view digest = head.raw(sizeof(Digest));
  const std::string_view index = head.raw(count * kEntrySize);
  if (head.failed() || digest != view(sha256(index))) return path + ": its index is damaged";
  index_ = index.data();
  count_ = static_cast<std::size_t>(count);
  return {};
}

std::string_view KernelArchive::record(std::string_view identity) const {
  const Digest key = sha256(identity);
  std::size_t low = 0;
  std::size_t high = count_;
  while (low < high) {
    const std::size_t middle = low + (high - low) / 2;
    const char* entry = index_ + middle * kEntrySize;
    const int order = std::memcmp(entry, key.data(), sizeof(Digest));
    if (order == 0) {
      ByteReader place({entry + sizeof(Digest), 16});
      const auto offset = place.number<std::uint64_t>();
      const auto size = place.number<std::uint64_t>();
      if (offset > bytes_.size() || size > bytes_.size() - offset) return {};
      return bytes_.substr(static_cast<std::size_t>(offset), static_cast<std::size_t>(size));
    }
    if (order < 0) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return {};
}

bool KernelArchive::contains(std::string_view identity) const { return !record(identity).empty(); }

bool KernelArchive::find(std::string_view identity, KernelImage& image,
                         std::string& problem) const {
  const std::string_view bytes = record(identity);
  if (bytes.empty()) return false;
  problem = read_record(bytes, image);
  if (problem.empty() && image.identity != identity) problem = "it was made for something else";
  return problem.empty();
}

void write_archive(const std::string& path, std::span<const KernelImage> images) {
  std::vector<std::pair<Digest, const KernelImage*>> sorted;
  for (const KernelImage& image : images) sorted.emplace_back(sha256(image.identity), &image);
  std::sort(sorted.begin(), sorted.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });

  ByteWriter index;
  ByteWriter records;
  const std::uint64_t records_begin = kHeadSize + sorted.size() * kEntrySize;
  for (const auto& [key, image] : sorted) {
    const std::string record = write_record(*image);
    index.raw(view(key));
    index.number(records_begin + records.bytes().size());
    index.number(std::uint64_t{record.size()});
    records.raw(record);
  }
  ByteWriter file;
  file.raw(kMagic);
  file.number(kFormat);
  file.number(std::uint64_t{sorted.size()});
  file.number(records_begin + records.bytes().size());
  file.raw(view(sha256(index.bytes())));
  file.raw(index.bytes());
  file.raw(records.bytes());

  const std::size_t slash = path.rfind('/');
  const std::string folder = slash == std::string::npos ? "." : path.substr(0, slash + 1);
  const std::string name = slash == std::string::npos ? path : path.substr(slash + 1);
  const FileHandle directory(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  std::string problem = directory ? std::string() : folder + ": " + std::strerror(errno);
  if (problem.empty()) problem = replace_file(directory.get(), name, file.bytes(), 0644);
  if (!problem.empty()) throw Error(ONCHIP_INTERNAL, "kernel archive " + path + ": " + problem);
}

std::string default_archive_path() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<const void*>(&default_archive_path), &info) == 0 ||
      info.dli_fname == nullptr) {
    return {};
  }
  const std::string own = info.dli_fname;
  const std::size_t slash = own.rfind('/');
  return slash == std::string::npos ? std::string() : own.substr(0, slash + 1) + kArchiveFileName;
}

}  // namespace onchip::gpu
