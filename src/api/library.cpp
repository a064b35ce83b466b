#include "api/guard.hpp"
#include "core/thread_pool.hpp"
#include "ops/operators.hpp"

using onchip::api::copy_text;
using onchip::api::guarded;

#define ONCHIP_TEXT2(x) #x
#define ONCHIP_TEXT(x) ONCHIP_TEXT2(x)

extern "C" {

const char* onchip_status_name(onchip_status status) { return onchip::status_name(status); }

const char* onchip_version(void) {
  return ONCHIP_TEXT(ONCHIP_VERSION_MAJOR) "." ONCHIP_TEXT(ONCHIP_VERSION_MINOR) "." ONCHIP_TEXT(
      ONCHIP_VERSION_PATCH);
}

onchip_status onchip_explain(onchip_operator op, const void* args, char* text, size_t capacity,
                             size_t* length) {
  return guarded(
      [&] { copy_text("explain", onchip::ops::explain(op, args), text, capacity, length); });
}

onchip_status onchip_describe(char* text, size_t capacity, size_t* length) {
  return guarded([&] { copy_text("describe", onchip::ops::describe(), text, capacity, length); });
}

onchip_status onchip_set_num_threads(int32_t num_threads) {
  return guarded([&] {
    if (num_threads < 0 || num_threads > 1024) {
      onchip::throw_invalid("set_num_threads", "num_threads", std::to_string(num_threads),
                            "0 (the start value) to 1024");
    }
    onchip::set_num_threads(num_threads);
  });
}

int32_t onchip_get_num_threads(void) { return onchip::num_threads(); }

}  // extern "C"
