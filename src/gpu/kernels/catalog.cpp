#include "gpu/kernels/catalog.hpp"

#include "core/status.hpp"
#include "core/thread_pool.hpp"
#include "gpu/kernels/registry.hpp"

namespace onchip::gpu {

std::vector<KernelVariant> kernel_variants(std::string_view filter) {
  std::vector<KernelVariant> variants;
  for (const KernelDefinition* kernel : kernel_definitions()) {
    for (std::int32_t i = 0; i < kernel->registered_count; ++i) {
      const KernelSpec spec = kernel->registered(i);
      for (const Architecture architecture : kernel->architectures) {
        std::string name = spec_text(spec) + "@" + architecture_text(architecture);
        if (name.find(filter) == std::string::npos) continue;
        variants.push_back({std::move(name), spec, architecture});
      }
    }
  }
  return variants;
}

std::vector<std::shared_ptr<const CachedImage>> variant_images(
    KernelCache& cache, const std::vector<KernelVariant>& variants) {
  std::vector<std::shared_ptr<const CachedImage>> images(variants.size());
  parallel_for(static_cast<std::int64_t>(variants.size()), num_threads(),
               [&](std::int64_t task, std::int32_t) {
                 const auto i = static_cast<std::size_t>(task);
                 images[i] = cache.image(variants[i].spec, variants[i].architecture);
               });
  return images;
}

GpuReport gpu_report() {
  GpuReport report;
  const DriverState& driver = driver_state();
  report.driver_path = driver.path;
  report.driver_problem = driver.problem;
  if (driver.driver != nullptr) {
    report.driver_version = driver.driver->version;
    try {
      const std::int32_t count = device_count(*driver.driver);
      for (std::int32_t i = 0; i < count; ++i) {
        const DeviceResult device = device_facts(i);
        if (device.facts != nullptr) {
          report.devices.push_back(*device.facts);
        } else {
          report.driver_problem = device.problem;
        }
      }
    } catch (const Error& error) {
      report.driver_problem = error.what();
    }
  }
  const KernelCache& cache = kernel_cache();
  const CompilerState compiler = cache.compiler();
  report.nvrtc_problem = compiler.problem;
  if (compiler.compiler != nullptr) {
    report.nvrtc_version = compiler.compiler->version;
    report.nvrtc_path = compiler.compiler->path;
  }
  report.cache_directory = cache.disk().directory();
  report.cache_problem = cache.disk().problem();
  report.archive_path = cache.archive_path();
  report.archive_count = cache.archive().count();
  report.archive_problem = cache.archive_problem();
  return report;
}

}  // namespace onchip::gpu
