// The edge where exceptions become a status and a message of the calling thread.
#pragma once

#include <onchip/onchip.h>

#include <exception>
#include <new>
#include <string_view>

#include "core/status.hpp"

namespace onchip::api {

// Never throws: a message that cannot be stored is replaced by a static one.
void set_last_error(std::string_view message) noexcept;

// The buffer rule of every text-returning function.
void copy_text(std::string_view op, std::string_view text, char* buffer, std::size_t capacity,
               std::size_t* length);

template <typename F>
onchip_status guarded(F&& body) noexcept {
  try {
    body();
    return ONCHIP_OK;
  } catch (const Error& error) {
    set_last_error(error.what());
    return error.code();
  } catch (const std::bad_alloc&) {
    set_last_error("host memory ran out");
    return ONCHIP_OUT_OF_MEMORY;
  } catch (const std::exception& error) {
    set_last_error(error.what());
    return ONCHIP_INTERNAL;
  } catch (...) {
    set_last_error("an exception of unknown type");
    return ONCHIP_INTERNAL;
  }
}

}  // namespace onchip::api
