#include "gpu/runtime/kernel_image.hpp"

#include "gpu/runtime/byte_stream.hpp"
#include "gpu/runtime/sha256.hpp"

namespace onchip::gpu {

namespace {

constexpr std::string_view kMagic("ONCHIPK\n", 8);
constexpr std::uint32_t kFormat = 1;

std::string_view view(const Digest& digest) {
  return {reinterpret_cast<const char*>(digest.data()), digest.size()};
}

}  // namespace

std::string write_record(const KernelImage& image) {
  ByteWriter body;
  body.block(image.identity);
  body.block(image.compiler);
  const KernelResources& resources = image.resources;
  for (const std::int32_t value :
       {resources.registers, resources.spill_store_bytes, resources.spill_load_bytes,
        resources.stack_bytes, resources.static_shared_bytes, resources.barriers,
        resources.advisories}) {
    body.number(value);
  }
  body.block(image.log);
  body.block({image.cubin.data(), image.cubin.size()});

  ByteWriter record;
  record.raw(kMagic);
  record.number(kFormat);
  record.number(std::uint64_t{body.bytes().size()});
  record.raw(view(sha256(body.bytes())));
  record.raw(body.bytes());
  return record.bytes();
}

std::string read_record(std::string_view bytes, KernelImage& image) {
  ByteReader head(bytes);
  if (head.raw(kMagic.size()) != kMagic) return "it is no kernel record";
  const auto format = head.number<std::uint32_t>();
  if (head.failed()) return "it is truncated";
  if (format != kFormat) return "its format is " + std::to_string(format) + ", wanted 1";
  const auto size = head.number<std::uint64_t>();
  const std::string_view digest = head.raw(sizeof(Digest));
  if (head.failed() || size != head.rest().size()) return "it is truncated or too long";
  if (digest != view(sha256(head.rest()))) return "its content does not match its hash";

  ByteReader body(head.rest());
  image.identity = body.block();
  image.compiler = body.block();
  KernelResources& resources = image.resources;
  for (std::int32_t* value :
       {&resources.registers, &resources.spill_store_bytes, &resources.spill_load_bytes,
        &resources.stack_bytes, &resources.static_shared_bytes, &resources.barriers,
        &resources.advisories}) {
    *value = body.number<std::int32_t>();
  }
  image.log = body.block();
  const std::string_view cubin = body.block();
  image.cubin.assign(cubin.begin(), cubin.end());
  if (body.failed() || !body.rest().empty()) return "its fields do not fill it";
  if (image.cubin.empty()) return "it holds no machine code";
  return {};
}

}  // namespace onchip::gpu
