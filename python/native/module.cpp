// The extension module onchip._native: onchip's C interface for Python.
#include <atomic>
#include <cstdint>

#include "call.hpp"
#include "cast.hpp"
#include "errors.hpp"
#include "operators.hpp"
#include "peaks.hpp"
#include "tensor.hpp"
#include "torch_call.hpp"

namespace onchip_python {

namespace {

// nanobind keeps its state once a process. Loading the module in another interpreter would replace
// it, and break the one that has the module already, before the module's own code ran.
bool in_main_interpreter() { return PyInterpreterState_GetID(PyInterpreterState_Get()) == 0; }

// nanobind registers a type once: a second import would get a module without Tensor and Call.
void require_first_import() {
  static std::atomic<bool> imported{false};
  if (imported.exchange(true)) {
    throw nb::import_error(
        "onchip._native is loaded in this process already and cannot be loaded again");
  }
}

void set_num_threads(nb::handle num_threads) {
  const Place place{"set_num_threads", "num_threads"};
  const std::int64_t number = count_of(place, num_threads);
  if (number != static_cast<std::int32_t>(number)) {
    refuse(place, describe_value(num_threads), "0 (the start value) to 1024");
  }
  check_status(onchip_set_num_threads(static_cast<std::int32_t>(number)));
}

// A text about the kernels whose name contains `filter`; may compile them.
template <auto Function>
nb::str kernels_text(const char* filter) {
  return text_of([&](char* text, std::size_t capacity, std::size_t* length) {
    return Function(filter, text, capacity, length);
  });
}

}  // namespace

// Not the name that Python looks for: that is the function below, which comes first.
NB_MODULE(_native_of_main, module) {
  require_first_import();
  // A thread that is in a call when the interpreter ends keeps its Tensors, as it should. The
  // module's domain is its own (CMakeLists.txt), so this silences nobody else.
  nb::set_leak_warnings(false);
  module.doc() =
      "onchip's C interface for Python. It knows no attention: arrays in, plan, run, errors out.";
  register_exceptions();
  intern_field_names();
  bind_tensor(module);
  bind_call(module);
  bind_cast(module);
  bind_torch_call(module);
  bind_peaks(module);
  module.def(
      "described", [](nb::handle value) { return nb::str(describe_value(value).c_str()); },
      nb::arg().none(), nb::sig("def described(value: object, /) -> str"),
      "A value as messages say it: numbers and short text as written, anything else by its type.");
  module.def("describe", [] { return text_of(onchip_describe); }, "The library as JSON text.");
  module.def("version", onchip_version, "The library's version.");
  module.def("set_num_threads", set_num_threads, nb::arg().none(),
             nb::sig("def set_num_threads(num_threads: int, /) -> None"),
             "Threads that CPU backends use at most.");
  module.def("get_num_threads", onchip_get_num_threads, "Threads that CPU backends use at most.");
  module.def("kernels_list", kernels_text<onchip_kernels_list>,
             nb::sig("def kernels_list(filter: str, /) -> str"),
             "Registered GPU kernels, as JSON text.");
  module.def("kernels_resources", kernels_text<onchip_kernels_resources>,
             nb::sig("def kernels_resources(filter: str, /) -> str"),
             "What each GPU kernel uses, as JSON text.");
  module.def(
      "kernels_warm",
      [](const char* filter) { check_without_gil([&] { return onchip_kernels_warm(filter); }); },
      nb::sig("def kernels_warm(filter: str, /) -> None"),
      "Compiles GPU kernels into the kernel cache.");
  module.def(
      "kernels_build",
      [](const char* filter, const char* path) {
        check_without_gil([&] { return onchip_kernels_build(filter, path); });
      },
      nb::sig("def kernels_build(filter: str, path: str, /) -> None"),
      "Writes GPU kernels to an archive.");
}

}  // namespace onchip_python

extern "C" NB_EXPORT PyObject* PyInit__native() {
  if (!onchip_python::in_main_interpreter()) {
    PyErr_SetString(PyExc_ImportError,
                    "onchip._native: got a sub-interpreter, wanted the main interpreter: onchip "
                    "can be used in that one alone");
    return nullptr;
  }
  return onchip_python::PyInit__native_of_main();
}
