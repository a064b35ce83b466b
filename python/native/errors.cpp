#include "errors.hpp"

#include <array>
#include <exception>

namespace onchip_python {

namespace {

// Indexed by onchip_status.
constexpr std::array<const char*, 7> kExceptionNames = {
    "Error",         "InvalidArgument", "Unsupported",  "OutOfMemory",
    "CompileFailed", "DeviceError",     "InternalError"};

constexpr std::size_t kLongestText = 60;

}  // namespace

void register_exceptions() {
  nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
    try {
      std::rethrow_exception(thrown);
    } catch (const Failure& failure) {
      const auto index = static_cast<std::size_t>(failure.status);
      const char* name = kExceptionNames[index < kExceptionNames.size() ? index : 0];
      const nb::object type = nb::module_::import_("onchip.errors").attr(name);
      PyErr_SetString(type.ptr(), failure.what());
    }
  });
}

void check_status(onchip_status status) {
  if (status != ONCHIP_OK) throw Failure(status, onchip_last_error());
}

void refuse(const Place& place, std::string_view got, std::string_view wanted) {
  std::string text(place.op);
  text.append(": ").append(place.argument).append(": got ").append(got);
  text.append(", wanted ").append(wanted);
  throw Failure(ONCHIP_INVALID_ARGUMENT, text);
}

std::string describe_value(nb::handle value) {
  if (value.is_none()) return "None";
  PyObject* object = value.ptr();
  if (PyBool_Check(object) || PyLong_CheckExact(object) || PyFloat_CheckExact(object) ||
      PyUnicode_CheckExact(object)) {
    const nb::object written = nb::steal(PyObject_Repr(object));
    if (!written.is_valid()) {
      drop_error();
      return "an integer of too many digits to write";
    }
    std::string text = utf8(written);
    if (text.size() > kLongestText) {
      // Cut between characters: a continuation byte starts with the bits 10.
      std::size_t end = kLongestText;
      while ((static_cast<unsigned char>(text[end]) & 0xc0u) == 0x80u) --end;
      text = text.substr(0, end) + "...";
    }
    return text;
  }
  return utf8(nb::getattr(value.type(), "__name__"));
}

bool is_numpy_bool(nb::handle value) {
  const nb::object name = nb::getattr(value.type(), "__name__");
  const std::string_view type = utf8(name);
  return type == "bool_" || type == "bool";
}

bool is_scalar(nb::handle value) {
  PyObject* object = value.ptr();
  if (PyFloat_CheckExact(object) || PyLong_CheckExact(object)) return true;
  return !PyBool_Check(object) && !is_numpy_bool(value) && !nb::hasattr(value.type(), "__dlpack__");
}

std::int64_t count_of(const Place& place, nb::handle value) {
  if (!is_scalar(value)) refuse(place, describe_value(value), "an integer of 64 bits");
  // Not nb::try_cast: that would also swallow a KeyboardInterrupt in somebody's __index__.
  const nb::object integer = nb::steal(PyNumber_Index(value.ptr()));
  if (integer.is_valid()) {
    const long long number = PyLong_AsLongLong(integer.ptr());
    if (number != -1 || PyErr_Occurred() == nullptr) return number;
  }
  drop_error();
  refuse(place, describe_value(value), "an integer of 64 bits");
}

const char* utf8(nb::handle text) {
  const char* bytes = PyUnicode_AsUTF8AndSize(text.ptr(), nullptr);
  if (bytes == nullptr) nb::raise_python_error();
  return bytes;
}

void drop_error() {
  if (PyErr_Occurred() != nullptr && PyErr_ExceptionMatches(PyExc_Exception) == 0) {
    nb::raise_python_error();
  }
  PyErr_Clear();
}

}  // namespace onchip_python
