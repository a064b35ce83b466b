// Errors on their way to Python, and the values they are about.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string_view.h>
#include <onchip/onchip.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

namespace onchip_python {

namespace nb = nanobind;

// Becomes the exception of onchip.errors that `status` stands for.
class Failure : public std::runtime_error {
 public:
  Failure(onchip_status status, const std::string& message)
      : std::runtime_error(message), status(status) {}
  onchip_status status;
};

// Called once, by the module.
void register_exceptions();

// Throws the Failure of a call of the library that failed on this thread.
void check_status(onchip_status status);

// Runs a call of the library while other Python threads run.
template <typename F>
void check_without_gil(F&& call) {
  onchip_status status = ONCHIP_OK;
  {
    const nb::gil_scoped_release others_run;
    status = call();
  }
  check_status(status);
}

// The text of a function of the library that follows the buffer rule of onchip_explain. Called
// again only where the text is long: some of them work to find it.
template <typename F>
nb::str text_of(F&& write) {
  std::string text(std::size_t{1} << 16, '\0');
  std::size_t length = 0;
  for (;;) {
    check_without_gil([&] { return write(text.data(), text.size(), &length); });
    if (length < text.size()) return nb::str(text.data(), length);
    text.resize(length + 1);
  }
}

// Which argument of which operator a value is meant for.
struct Place {
  const char* op;
  const char* argument;
};

// onchip.InvalidArgument("<op>: <argument>: got <got>, wanted <wanted>").
[[noreturn]] void refuse(const Place& place, std::string_view got, std::string_view wanted);

// For "got": numbers and short text as written, anything else by its type. Never calls a repr of
// foreign types, which may copy an array from a device.
std::string describe_value(nb::handle value);

// Whether NumPy's bool is what this is.
bool is_numpy_bool(nb::handle value);

// Whether a number may be made of it: not of a flag, and not of an array, which may lie on a GPU
// and would lose its gradient.
bool is_scalar(nb::handle value);

// An integer of 64 bits.
std::int64_t count_of(const Place& place, nb::handle value);

// Of a str that has one: not of half a surrogate pair.
const char* utf8(nb::handle text);

// Forgets Python's error, which there need not be, unless it is one that no code should stop
// (KeyboardInterrupt): that is thrown.
void drop_error();

}  // namespace onchip_python
