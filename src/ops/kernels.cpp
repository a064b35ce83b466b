#include "ops/kernels.hpp"

#include <vector>

#include "core/status.hpp"
#include "gpu/kernels/catalog.hpp"
#include "ops/json.hpp"

namespace onchip::ops {

namespace {

std::vector<gpu::KernelVariant> chosen(std::string_view op, std::string_view filter) {
  std::vector<gpu::KernelVariant> variants = gpu::kernel_variants(filter);
  if (variants.empty()) {
    throw_invalid(op, "filter", "\"" + std::string(filter) + "\"",
                  "a part of a name that kernels_list shows");
  }
  return variants;
}

std::string version_text(std::int32_t version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

std::string capability_text(std::int32_t compute_capability) {
  return std::to_string(compute_capability / 10) + "." + std::to_string(compute_capability % 10);
}

}  // namespace

std::string kernels_list(std::string_view filter) {
  JsonArray list;
  for (const gpu::KernelVariant& variant : chosen("kernels_list", filter)) {
    JsonObject fields;
    for (std::size_t i = 0; i < variant.spec.kernel->fields.size(); ++i) {
      fields.number(variant.spec.kernel->fields[i], variant.spec.values[i]);
    }
    list.add(JsonObject()
                 .text("name", variant.name)
                 .text("kernel", variant.spec.kernel->name)
                 .text("architecture", gpu::architecture_text(variant.architecture))
                 .raw("spec", fields.done())
                 .done());
  }
  return JsonObject().raw("kernels", list.done()).done();
}

void kernels_warm(std::string_view filter) {
  gpu::KernelCache& cache = gpu::kernel_cache();
  const auto images = gpu::variant_images(cache, chosen("kernels_warm", filter));
  bool all_shipped = true;
  for (const auto& image : images) {
    all_shipped = all_shipped && image->origin == gpu::ImageOrigin::archive;
  }
  // Compiled kernels that cannot be kept would have to be compiled again by the next process.
  if (all_shipped) return;
  if (cache.disk().directory().empty()) {
    const std::string why = cache.disk().problem();
    throw Error(ONCHIP_UNSUPPORTED,
                "kernels_warm: there is no kernel cache to warm: " +
                    (why.empty() ? std::string("ONCHIP_CACHE_DIR is off") : why));
  }
  for (const auto& image : images) {
    if (image->origin == gpu::ImageOrigin::archive) continue;
    if (!cache.disk_has(*image)) {
      throw Error(ONCHIP_UNSUPPORTED,
                  "kernels_warm: what was compiled could not be kept: " + cache.disk().problem());
    }
  }
}

std::string kernels_resources(std::string_view filter) {
  const auto variants = chosen("kernels_resources", filter);
  const auto images = gpu::variant_images(gpu::kernel_cache(), variants);
  JsonArray list;
  for (std::size_t i = 0; i < variants.size(); ++i) {
    const gpu::KernelImage& image = images[i]->image;
    const gpu::KernelResources& r = image.resources;
    list.add(
        JsonObject()
            .text("name", variants[i].name)
            .text("origin", gpu::origin_name(images[i]->origin))
            .text("compiler", "nvrtc " + image.compiler)
            .number("registers", r.registers)
            .number("spill_store_bytes", r.spill_store_bytes)
            .number("spill_load_bytes", r.spill_load_bytes)
            .number("stack_bytes", r.stack_bytes)
            .number("static_shared_bytes", r.static_shared_bytes)
            .number("dynamic_shared_bytes", variants[i].spec.kernel->shared_bytes(variants[i].spec))
            .number("barriers", r.barriers)
            .number("advisories", r.advisories)
            .number("cubin_bytes", image.cubin.size())
            .done());
  }
  return JsonObject().raw("kernels", list.done()).done();
}

void kernels_build(std::string_view filter, std::string_view path) {
  if (path.empty()) throw_invalid("kernels_build", "path", "\"\"", "the file to write");
  const auto images = gpu::variant_images(gpu::kernel_cache(), chosen("kernels_build", filter));
  std::vector<gpu::KernelImage> contents;
  contents.reserve(images.size());
  for (const auto& image : images) contents.push_back(image->image);
  gpu::write_archive(std::string(path), contents);
}

namespace {

// What to show for a backend that needs a device of one compute capability: the devices it would
// use, or why it takes no call here.
std::string device_backend(const char* name, std::int32_t compute_capability,
                           const gpu::GpuReport& report) {
  std::string usable;
  for (const gpu::DeviceFacts& device : report.devices) {
    if (device.compute_capability != compute_capability) continue;
    if (!usable.empty()) usable += ", ";
    usable += "cuda:" + std::to_string(device.ordinal) + " (" + device.name + ")";
  }
  std::string problem;
  if (usable.empty()) {
    problem = report.devices.empty() && !report.driver_problem.empty()
                  ? report.driver_problem
                  : "no device of compute capability " + capability_text(compute_capability) +
                        " among the " + std::to_string(report.devices.size()) + " seen";
  } else if (!report.nvrtc_problem.empty() && report.archive_count == 0) {
    problem = report.nvrtc_problem;
  }
  return JsonObject()
      .text("name", name)
      .raw("available", problem.empty() ? "true" : "false")
      .text("detail", problem.empty() ? usable : problem)
      .done();
}

}  // namespace

std::string describe_gpu_backends(const gpu::GpuReport& report) {
  return device_backend("cuda.sm90", 90, report) + ", " +
         JsonObject()
             .text("name", "cuda.sm80")
             .raw("available", "false")
             .text("detail", "this version has no kernels for it")
             .done();
}

std::string describe_gpu(const gpu::GpuReport& report) {
  JsonArray devices;
  for (const gpu::DeviceFacts& device : report.devices) {
    devices.add(JsonObject()
                    .number("ordinal", device.ordinal)
                    .text("name", device.name)
                    .text("compute_capability", capability_text(device.compute_capability))
                    .number("multiprocessors", device.multiprocessors)
                    .number("shared_bytes_per_block", device.shared_bytes_per_block)
                    .number("l2_bytes", device.l2_bytes)
                    .done());
  }
  return JsonObject()
      .raw("driver",
           JsonObject()
               .text("version", report.driver_version == 0 ? std::string()
                                                           : version_text(report.driver_version))
               .text("path", report.driver_path)
               .text("problem", report.driver_problem)
               .done())
      .raw("devices", devices.done())
      .raw("nvrtc", JsonObject()
                        .text("version", report.nvrtc_version)
                        .text("path", report.nvrtc_path)
                        .text("problem", report.nvrtc_problem)
                        .done())
      .raw("kernel_cache", JsonObject()
                               .text("directory", report.cache_directory)
                               .text("problem", report.cache_problem)
                               .done())
      .raw("kernel_archive", JsonObject()
                                 .text("path", report.archive_path)
                                 .number("kernels", report.archive_count)
                                 .text("problem", report.archive_problem)
                                 .done())
      .done();
}

}  // namespace onchip::ops
