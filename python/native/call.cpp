#include "call.hpp"

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>

#include "tensor.hpp"

namespace onchip_python {

namespace {

// ---- the argument structs as tables -------------------------------------------------------------

enum class Kind : std::uint8_t { kTensor, kReal, kCount, kFlag, kAlignment, kPrecision, kName };

struct Field {
  const char* name;
  Kind kind;
  std::size_t offset;
  PyObject* key = nullptr;  // `name` as an interned Python string
};

#define ONCHIP_FIELD(type, name, kind) \
  Field { #name, Kind::kind, offsetof(type, name) }

std::array options_fields = {
    ONCHIP_FIELD(onchip_attention_options, scale, kReal),
    ONCHIP_FIELD(onchip_attention_options, softcap, kReal),
    ONCHIP_FIELD(onchip_attention_options, dropout_p, kReal),
    ONCHIP_FIELD(onchip_attention_options, window_left, kCount),
    ONCHIP_FIELD(onchip_attention_options, window_right, kCount),
    ONCHIP_FIELD(onchip_attention_options, max_seqlen_q, kCount),
    ONCHIP_FIELD(onchip_attention_options, max_seqlen_kv, kCount),
    ONCHIP_FIELD(onchip_attention_options, causal, kFlag),
    ONCHIP_FIELD(onchip_attention_options, alignment, kAlignment),
    ONCHIP_FIELD(onchip_attention_options, precision, kPrecision),
    ONCHIP_FIELD(onchip_attention_options, deterministic, kFlag),
    ONCHIP_FIELD(onchip_attention_options, batch_invariant, kFlag),
    ONCHIP_FIELD(onchip_attention_options, check, kFlag),
    ONCHIP_FIELD(onchip_attention_options, backend, kName),
    ONCHIP_FIELD(onchip_attention_options, bias, kTensor),
    ONCHIP_FIELD(onchip_attention_options, mask, kTensor),
    ONCHIP_FIELD(onchip_attention_options, alibi_slopes, kTensor),
    ONCHIP_FIELD(onchip_attention_options, q_segment_ids, kTensor),
    ONCHIP_FIELD(onchip_attention_options, kv_segment_ids, kTensor),
    ONCHIP_FIELD(onchip_attention_options, sink, kTensor),
    ONCHIP_FIELD(onchip_attention_options, dropout_rng, kTensor),
    ONCHIP_FIELD(onchip_attention_options, cu_seqlens_q, kTensor),
    ONCHIP_FIELD(onchip_attention_options, cu_seqlens_kv, kTensor),
    ONCHIP_FIELD(onchip_attention_options, seqlens_q, kTensor),
    ONCHIP_FIELD(onchip_attention_options, seqlens_kv, kTensor),
};

std::array forward_fields = {
    ONCHIP_FIELD(onchip_attention_forward_args, q, kTensor),
    ONCHIP_FIELD(onchip_attention_forward_args, k, kTensor),
    ONCHIP_FIELD(onchip_attention_forward_args, v, kTensor),
    ONCHIP_FIELD(onchip_attention_forward_args, o, kTensor),
    ONCHIP_FIELD(onchip_attention_forward_args, lse, kTensor),
};

std::array backward_fields = {
    ONCHIP_FIELD(onchip_attention_backward_args, d_o, kTensor),
    ONCHIP_FIELD(onchip_attention_backward_args, q, kTensor),
    ONCHIP_FIELD(onchip_attention_backward_args, k, kTensor),
    ONCHIP_FIELD(onchip_attention_backward_args, v, kTensor),
    ONCHIP_FIELD(onchip_attention_backward_args, o, kTensor),
    ONCHIP_FIELD(onchip_attention_backward_args, lse, kTensor),
    ONCHIP_FIELD(onchip_attention_backward_args, d_lse, kTensor),
    ONCHIP_FIELD(onchip_attention_backward_args, dq, kTensor),
    ONCHIP_FIELD(onchip_attention_backward_args, dk, kTensor),
    ONCHIP_FIELD(onchip_attention_backward_args, dv, kTensor),
    ONCHIP_FIELD(onchip_attention_backward_args, dbias, kTensor),
    ONCHIP_FIELD(onchip_attention_backward_args, dsink, kTensor),
};

std::array merge_fields = {
    ONCHIP_FIELD(onchip_attention_merge_args, o1, kTensor),
    ONCHIP_FIELD(onchip_attention_merge_args, lse1, kTensor),
    ONCHIP_FIELD(onchip_attention_merge_args, o2, kTensor),
    ONCHIP_FIELD(onchip_attention_merge_args, lse2, kTensor),
    ONCHIP_FIELD(onchip_attention_merge_args, o, kTensor),
    ONCHIP_FIELD(onchip_attention_merge_args, lse, kTensor),
    ONCHIP_FIELD(onchip_attention_merge_args, backend, kName),
};

#undef ONCHIP_FIELD

union Args {
  std::size_t struct_size;
  onchip_attention_forward_args forward;
  onchip_attention_backward_args backward;
  onchip_attention_merge_args merge;
};

struct Operator;

struct CallObject {
  PyObject_HEAD const Operator* op;
  Args args;
  onchip_attention_options options;
  onchip_plan plan;
  bool planned;
  // Every Tensor and name that the structs point into, by argument.
  PyObject* held;
};

struct Operator {
  onchip_operator number;
  const char* name;
  std::span<Field> fields;
  std::span<Field> options;
  void (*initialise)(CallObject* call);
  onchip_status (*plan)(CallObject* call);
  onchip_status (*run)(CallObject* call, void* workspace, void* stream);
};

const std::array<Operator, 3> kOperators = {{
    {ONCHIP_ATTENTION_FORWARD, "attention_forward", forward_fields, options_fields,
     [](CallObject* call) {
       call->args.forward = ONCHIP_ATTENTION_FORWARD_ARGS_INIT;
       call->args.forward.options = &call->options;
     },
     [](CallObject* call) {
       return onchip_attention_forward_plan(&call->args.forward, &call->plan);
     },
     [](CallObject* call, void* workspace, void* stream) {
       return onchip_attention_forward_run(&call->plan, &call->args.forward, workspace, stream);
     }},
    {ONCHIP_ATTENTION_BACKWARD, "attention_backward", backward_fields, options_fields,
     [](CallObject* call) {
       call->args.backward = ONCHIP_ATTENTION_BACKWARD_ARGS_INIT;
       call->args.backward.options = &call->options;
     },
     [](CallObject* call) {
       return onchip_attention_backward_plan(&call->args.backward, &call->plan);
     },
     [](CallObject* call, void* workspace, void* stream) {
       return onchip_attention_backward_run(&call->plan, &call->args.backward, workspace, stream);
     }},
    {ONCHIP_ATTENTION_MERGE,
     "merge",
     merge_fields,
     {},
     [](CallObject* call) { call->args.merge = ONCHIP_ATTENTION_MERGE_ARGS_INIT; },
     [](CallObject* call) { return onchip_attention_merge_plan(&call->args.merge, &call->plan); },
     [](CallObject* call, void* workspace, void* stream) {
       return onchip_attention_merge_run(&call->plan, &call->args.merge, workspace, stream);
     }},
}};

const Operator& operator_named(PyObject* name) {
  const std::string_view wanted = utf8(name);
  for (const Operator& op : kOperators) {
    if (wanted == op.name) return op;
  }
  PyErr_Format(PyExc_ValueError, "no operator is named %R", name);
  throw PythonError{};
}

// ---- Python values into fields ------------------------------------------------------------------

double real_of(const Place& place, PyObject* value) {
  double number = std::nan("");
  if (PyUnicode_Check(value) == 0) {
    number = PyFloat_AsDouble(value);
    if (PyErr_Occurred() != nullptr) {
      if (PyErr_ExceptionMatches(PyExc_TypeError) == 0) throw PythonError{};
      PyErr_Clear();
      number = std::nan("");
    }
  }
  // The C struct marks an absent scale by NaN; here that mark is None.
  if (std::isnan(number)) refuse(place, describe_value(value), "a number");
  return number;
}

// True, False, 0, 1 and NumPy's bool; an array is never taken for a flag.
std::int32_t flag_of(const Place& place, PyObject* value) {
  if (PyBool_Check(value)) return value == Py_True ? 1 : 0;
  if (PyLong_Check(value)) {
    const std::int64_t number = count_of(place, value);
    if (number == 0 || number == 1) return static_cast<std::int32_t>(number);
  } else {
    const Ref name = checked(PyType_GetName(Py_TYPE(value)));
    const std::string_view type = utf8(name.get());
    if (type == "bool_" || type == "bool") {
      const int truth = PyObject_IsTrue(value);
      check(truth);
      return truth;
    }
  }
  refuse(place, describe_value(value), "True or False");
}

std::int32_t choice_of(const Place& place, PyObject* value, std::span<const char* const> names,
                       std::int32_t first, const char* wanted) {
  if (PyUnicode_Check(value) != 0) {
    for (std::size_t i = 0; i < names.size(); ++i) {
      if (PyUnicode_CompareWithASCIIString(value, names[i]) == 0)
        return first + static_cast<std::int32_t>(i);
    }
  }
  refuse(place, describe_value(value), wanted);
}

const char* name_of(const Place& place, PyObject* value) {
  constexpr const char* kWanted = "a name or None";
  if (PyUnicode_Check(value) == 0) refuse(place, describe_value(value), kWanted);
  Py_ssize_t length = 0;
  const char* text = PyUnicode_AsUTF8AndSize(value, &length);
  if (text == nullptr) {  // half a surrogate pair
    PyErr_Clear();
    refuse(place, describe_value(value), kWanted);
  }
  if (std::strlen(text) != static_cast<std::size_t>(length)) {
    refuse(place, "a name with a zero byte", kWanted);
  }
  return text;
}

void set_field(const CallObject* call, std::byte* base, const Field& field, PyObject* value) {
  static constexpr std::array<const char*, 2> kAlignments = {"bottom_right", "top_left"};
  static constexpr std::array<const char*, 1> kPrecisions = {"tf32"};
  const Place place{call->op->name, field.name};
  const auto store = [&](auto number) {
    std::memcpy(base + field.offset, &number, sizeof(number));
  };
  switch (field.kind) {
    case Kind::kTensor: {
      TensorObject* tensor = as_tensor(value);
      if (tensor == nullptr) {
        PyErr_Format(PyExc_TypeError, "%s: wanted a Tensor", field.name);
        throw PythonError{};
      }
      store(static_cast<const onchip_tensor*>(&tensor->view));
      check(PyDict_SetItem(call->held, field.key, value));
      return;
    }
    case Kind::kReal:
      return store(real_of(place, value));
    case Kind::kCount:
      return store(count_of(place, value));
    case Kind::kFlag:
      return store(flag_of(place, value));
    case Kind::kAlignment:
      return store(choice_of(place, value, kAlignments, ONCHIP_BOTTOM_RIGHT,
                             "\"bottom_right\" or \"top_left\""));
    case Kind::kPrecision:
      return store(choice_of(place, value, kPrecisions, ONCHIP_PRECISION_TF32, "None or \"tf32\""));
    case Kind::kName:
      store(name_of(place, value));
      check(PyDict_SetItem(call->held, field.key, value));
      return;
  }
}

// None, like an absent key, leaves a field at its default. Returns how many keys were known.
Py_ssize_t set_fields(const CallObject* call, std::byte* base, std::span<const Field> fields,
                      PyObject* values) {
  Py_ssize_t known = 0;
  for (const Field& field : fields) {
    PyObject* value = PyDict_GetItemWithError(values, field.key);
    if (value == nullptr) {
      if (PyErr_Occurred() != nullptr) throw PythonError{};
      continue;
    }
    ++known;
    if (value != Py_None) set_field(call, base, field, value);
  }
  return known;
}

std::byte* args_base(CallObject* call) { return reinterpret_cast<std::byte*>(&call->args); }

void set_all(CallObject* call, PyObject* values) {
  Py_ssize_t known = set_fields(call, args_base(call), call->op->fields, values);
  known +=
      set_fields(call, reinterpret_cast<std::byte*>(&call->options), call->op->options, values);
  if (known != PyDict_Size(values)) {
    PyErr_Format(PyExc_TypeError, "%s: an argument it does not have, among %R", call->op->name,
                 checked(PyDict_Keys(values)).get());
    throw PythonError{};
  }
}

// ---- the type -----------------------------------------------------------------------------------

CallObject* as_call(PyObject* object) { return reinterpret_cast<CallObject*>(object); }

void make_plan(CallObject* call) {
  onchip_status status = ONCHIP_OK;
  {
    const WithoutGil others_run;  // a plan may compile a kernel
    status = call->op->plan(call);
  }
  check_status(status);
  call->planned = true;
}

PyObject* call_new(PyTypeObject* type, PyObject* positional, PyObject* named) {
  return guarded<>(static_cast<PyObject*>(nullptr), [&] {
    PyObject* name = nullptr;
    PyObject* values = nullptr;
    if (named != nullptr && PyDict_Size(named) != 0) {
      PyErr_SetString(PyExc_TypeError, "Call() takes no keyword arguments");
      throw PythonError{};
    }
    if (PyArg_ParseTuple(positional, "UO!", &name, &PyDict_Type, &values) == 0) throw PythonError{};
    const Operator& op = operator_named(name);
    auto* call = PyObject_New(CallObject, type);
    if (call == nullptr) throw PythonError{};
    Ref result = Ref::steal(reinterpret_cast<PyObject*>(call));
    call->op = &op;
    call->options = ONCHIP_ATTENTION_OPTIONS_INIT;
    call->plan = ONCHIP_PLAN_INIT;
    call->planned = false;
    call->held = nullptr;
    op.initialise(call);
    call->held = checked(PyDict_New()).release();
    set_all(call, values);
    return result.release();
  });
}

void call_dealloc(PyObject* object) {
  Py_XDECREF(as_call(object)->held);
  auto* type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  PyObject_Free(object);
  Py_DECREF(type);
}

PyObject* call_plan(PyObject* object, PyObject*) {
  return guarded<>(static_cast<PyObject*>(nullptr), [&]() -> PyObject* {
    make_plan(as_call(object));
    Py_RETURN_NONE;
  });
}

// The tensor fields of this operator get memory in place of shapes. A plan holds for every address
// with the same 16-byte alignment (onchip.h, conventions); otherwise the run makes a new one.
PyObject* call_bind(PyObject* object, PyObject* values) {
  return guarded<>(static_cast<PyObject*>(nullptr), [&]() -> PyObject* {
    CallObject* call = as_call(object);
    const auto address = [&](const Field& field) {
      const onchip_tensor* tensor = nullptr;
      std::memcpy(&tensor, args_base(call) + field.offset, sizeof(tensor));
      return tensor == nullptr ? 0 : reinterpret_cast<std::uintptr_t>(tensor->data);
    };
    for (const Field& field : call->op->fields) {
      PyObject* value = PyDict_GetItemWithError(values, field.key);
      if (value == nullptr) {
        if (PyErr_Occurred() != nullptr) throw PythonError{};
        continue;
      }
      const std::uintptr_t planned = address(field);
      set_field(call, args_base(call), field, value);
      if ((planned ^ address(field)) % 16 != 0) call->planned = false;
    }
    Py_RETURN_NONE;
  });
}

void require_data(const CallObject* call) {
  Py_ssize_t position = 0;
  PyObject* key = nullptr;
  PyObject* value = nullptr;
  while (PyDict_Next(call->held, &position, &key, &value) != 0) {
    const TensorObject* tensor = as_tensor(value);
    if (tensor != nullptr && !tensor->has_data) {
      refuse({call->op->name, utf8(key)}, "a shape without data", "an array");
    }
  }
}

void* aligned_workspace(const CallObject* call, const TensorObject* workspace) {
  const auto address = reinterpret_cast<std::uintptr_t>(workspace->view.data);
  const std::uintptr_t alignment = call->plan.workspace_alignment;
  const std::uintptr_t padding = (alignment - address % alignment) % alignment;
  if (workspace->view.rank != 1 || !workspace->has_data ||
      static_cast<std::uint64_t>(workspace->byte_strides[0] * workspace->view.shape[0]) <
          call->plan.workspace_bytes + padding) {
    PyErr_SetString(PyExc_ValueError, "the workspace is smaller than the plan wants");
    throw PythonError{};
  }
  return static_cast<std::byte*>(workspace->view.data) + padding;
}

PyObject* call_run(PyObject* object, PyObject* const* args, Py_ssize_t count) {
  return guarded<>(static_cast<PyObject*>(nullptr), [&]() -> PyObject* {
    CallObject* call = as_call(object);
    const TensorObject* workspace = count == 2 ? as_tensor(args[0]) : nullptr;
    if (count != 2 || (workspace == nullptr && args[0] != Py_None)) {
      PyErr_SetString(PyExc_TypeError, "run() takes a Tensor or None, and a stream");
      throw PythonError{};
    }
    const std::uint64_t stream = PyLong_AsUnsignedLongLong(args[1]);
    if (PyErr_Occurred() != nullptr) throw PythonError{};
    require_data(call);
    if (!call->planned) make_plan(call);
    void* memory = workspace == nullptr ? nullptr : aligned_workspace(call, workspace);
    onchip_status status = ONCHIP_OK;
    {
      const WithoutGil others_run;
      status = call->op->run(call, memory, reinterpret_cast<void*>(stream));
    }
    check_status(status);
    Py_RETURN_NONE;
  });
}

PyObject* call_explain(PyObject* object, PyObject*) {
  return guarded<>(static_cast<PyObject*>(nullptr), [&] {
    CallObject* call = as_call(object);
    return text_of([&](char* text, std::size_t capacity, std::size_t* length) {
             return onchip_explain(call->op->number, &call->args, text, capacity, length);
           })
        .release();
  });
}

PyObject* get_workspace_bytes(PyObject* object, void*) {
  return PyLong_FromSize_t(as_call(object)->plan.workspace_bytes);
}

PyObject* get_workspace_alignment(PyObject* object, void*) {
  return PyLong_FromSize_t(as_call(object)->plan.workspace_alignment);
}

PyObject* text_or_none(const char* text) {
  if (text == nullptr) Py_RETURN_NONE;
  return PyUnicode_FromString(text);
}

PyObject* get_backend(PyObject* object, void*) {
  return text_or_none(as_call(object)->plan.backend);
}

PyObject* get_kernel(PyObject* object, void*) { return text_or_none(as_call(object)->plan.kernel); }

std::array<PyGetSetDef, 5> getters = {{
    {"workspace_bytes", get_workspace_bytes, nullptr, "What run needs.", nullptr},
    {"workspace_alignment", get_workspace_alignment, nullptr, "Of its address.", nullptr},
    {"backend", get_backend, nullptr, "Chosen by plan; None before.", nullptr},
    {"kernel", get_kernel, nullptr, "Chosen by plan; None before.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
}};

std::array<PyMethodDef, 5> methods = {{
    {"plan", call_plan, METH_NOARGS, "plan($self, /)\n--\n\nChecks the call and picks a backend."},
    {"bind", call_bind, METH_O,
     "bind($self, tensors, /)\n--\n\nReplaces Tensors of the same shapes."},
    {"run", fastcall(call_run), METH_FASTCALL,
     "run($self, workspace, stream, /)\n--\n\nComputes, without holding the GIL."},
    {"explain", call_explain, METH_NOARGS,
     "explain($self, /)\n--\n\nWhich backend takes the call, and why others do not."},
    {nullptr, nullptr, 0, nullptr},
}};

void intern_names(std::span<Field> fields) {
  for (Field& field : fields) {
    field.key = PyUnicode_InternFromString(field.name);
    if (field.key == nullptr) throw PythonError{};
  }
}

}  // namespace

PyObject* make_call_type() {
  for (const Operator& op : kOperators) {
    intern_names(op.fields);
    intern_names(op.options);
  }
  std::array<PyType_Slot, 6> slots = {{
      {Py_tp_new, reinterpret_cast<void*>(call_new)},
      {Py_tp_dealloc, reinterpret_cast<void*>(call_dealloc)},
      {Py_tp_getset, getters.data()},
      {Py_tp_methods, methods.data()},
      {Py_tp_doc,
       const_cast<char*>("Call(operator, arguments, /)\n--\n\nOne call of an operator.")},
      {0, nullptr},
  }};
  PyType_Spec spec = {"onchip._native.Call", sizeof(CallObject), 0, Py_TPFLAGS_DEFAULT,
                      slots.data()};
  return checked(PyType_FromSpec(&spec)).release();
}

}  // namespace onchip_python
