#include "gpu/runtime/kernel_cache.hpp"

#include <utility>

#include "core/settings.hpp"
#include "core/status.hpp"

namespace onchip::gpu {

const char* origin_name(ImageOrigin origin) {
  switch (origin) {
    case ImageOrigin::archive:
      return "archive";
    case ImageOrigin::disk:
      return "disk";
    case ImageOrigin::compiler:
      return "compiler";
  }
  return "unknown";
}

// ---- functions

FunctionTable::FunctionTable() {
  constexpr std::size_t kFirstSlots = 64;
  all_slots_.push_back(std::make_unique<Slots>(kFirstSlots));
  current_.store(all_slots_.back().get(), std::memory_order_release);
}

std::size_t FunctionTable::hash(const KernelSpec& spec, std::uint64_t context) {
  return static_cast<std::size_t>(hash_spec(spec) ^ (context * 0x9e3779b97f4a7c15ull));
}

CuFunction FunctionTable::find(const KernelSpec& spec, std::uint64_t context) const {
  const Slots& slots = *current_.load(std::memory_order_acquire);
  for (std::size_t i = hash(spec, context);; ++i) {
    const Entry* entry = slots.entries[i & slots.mask].load(std::memory_order_acquire);
    if (entry == nullptr) return nullptr;
    if (entry->context == context && entry->spec == spec) return entry->function;
  }
}

void FunctionTable::place(Slots& slots, const Entry& entry) {
  std::size_t i = hash(entry.spec, entry.context);
  while (slots.entries[i & slots.mask].load(std::memory_order_relaxed) != nullptr) ++i;
  slots.entries[i & slots.mask].store(&entry, std::memory_order_release);
}

void FunctionTable::insert(const KernelSpec& spec, std::uint64_t context, CuFunction function) {
  const std::lock_guard lock(mutex_);
  entries_.push_back(std::make_unique<Entry>(Entry{spec, context, function}));
  Slots* slots = all_slots_.back().get();
  // At most half full: find's walk always meets an empty slot.
  if (2 * entries_.size() <= slots->mask + 1) {
    place(*slots, *entries_.back());
    return;
  }
  auto larger = std::make_unique<Slots>(2 * (slots->mask + 1));
  for (const auto& entry : entries_) place(*larger, *entry);
  current_.store(larger.get(), std::memory_order_release);
  all_slots_.push_back(std::move(larger));
}

// ---- images

std::size_t KernelCache::SlotHash::operator()(const SlotKey& key) const {
  const auto number = static_cast<std::uint64_t>(key.architecture.number);
  const std::uint64_t architecture = 2 * number + (key.architecture.specific ? 1 : 0);
  return static_cast<std::size_t>(hash_spec(key.spec) ^ (architecture * 0x9e3779b97f4a7c15ull));
}

KernelCache::KernelCache(Config config)
    : config_(std::move(config)), disk_(config_.cache_directory, config_.why_no_cache) {
  if (!config_.archive_path.empty()) archive_problem_ = archive_.open(config_.archive_path);
}

std::string KernelCache::archive_problem() const {
  const std::lock_guard lock(note_mutex_);
  return archive_problem_;
}

void KernelCache::note_archive(std::string problem) {
  const std::lock_guard lock(note_mutex_);
  archive_problem_ = std::move(problem);
}

KernelCache::Slot& KernelCache::slot(const KernelSpec& spec, Architecture architecture) {
  const SlotKey key{spec, architecture};
  {
    const std::shared_lock lock(slots_mutex_);
    const auto at = slots_.find(key);
    if (at != slots_.end()) return *at->second;
  }
  const std::unique_lock lock(slots_mutex_);
  std::unique_ptr<Slot>& made = slots_[key];
  if (made == nullptr) made = std::make_unique<Slot>();
  return *made;
}

const KernelSource& KernelCache::source(Slot& slot, const KernelSpec& spec,
                                        Architecture architecture) const {
  if (slot.source == nullptr) {
    slot.source = std::make_unique<KernelSource>(kernel_source(config_.text, spec, architecture));
  }
  return *slot.source;
}

std::string KernelCache::why_unobtainable(const KernelSpec& spec, Architecture architecture) {
  Slot& slot = this->slot(spec, architecture);
  if (slot.obtainable.load(std::memory_order_acquire)) return {};
  const std::lock_guard lock(slot.mutex);
  try {
    const KernelSource& source = this->source(slot, spec, architecture);
    if (!archive_.contains(source.identity)) {
      const CompilerState state = config_.compiler();
      if (state.compiler == nullptr) return state.problem;
    }
  } catch (const Error& error) {
    return error.what();
  }
  slot.obtainable.store(true, std::memory_order_release);
  return {};
}

std::shared_ptr<const CachedImage> KernelCache::image(const KernelSpec& spec,
                                                      Architecture architecture) {
  Slot& slot = this->slot(spec, architecture);
  const std::lock_guard lock(slot.mutex);
  if (slot.image == nullptr) {
    slot.image = make_image(source(slot, spec, architecture), spec, architecture, true);
    slot.obtainable.store(true, std::memory_order_release);
  }
  return slot.image;
}

std::shared_ptr<const CachedImage> KernelCache::make_image(const KernelSource& source,
                                                           const KernelSpec& spec,
                                                           Architecture architecture,
                                                           bool from_archive) {
  auto result = std::make_shared<CachedImage>();
  KernelImage& image = result->image;
  std::string archive_problem;
  if (from_archive && archive_.find(source.identity, image, archive_problem)) {
    result->origin = ImageOrigin::archive;
    from_archive_.fetch_add(1, std::memory_order_relaxed);
    return result;
  }
  if (!archive_problem.empty()) {
    note_archive(config_.archive_path + ": the record of " + spec_text(spec) +
                 " is not used: " + archive_problem);
  }

  const std::string what = spec_text(spec) + " for " + architecture_text(architecture);
  const CompilerState state = config_.compiler();
  if (state.compiler == nullptr) {
    throw Error(ONCHIP_COMPILE_FAILED, what + ": " + state.problem);
  }
  const Compiler& compiler = *state.compiler;
  if (disk_.find(source.identity, compiler.version, image)) {
    result->origin = ImageOrigin::disk;
    from_disk_.fetch_add(1, std::memory_order_relaxed);
    return result;
  }

  CompileResult compiled = compiler.compile(source.request);
  if (compiled.cubin.empty()) {
    constexpr std::size_t kMaxLog = 8000;
    if (compiled.log.size() > kMaxLog) compiled.log.resize(kMaxLog);
    throw Error(ONCHIP_COMPILE_FAILED, what + ": NVRTC " + compiler.version + " (" + compiler.path +
                                           ") fails: " + compiled.log);
  }
  image.identity = source.identity;
  image.compiler = compiler.version;
  image.resources = parse_ptxas_log(compiled.log, spec.kernel->entry);
  image.log = std::move(compiled.log);
  image.cubin = std::move(compiled.cubin);
  result->origin = ImageOrigin::compiler;
  compiled_.fetch_add(1, std::memory_order_relaxed);
  disk_.store(image);
  return result;
}

bool KernelCache::disk_has(const CachedImage& image) {
  KernelImage kept;
  return disk_.find(image.image.identity, image.image.compiler, kept);
}

// ---- loading

CuFunction KernelCache::function(const Driver& driver, const DeviceFacts& device,
                                 const ContextScope& context, const KernelSpec& spec,
                                 CuStream stream) {
  CuFunction function = functions_.find(spec, context.id());
  if (function != nullptr) return function;

  const Architecture architecture = spec.kernel->architecture_for(device.compute_capability);
  // Made outside the lock: others may load meanwhile.
  static_cast<void>(image(spec, architecture));
  const std::lock_guard lock(load_mutex_);
  function = functions_.find(spec, context.id());
  if (function != nullptr) return function;
  try {
    function = load(driver, spec, architecture);
  } catch (const Error& error) {
    std::string text = spec_text(spec) + ": " + error.what();
    if (is_capturing(driver, stream)) {
      text +=
          "; the stream is being captured: make one such call before the capture, or compile ahead "
          "with `onchip kernels warm`";
    }
    throw Error(error.code(), std::move(text));
  }
  functions_.insert(spec, context.id(), function);
  return function;
}

std::shared_ptr<const CachedImage> KernelCache::image_without_archive(const KernelSpec& spec,
                                                                      Architecture architecture,
                                                                      const std::string& why) {
  const std::string problem =
      config_.archive_path + ": " + spec_text(spec) + " is not loaded by this driver: " + why;
  note_archive(problem);
  Slot& slot = this->slot(spec, architecture);
  const std::lock_guard lock(slot.mutex);
  try {
    slot.image = make_image(source(slot, spec, architecture), spec, architecture, false);
  } catch (const Error& error) {
    throw Error(error.code(), problem + "; " + error.what());
  }
  return slot.image;
}

CuModule KernelCache::load_module(const Driver& driver, const KernelSpec& spec,
                                  Architecture architecture) {
  std::shared_ptr<const CachedImage> made = image(spec, architecture);
  CuModule module = nullptr;
  CuResult result = driver.cuModuleLoadData(&module, made->image.cubin.data());
  // The archive's compiler may be newer than the driver; the one that is here need not be.
  if (made->origin == ImageOrigin::archive &&
      (result == kCuInvalidImage || result == kCuNoBinaryForGpu)) {
    made = image_without_archive(spec, architecture, driver_error_text(driver, result));
    result = driver.cuModuleLoadData(&module, made->image.cubin.data());
  }
  check_driver(driver, result, "cuModuleLoadData");
  return module;
}

CuFunction KernelCache::load(const Driver& driver, const KernelSpec& spec,
                             Architecture architecture) {
  const RelaxedCaptureScope relaxed(driver);
  auto* const module = load_module(driver, spec, architecture);
  try {
    CuFunction function = nullptr;
    check_driver(driver, driver.cuModuleGetFunction(&function, module, spec.kernel->entry),
                 "cuModuleGetFunction");
    const std::int32_t shared_bytes = spec.kernel->shared_bytes(spec);
    if (shared_bytes > 0) {
      check_driver(driver,
                   driver.cuFuncSetAttribute(
                       function, CuFunctionAttribute::max_dynamic_shared_size_bytes, shared_bytes),
                   "cuFuncSetAttribute(max dynamic shared memory)");
    }
    // The driver may put off loading until the first launch, which could lie in a capture.
    if (driver.cuFuncLoad != nullptr)
      check_driver(driver, driver.cuFuncLoad(function), "cuFuncLoad");
    loaded_.fetch_add(1, std::memory_order_relaxed);
    return function;
  } catch (const Error&) {
    static_cast<void>(driver.cuModuleUnload(module));
    throw;
  }
}

KernelCache::Counts KernelCache::counts() const {
  return {from_archive_.load(std::memory_order_relaxed), from_disk_.load(std::memory_order_relaxed),
          compiled_.load(std::memory_order_relaxed), loaded_.load(std::memory_order_relaxed)};
}

KernelCache& kernel_cache() {
  // Never destroyed: calls may still come from threads that outlive static objects.
  static KernelCache& cache =
      *new KernelCache({embedded_text(), settings().cache_dir, settings().cache_dir_problem,
                        default_archive_path(), nvrtc_state});
  return cache;
}

}  // namespace onchip::gpu
