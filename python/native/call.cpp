#include "call.hpp"

#include <nanobind/stl/optional.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
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
  nb::handle key = {};  // `name` as an interned Python string, kept for ever
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

std::array decode_fields = {
    ONCHIP_FIELD(onchip_attention_decode_args, q, kTensor),
    ONCHIP_FIELD(onchip_attention_decode_args, k_cache, kTensor),
    ONCHIP_FIELD(onchip_attention_decode_args, v_cache, kTensor),
    ONCHIP_FIELD(onchip_attention_decode_args, cache_seqlens, kTensor),
    ONCHIP_FIELD(onchip_attention_decode_args, k_new, kTensor),
    ONCHIP_FIELD(onchip_attention_decode_args, v_new, kTensor),
    ONCHIP_FIELD(onchip_attention_decode_args, page_table, kTensor),
    ONCHIP_FIELD(onchip_attention_decode_args, cache_slot, kTensor),
    ONCHIP_FIELD(onchip_attention_decode_args, rotary_cos, kTensor),
    ONCHIP_FIELD(onchip_attention_decode_args, rotary_sin, kTensor),
    ONCHIP_FIELD(onchip_attention_decode_args, rotary_interleaved, kFlag),
    ONCHIP_FIELD(onchip_attention_decode_args, q_positions, kTensor),
    ONCHIP_FIELD(onchip_attention_decode_args, o, kTensor),
    ONCHIP_FIELD(onchip_attention_decode_args, lse, kTensor),
};

#undef ONCHIP_FIELD

union Args {
  std::size_t struct_size;
  onchip_attention_forward_args forward;
  onchip_attention_backward_args backward;
  onchip_attention_merge_args merge;
  onchip_attention_decode_args decode;
};

constexpr std::size_t kMostFields = std::max(
    {forward_fields.size(), backward_fields.size(), merge_fields.size(), decode_fields.size()});

struct Operator;

struct Call {
  Call(const nb::str& name, const nb::dict& values);
  Call(const Call&) = delete;  // args point to options
  Call& operator=(const Call&) = delete;

  void make_plan();
  void bind(const nb::dict& tensors);
  void run(const Tensor* workspace, std::uint64_t stream);
  nb::str explain() const;

  const Operator& op;
  Args args{};
  onchip_attention_options options = ONCHIP_ATTENTION_OPTIONS_INIT;
  onchip_plan plan = ONCHIP_PLAN_INIT;
  bool planned = false;
  // The Tensors and names that the structs point to, by the index of their field.
  std::array<nb::object, kMostFields> held_args;
  std::array<nb::object, options_fields.size()> held_options;
};

struct Operator {
  onchip_operator number;
  const char* name;
  std::span<Field> fields;
  std::span<Field> options;
  void (*initialise)(Call& call);
  onchip_status (*plan)(Call& call);
  onchip_status (*run)(Call& call, void* workspace, void* stream);
};

const std::array<Operator, 4> kOperators = {{
    {ONCHIP_ATTENTION_FORWARD, "attention_forward", forward_fields, options_fields,
     [](Call& call) {
       call.args.forward = ONCHIP_ATTENTION_FORWARD_ARGS_INIT;
       call.args.forward.options = &call.options;
     },
     [](Call& call) { return onchip_attention_forward_plan(&call.args.forward, &call.plan); },
     [](Call& call, void* workspace, void* stream) {
       return onchip_attention_forward_run(&call.plan, &call.args.forward, workspace, stream);
     }},
    {ONCHIP_ATTENTION_BACKWARD, "attention_backward", backward_fields, options_fields,
     [](Call& call) {
       call.args.backward = ONCHIP_ATTENTION_BACKWARD_ARGS_INIT;
       call.args.backward.options = &call.options;
     },
     [](Call& call) { return onchip_attention_backward_plan(&call.args.backward, &call.plan); },
     [](Call& call, void* workspace, void* stream) {
       return onchip_attention_backward_run(&call.plan, &call.args.backward, workspace, stream);
     }},
    {ONCHIP_ATTENTION_MERGE,
     "merge",
     merge_fields,
     {},
     [](Call& call) { call.args.merge = ONCHIP_ATTENTION_MERGE_ARGS_INIT; },
     [](Call& call) { return onchip_attention_merge_plan(&call.args.merge, &call.plan); },
     [](Call& call, void* workspace, void* stream) {
       return onchip_attention_merge_run(&call.plan, &call.args.merge, workspace, stream);
     }},
    {ONCHIP_ATTENTION_DECODE, "attention_decode", decode_fields, options_fields,
     [](Call& call) {
       call.args.decode = ONCHIP_ATTENTION_DECODE_ARGS_INIT;
       call.args.decode.options = &call.options;
     },
     [](Call& call) { return onchip_attention_decode_plan(&call.args.decode, &call.plan); },
     [](Call& call, void* workspace, void* stream) {
       return onchip_attention_decode_run(&call.plan, &call.args.decode, workspace, stream);
     }},
}};

const Operator& operator_named(const nb::str& name) {
  const std::string_view wanted = utf8(name);
  for (const Operator& op : kOperators) {
    if (wanted == op.name) return op;
  }
  throw nb::value_error(("no operator is named '" + std::string(wanted) + "'").c_str());
}

// ---- Python values into fields ------------------------------------------------------------------

double real_of(const Place& place, nb::handle value) {
  double number = 0;
  // The C struct marks an absent scale by NaN; here that mark is None.
  if (!nb::try_cast(value, number) || std::isnan(number)) {
    refuse(place, describe_value(value), "a number");
  }
  return number;
}

// True, False, 0, 1 and NumPy's bool; an array is never taken for a flag.
std::int32_t flag_of(const Place& place, nb::handle value) {
  if (nb::isinstance<nb::int_>(value)) {
    const std::int64_t number = count_of(place, value);
    if (number == 0 || number == 1) return static_cast<std::int32_t>(number);
  } else {
    const nb::object name = nb::getattr(value.type(), "__name__");
    const std::string_view type = utf8(name);
    if (type == "bool_" || type == "bool") return nb::bool_(value) ? 1 : 0;
  }
  refuse(place, describe_value(value), "True or False");
}

std::int32_t choice_of(const Place& place, nb::handle value,
                       std::span<const std::string_view> names, std::int32_t first,
                       const char* wanted) {
  std::string_view name;
  if (nb::try_cast(value, name)) {
    const auto found = std::find(names.begin(), names.end(), name);
    if (found != names.end()) return first + static_cast<std::int32_t>(found - names.begin());
  }
  refuse(place, describe_value(value), wanted);
}

const char* name_of(const Place& place, nb::handle value) {
  constexpr const char* kWanted = "a name or None";
  std::string_view name;
  // The C struct takes an empty name for none.
  if (!nb::try_cast(value, name) || name.empty()) refuse(place, describe_value(value), kWanted);
  if (name.find('\0') != std::string_view::npos) {
    refuse(place, "a name with a zero byte", kWanted);
  }
  return name.data();
}

// `held`: keeps what the field points to.
void set_field(const Operator& op, const Field& field, void* base, nb::object& held,
               nb::handle value) {
  static constexpr std::array<std::string_view, 2> kAlignments = {"bottom_right", "top_left"};
  static constexpr std::array<std::string_view, 1> kPrecisions = {"tf32"};
  const Place place{op.name, field.name};
  const auto store = [&](auto number) {
    std::memcpy(static_cast<std::byte*>(base) + field.offset, &number, sizeof(number));
  };
  switch (field.kind) {
    case Kind::kTensor: {
      const Tensor* tensor = as_tensor(value);
      if (tensor == nullptr) {
        throw nb::type_error((std::string(field.name) + ": wanted a Tensor").c_str());
      }
      store(&tensor->view);
      held = nb::borrow(value);
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
      held = nb::borrow(value);
      return;
  }
}

// None, like an absent key, leaves a field at its default. Returns how many keys were known.
std::size_t set_fields(const Operator& op, std::span<const Field> fields, void* base,
                       std::span<nb::object> held, const nb::dict& values) {
  std::size_t known = 0;
  for (std::size_t i = 0; i < fields.size(); ++i) {
    const nb::object value = values.get(fields[i].key, nb::handle());
    if (!value.is_valid()) continue;
    ++known;
    if (!value.is_none()) set_field(op, fields[i], base, held[i], value);
  }
  return known;
}

// ---- the type -----------------------------------------------------------------------------------

Call::Call(const nb::str& name, const nb::dict& values) : op(operator_named(name)) {
  op.initialise(*this);
  const std::size_t known = set_fields(op, op.fields, &args, held_args, values) +
                            set_fields(op, op.options, &options, held_options, values);
  if (known != values.size()) {
    throw nb::type_error((std::string(op.name) + ": an argument it does not have, among " +
                          utf8(nb::repr(values.keys())))
                             .c_str());
  }
}

void Call::make_plan() {
  check_without_gil([&] { return op.plan(*this); });  // may compile a kernel
  planned = true;
}

// A plan holds for every address with the same 16-byte alignment (onchip.h, conventions); otherwise
// the run makes a new one.
void Call::bind(const nb::dict& tensors) {
  for (std::size_t i = 0; i < op.fields.size(); ++i) {
    const Field& field = op.fields[i];
    const nb::object value = tensors.get(field.key, nb::handle());
    if (!value.is_valid()) continue;
    const auto address = [&]() -> std::uintptr_t {
      if (!held_args[i].is_valid()) return 0;
      return reinterpret_cast<std::uintptr_t>(as_tensor(held_args[i])->view.data);
    };
    const std::uintptr_t planned_address = address();
    set_field(op, field, &args, held_args[i], value);
    if ((planned_address ^ address()) % 16 != 0) planned = false;
  }
}

void require_data(const Operator& op, std::span<const Field> fields,
                  std::span<const nb::object> held) {
  for (std::size_t i = 0; i < fields.size(); ++i) {
    if (fields[i].kind != Kind::kTensor || !held[i].is_valid()) continue;
    if (!as_tensor(held[i])->has_data) {
      refuse({op.name, fields[i].name}, "a shape without data", "an array");
    }
  }
}

void* aligned_workspace(const onchip_plan& plan, const Tensor& workspace) {
  const auto address = reinterpret_cast<std::uintptr_t>(workspace.view.data);
  const std::uintptr_t alignment = plan.workspace_alignment;
  const std::uintptr_t padding = (alignment - address % alignment) % alignment;
  if (workspace.view.rank != 1 || !workspace.has_data ||
      static_cast<std::uint64_t>(workspace.byte_strides[0] * workspace.view.shape[0]) <
          plan.workspace_bytes + padding) {
    throw nb::value_error("the workspace is smaller than the plan wants");
  }
  return static_cast<std::byte*>(workspace.view.data) + padding;
}

void Call::run(const Tensor* workspace, std::uint64_t stream) {
  require_data(op, op.fields, held_args);
  require_data(op, op.options, held_options);
  if (!planned) make_plan();
  void* memory = workspace == nullptr ? nullptr : aligned_workspace(plan, *workspace);
  check_without_gil([&] { return op.run(*this, memory, reinterpret_cast<void*>(stream)); });
}

nb::str Call::explain() const {
  return text_of([&](char* text, std::size_t capacity, std::size_t* length) {
    return onchip_explain(op.number, &args, text, capacity, length);
  });
}

std::optional<std::string_view> name_or_none(const char* name) {
  if (name == nullptr) return std::nullopt;
  return name;
}

void intern_names(std::span<Field> fields) {
  for (Field& field : fields) {
    field.key = PyUnicode_InternFromString(field.name);
    if (!field.key.is_valid()) nb::raise_python_error();
  }
}

}  // namespace

void bind_call(nb::module_& module) {
  for (const Operator& op : kOperators) {
    intern_names(op.fields);
    intern_names(op.options);
  }
  nb::class_<Call>(module, "Call", nb::is_final(), nb::pooled(),
                   nb::sig("@typing.final\nclass Call()"),
                   "One call of an operator: its argument struct, plan and run.")
      .def(
          nb::init<const nb::str&, const nb::dict&>(),
          nb::sig("def __init__(self, operator: str, arguments: dict[str, typing.Any], /) -> None"),
          "`arguments` by the names of the C struct and its options; None leaves a default.")
      .def_prop_ro("workspace_bytes", [](const Call& self) { return self.plan.workspace_bytes; })
      .def_prop_ro("workspace_alignment",
                   [](const Call& self) { return self.plan.workspace_alignment; })
      .def_prop_ro("backend", [](const Call& self) { return name_or_none(self.plan.backend); })
      .def_prop_ro("kernel", [](const Call& self) { return name_or_none(self.plan.kernel); })
      .def("plan", &Call::make_plan, nb::sig("def plan(self, /) -> None"),
           "Checks the whole contract and picks a backend.")
      .def("bind", &Call::bind, nb::sig("def bind(self, tensors: dict[str, Tensor], /) -> None"),
           "Replaces Tensors by others of the same shapes.")
      .def("run", &Call::run, nb::arg().none(), nb::arg(),
           nb::sig("def run(self, workspace: Tensor | None, stream: int, /) -> None"),
           "Computes, without holding the GIL.")
      .def("explain", &Call::explain, nb::sig("def explain(self, /) -> str"),
           "Which backend takes the call, and why others do not.");
}

}  // namespace onchip_python
