// From a spec to a kernel that can be launched: table in memory, archive, disk, compiler, driver.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "gpu/runtime/disk_cache.hpp"
#include "gpu/runtime/driver.hpp"
#include "gpu/runtime/kernel_archive.hpp"
#include "gpu/runtime/kernel_image.hpp"
#include "gpu/runtime/kernel_spec.hpp"
#include "gpu/runtime/nvrtc.hpp"

namespace onchip::gpu {

// Where an image came from.
enum class ImageOrigin : std::int32_t { archive, disk, compiler };

const char* origin_name(ImageOrigin origin);

struct CachedImage {
  KernelImage image;
  ImageOrigin origin = ImageOrigin::compiler;
};

// Functions by spec and context. Readers take no lock; entries are added, never changed or removed.
class FunctionTable {
 public:
  FunctionTable();
  CuFunction find(const KernelSpec& spec, std::uint64_t context) const;
  void insert(const KernelSpec& spec, std::uint64_t context, CuFunction function);

 private:
  struct Entry {
    KernelSpec spec;
    std::uint64_t context;
    CuFunction function;
  };
  struct Slots {
    explicit Slots(std::size_t count)
        : mask(count - 1), entries(std::make_unique<std::atomic<const Entry*>[]>(count)) {}
    std::size_t mask;
    std::unique_ptr<std::atomic<const Entry*>[]> entries;
  };

  static std::size_t hash(const KernelSpec& spec, std::uint64_t context);
  static void place(Slots& slots, const Entry& entry);

  std::atomic<const Slots*> current_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Entry>> entries_;
  std::vector<std::unique_ptr<Slots>> all_slots_;  // a reader may still be in an outgrown one
};

class KernelCache {
 public:
  struct Config {
    KernelText text;
    std::string cache_directory;  // "": none
    std::string why_no_cache;
    std::string archive_path;  // "": none
    std::function<CompilerState()> compiler;
  };

  explicit KernelCache(Config config);

  // Why `image` could not give this one; "" if it could, as far as can be told without compiling.
  std::string why_unobtainable(const KernelSpec& spec, Architecture architecture);

  // The machine code. Throws Error(compile_failed) with the compiler's log.
  std::shared_ptr<const CachedImage> image(const KernelSpec& spec, Architecture architecture);

  // The spec's kernel, loaded in the context that `context` keeps current. Its limit of dynamic
  // shared memory is set. `stream` is where it will run: only for what a failure says.
  CuFunction function(const Driver& driver, const DeviceFacts& device, const ContextScope& context,
                      const KernelSpec& spec, CuStream stream);

  // Whether later processes will find the image on disk.
  bool disk_has(const CachedImage& image);

  struct Counts {
    std::uint64_t archive = 0;
    std::uint64_t disk = 0;
    std::uint64_t compiled = 0;
    std::uint64_t loaded = 0;  // modules
  };
  Counts counts() const;

  const DiskCache& disk() const { return disk_; }
  const KernelArchive& archive() const { return archive_; }
  const std::string& archive_path() const { return config_.archive_path; }
  // Why the archive is not in use; "" if it is.
  std::string archive_problem() const;
  CompilerState compiler() const { return config_.compiler(); }

 private:
  struct Slot {
    std::mutex mutex;  // held while the image is made: the per-key lock
    std::unique_ptr<KernelSource> source;
    std::shared_ptr<const CachedImage> image;
    std::atomic<bool> obtainable{false};
  };
  struct SlotKey {
    KernelSpec spec;
    Architecture architecture;
    friend bool operator==(const SlotKey&, const SlotKey&) = default;
  };
  struct SlotHash {
    std::size_t operator()(const SlotKey& key) const;
  };

  Slot& slot(const KernelSpec& spec, Architecture architecture);
  const KernelSource& source(Slot& slot, const KernelSpec& spec, Architecture architecture) const;
  std::shared_ptr<const CachedImage> make_image(const KernelSource& source, const KernelSpec& spec,
                                                Architecture architecture, bool from_archive);
  std::shared_ptr<const CachedImage> image_without_archive(const KernelSpec& spec,
                                                           Architecture architecture,
                                                           const std::string& why);
  CuModule load_module(const Driver& driver, const KernelSpec& spec, Architecture architecture);
  CuFunction load(const Driver& driver, const KernelSpec& spec, Architecture architecture);
  void note_archive(std::string problem);

  Config config_;
  KernelArchive archive_;
  DiskCache disk_;
  mutable std::mutex note_mutex_;
  std::string archive_problem_;
  std::shared_mutex slots_mutex_;
  std::unordered_map<SlotKey, std::unique_ptr<Slot>, SlotHash> slots_;
  FunctionTable functions_;
  std::mutex load_mutex_;
  std::atomic<std::uint64_t> from_archive_{0};
  std::atomic<std::uint64_t> from_disk_{0};
  std::atomic<std::uint64_t> compiled_{0};
  std::atomic<std::uint64_t> loaded_{0};
};

// The process's cache: embedded text, settings' directory, the archive beside the library, NVRTC.
KernelCache& kernel_cache();

}  // namespace onchip::gpu
