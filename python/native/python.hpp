// The little that a binding in CPython's limited API needs: a reference, exceptions, messages.
#pragma once

#if !defined(Py_LIMITED_API)
#error "compile with -DPy_LIMITED_API: one extension serves every CPython from that version on"
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <onchip/onchip.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <string>
#include <string_view>
#include <utility>

namespace onchip_python {

// A strong reference, or none.
class Ref {
 public:
  Ref() = default;
  static Ref steal(PyObject* object) { return Ref(object); }
  static Ref borrow(PyObject* object) {
    Py_XINCREF(object);
    return Ref(object);
  }
  Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Ref& operator=(Ref&& other) noexcept {
    PyObject* old = std::exchange(object_, std::exchange(other.object_, nullptr));
    Py_XDECREF(old);
    return *this;
  }
  Ref(const Ref&) = delete;
  Ref& operator=(const Ref&) = delete;
  ~Ref() { Py_XDECREF(object_); }

  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  explicit Ref(PyObject* object) : object_(object) {}
  PyObject* object_ = nullptr;
};

// Thrown where Python's error indicator is set; the entry points turn it into their error result.
struct PythonError {};

// Owns what a call into the C API returned; throws if that was NULL.
inline Ref checked(PyObject* object) {
  if (object == nullptr) throw PythonError{};
  return Ref::steal(object);
}

inline void check(int result) {
  if (result < 0) throw PythonError{};
}

// Runs `body` as the whole of a slot or method whose error result is `failure`.
template <typename F, typename R>
R guarded(R failure, F&& body) noexcept {
  try {
    return body();
  } catch (const PythonError&) {
    return failure;
  } catch (const std::exception&) {  // std::bad_alloc from a message
    PyErr_NoMemory();
    return failure;
  }
}

// Holds the thread's error indicator aside while foreign code runs.
class ErrorAside {
 public:
  ErrorAside() { PyErr_Fetch(&type_, &value_, &traceback_); }
  ~ErrorAside() { PyErr_Restore(type_, value_, traceback_); }
  ErrorAside(const ErrorAside&) = delete;
  ErrorAside& operator=(const ErrorAside&) = delete;

 private:
  PyObject* type_ = nullptr;
  PyObject* value_ = nullptr;
  PyObject* traceback_ = nullptr;
};

// Lets other Python threads run.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() { PyEval_RestoreThread(state_); }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

// Finds the exception classes of onchip.errors, once, when the module is made.
void load_exceptions();

// Sets the exception that `status` stands for.
void set_error(onchip_status status, const char* message);

// Throws the exception of a call that failed on this thread.
void check_status(onchip_status status);

// Which argument of which operator a value is meant for.
struct Place {
  const char* op;
  const char* argument;
};

// onchip.InvalidArgument("<op>: <argument>: got <got>, wanted <wanted>").
[[noreturn]] void refuse(const Place& place, std::string_view got, std::string_view wanted);

// For "got": numbers and short text as written, anything else by its type. Never calls a repr of
// foreign types, which may copy an array from a device.
std::string describe_value(PyObject* value);

// An integer of 64 bits.
std::int64_t count_of(const Place& place, PyObject* value);

const char* utf8(PyObject* text);

using FastCall = PyObject* (*)(PyObject* self, PyObject* const* args, Py_ssize_t count);
inline PyCFunction fastcall(FastCall function) {
  // METH_FASTCALL stores this type as PyCFunction; the way over void (*)() tells the compiler that
  // it is meant.
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

// The text of a C function that follows the buffer rule of onchip_explain. Called again only where
// the text is long: some of them work to find it.
template <typename F>
Ref text_of(F&& write) {
  std::string text(std::size_t{1} << 16, '\0');
  std::size_t length = 0;
  for (;;) {
    check_status(write(text.data(), text.size(), &length));
    if (length < text.size()) break;
    text.resize(length + 1);
  }
  return checked(PyUnicode_FromStringAndSize(text.data(), static_cast<Py_ssize_t>(length)));
}

}  // namespace onchip_python
