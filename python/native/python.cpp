#include "python.hpp"

#include <array>

namespace onchip_python {

namespace {

// Indexed by onchip_status.
constexpr std::array<const char*, 7> kExceptionNames = {
    "Error",         "InvalidArgument", "Unsupported",  "OutOfMemory",
    "CompileFailed", "DeviceError",     "InternalError"};
std::array<PyObject*, kExceptionNames.size()> exceptions{};

constexpr std::size_t kLongestText = 60;

}  // namespace

void load_exceptions() {
  const Ref module = checked(PyImport_ImportModule("onchip.errors"));
  for (std::size_t i = 0; i < kExceptionNames.size(); ++i) {
    exceptions[i] = checked(PyObject_GetAttrString(module.get(), kExceptionNames[i])).release();
  }
}

void set_error(onchip_status status, const char* message) {
  const bool known = status > 0 && static_cast<std::size_t>(status) < exceptions.size();
  PyErr_SetString(exceptions[known ? static_cast<std::size_t>(status) : 0], message);
}

void check_status(onchip_status status) {
  if (status == ONCHIP_OK) return;
  set_error(status, onchip_last_error());
  throw PythonError{};
}

void refuse(const Place& place, std::string_view got, std::string_view wanted) {
  std::string text(place.op);
  text.append(": ").append(place.argument).append(": got ").append(got);
  text.append(", wanted ").append(wanted);
  set_error(ONCHIP_INVALID_ARGUMENT, text.c_str());
  throw PythonError{};
}

std::string describe_value(PyObject* value) {
  if (value == Py_None) return "None";
  if (PyBool_Check(value) || PyLong_CheckExact(value) || PyFloat_CheckExact(value) ||
      PyUnicode_CheckExact(value)) {
    const Ref shown = checked(PyObject_Repr(value));
    std::string text = utf8(shown.get());
    if (text.size() > kLongestText) {
      // Cut between characters: a continuation byte starts with the bits 10.
      std::size_t end = kLongestText;
      while ((static_cast<unsigned char>(text[end]) & 0xc0u) == 0x80u) --end;
      text = text.substr(0, end) + "...";
    }
    return text;
  }
  const Ref name = checked(PyType_GetName(Py_TYPE(value)));
  return utf8(name.get());
}

std::int64_t count_of(const Place& place, PyObject* value) {
  constexpr const char* kWanted = "an integer of 64 bits";
  PyObject* index = PyNumber_Index(value);
  if (index == nullptr) {
    if (PyErr_ExceptionMatches(PyExc_TypeError) == 0) throw PythonError{};
    PyErr_Clear();
    refuse(place, describe_value(value), kWanted);
  }
  const Ref number = Ref::steal(index);
  int overflow = 0;
  const long long result = PyLong_AsLongLongAndOverflow(index, &overflow);
  if (overflow != 0) refuse(place, describe_value(index), kWanted);
  if (PyErr_Occurred() != nullptr) throw PythonError{};
  return result;
}

const char* utf8(PyObject* text) {
  const char* bytes = PyUnicode_AsUTF8AndSize(text, nullptr);
  if (bytes == nullptr) throw PythonError{};
  return bytes;
}

}  // namespace onchip_python
