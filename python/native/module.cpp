// The extension module onchip._native: onchip's C interface for Python. What it means and its types
// are in onchip/_native.pyi.
#include <array>
#include <cstdint>

#include "call.hpp"
#include "cast.hpp"
#include "python.hpp"
#include "tensor.hpp"

namespace onchip_python {

namespace {

PyObject* describe(PyObject*, PyObject*) {
  return guarded<>(static_cast<PyObject*>(nullptr),
                   [] { return text_of(onchip_describe).release(); });
}

PyObject* version(PyObject*, PyObject*) { return PyUnicode_FromString(onchip_version()); }

PyObject* set_num_threads(PyObject*, PyObject* value) {
  return guarded<>(static_cast<PyObject*>(nullptr), [&]() -> PyObject* {
    const Place place{"set_num_threads", "num_threads"};
    const std::int64_t number = count_of(place, value);
    if (number != static_cast<std::int32_t>(number)) {
      refuse(place, describe_value(value), "0 (the start value) to 1024");
    }
    check_status(onchip_set_num_threads(static_cast<std::int32_t>(number)));
    Py_RETURN_NONE;
  });
}

PyObject* get_num_threads(PyObject*, PyObject*) {
  return PyLong_FromLong(onchip_get_num_threads());
}

// A text about the kernels whose name contains `filter`; may compile them.
template <auto Function>
PyObject* kernels_text(PyObject*, PyObject* filter) {
  return guarded<>(static_cast<PyObject*>(nullptr), [&] {
    const char* wanted = utf8(filter);
    return text_of([&](char* text, std::size_t capacity, std::size_t* length) {
             const WithoutGil others_run;
             return Function(wanted, text, capacity, length);
           })
        .release();
  });
}

PyObject* kernels_warm(PyObject*, PyObject* filter) {
  return guarded<>(static_cast<PyObject*>(nullptr), [&]() -> PyObject* {
    const char* wanted = utf8(filter);
    onchip_status status = ONCHIP_OK;
    {
      const WithoutGil others_run;
      status = onchip_kernels_warm(wanted);
    }
    check_status(status);
    Py_RETURN_NONE;
  });
}

PyObject* kernels_build(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return guarded<>(static_cast<PyObject*>(nullptr), [&]() -> PyObject* {
    if (count != 2) {
      PyErr_SetString(PyExc_TypeError, "kernels_build() takes 2 arguments");
      throw PythonError{};
    }
    const char* wanted = utf8(args[0]);
    const char* path = utf8(args[1]);
    onchip_status status = ONCHIP_OK;
    {
      const WithoutGil others_run;
      status = onchip_kernels_build(wanted, path);
    }
    check_status(status);
    Py_RETURN_NONE;
  });
}

std::array<PyMethodDef, 11> functions = {{
    {"tensor", fastcall(tensor_of_array), METH_FASTCALL,
     "tensor(op, argument, array, dtype, writable, stream, /)\n--\n\nAn array's memory."},
    {"shape", fastcall(tensor_of_shape), METH_FASTCALL,
     "shape(op, argument, shape, dtype, device_type, device_id, /)\n--\n\nA shape without memory."},
    {"describe", describe, METH_NOARGS, "describe()\n--\n\nThe library as JSON text."},
    {"version", version, METH_NOARGS, "version()\n--\n\nThe library's version."},
    {"set_num_threads", set_num_threads, METH_O,
     "set_num_threads(num_threads, /)\n--\n\nThreads that CPU backends use at most."},
    {"get_num_threads", get_num_threads, METH_NOARGS,
     "get_num_threads()\n--\n\nThreads that CPU backends use at most."},
    {"kernels_list", kernels_text<onchip_kernels_list>, METH_O,
     "kernels_list(filter, /)\n--\n\nRegistered GPU kernels, as JSON text."},
    {"kernels_resources", kernels_text<onchip_kernels_resources>, METH_O,
     "kernels_resources(filter, /)\n--\n\nWhat each GPU kernel uses, as JSON text."},
    {"kernels_warm", kernels_warm, METH_O,
     "kernels_warm(filter, /)\n--\n\nCompiles GPU kernels into the kernel cache."},
    {"kernels_build", fastcall(kernels_build), METH_FASTCALL,
     "kernels_build(filter, path, /)\n--\n\nWrites GPU kernels to an archive."},
    {nullptr, nullptr, 0, nullptr},
}};

PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                          "onchip._native",
                          "onchip's C interface; use onchip.ops.",
                          -1,
                          functions.data(),
                          nullptr,
                          nullptr,
                          nullptr,
                          nullptr};

}  // namespace

}  // namespace onchip_python

PyMODINIT_FUNC PyInit__native() {
  using namespace onchip_python;
  return guarded<>(static_cast<PyObject*>(nullptr), [] {
    load_exceptions();
    Ref module = checked(PyModule_Create(&definition));
    check(PyModule_AddObjectRef(module.get(), "Tensor", checked(make_tensor_type()).get()));
    check(PyModule_AddObjectRef(module.get(), "Call", checked(make_call_type()).get()));
    return module.release();
  });
}
