#include "ops/kernels.hpp"

#include "api/guard.hpp"

using onchip::api::copy_text;
using onchip::api::guarded;

namespace {

std::string_view text_of(const char* value) { return value == nullptr ? "" : value; }

}  // namespace

extern "C" {

onchip_status onchip_kernels_list(const char* filter, char* text, size_t capacity, size_t* length) {
  return guarded([&] {
    copy_text("kernels_list", onchip::ops::kernels_list(text_of(filter)), text, capacity, length);
  });
}

onchip_status onchip_kernels_warm(const char* filter) {
  return guarded([&] { onchip::ops::kernels_warm(text_of(filter)); });
}

onchip_status onchip_kernels_resources(const char* filter, char* text, size_t capacity,
                                       size_t* length) {
  return guarded([&] {
    copy_text("kernels_resources", onchip::ops::kernels_resources(text_of(filter)), text, capacity,
              length);
  });
}

onchip_status onchip_kernels_build(const char* filter, const char* path) {
  return guarded([&] { onchip::ops::kernels_build(text_of(filter), text_of(path)); });
}

}  // extern "C"
