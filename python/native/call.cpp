#include "call.hpp"

#include <nanobind/stl/optional.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "fields.hpp"
#include "operators.hpp"
#include "tensor.hpp"

namespace onchip_python {

namespace {

struct Call {
  Call(const nb::str& operator_name, const nb::dict& values);
  Call(const Named& called, const nb::str& operator_name, const nb::dict& values);
  Call(const Call&) = delete;  // args point to options
  Call& operator=(const Call&) = delete;

  void make_plan();
  void bind(const nb::dict& tensors);
  void run(const Tensor* workspace, std::uint64_t stream);
  nb::str explain() const;

  const Operator& op;
  nb::object held_name;
  const char* name;  // of the operator as messages say it
  Structs structs;
  onchip_plan plan = ONCHIP_PLAN_INIT;
  bool planned = false;
  // The Tensors and names that the structs point to, by the fields of the operator's sections.
  std::array<nb::object, kMostFields> held;
};

// Calls f(field, its struct, what it holds) for every field of the sections.
template <typename F>
void for_each_field(Call& call, bool outputs_only, F&& f) {
  std::size_t index = 0;
  for (const Section& section : call.op.sections) {
    if (outputs_only && !section.outputs) {
      index += section.fields.size();
      continue;
    }
    std::byte* base = reinterpret_cast<std::byte*>(&call.structs) + section.offset;
    for (const Field& field : section.fields) f(field, base, call.held[index++]);
  }
}

Call::Call(const nb::str& operator_name, const nb::dict& values)
    : Call(named(utf8(operator_name)), operator_name, values) {}

Call::Call(const Named& called, const nb::str& operator_name, const nb::dict& values)
    : op(called.op), held_name(operator_name), name(utf8(held_name)) {
  op.initialise(structs);
  if (called.linear != 0) structs.linear_options.op = called.linear;
  std::size_t known = 0;
  for_each_field(*this, false, [&](const Field& field, void* base, nb::object& kept) {
    const nb::object value = values.get(field.key, nb::handle());
    if (!value.is_valid()) return;
    ++known;
    set_field(name, field, base, kept, value);
  });
  if (known != values.size()) {
    throw nb::type_error((std::string(name) + ": an argument it does not have, among " +
                          utf8(nb::repr(values.keys())))
                             .c_str());
  }
}

void Call::make_plan() {
  check_without_gil([&] { return op.plan(structs, plan); });  // may compile a kernel
  planned = true;
}

// A plan holds for every address with the same 16-byte alignment (onchip.h, conventions); otherwise
// the run makes a new one.
void Call::bind(const nb::dict& tensors) {
  for_each_field(*this, true, [&](const Field& field, void* base, nb::object& kept) {
    const nb::object value = tensors.get(field.key, nb::handle());
    if (!value.is_valid()) return;
    const auto address = [&]() -> std::uintptr_t {
      if (!kept.is_valid()) return 0;
      return reinterpret_cast<std::uintptr_t>(as_tensor(kept)->view.data);
    };
    const std::uintptr_t planned_address = address();
    set_field(name, field, base, kept, value);
    if ((planned_address ^ address()) % 16 != 0) planned = false;
  });
}

void Call::run(const Tensor* workspace, std::uint64_t stream) {
  for_each_field(*this, false, [&](const Field& field, void*, const nb::object& kept) {
    if (field.kind == Kind::kTensor && kept.is_valid() && !as_tensor(kept)->has_data) {
      refuse({name, field.name}, "a shape without data", "an array");
    }
  });
  if (!planned) make_plan();
  void* memory = workspace == nullptr ? nullptr : aligned_workspace(plan, *workspace);
  check_without_gil([&] { return op.run(structs, plan, memory, reinterpret_cast<void*>(stream)); });
}

nb::str Call::explain() const {
  return text_of([&](char* text, std::size_t capacity, std::size_t* length) {
    return onchip_explain(op.number, &structs.args, text, capacity, length);
  });
}

std::optional<std::string_view> name_or_none(const char* name) {
  if (name == nullptr) return std::nullopt;
  return name;
}

}  // namespace

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

void bind_call(nb::module_& module) {
  nb::class_<Call>(module, "Call", nb::is_final(), nb::pooled(),
                   nb::sig("@typing.final\nclass Call()"),
                   "One call of an operator: its argument struct, plan and run.")
      .def(
          nb::init<const nb::str&, const nb::dict&>(),
          nb::sig("def __init__(self, operator: str, arguments: dict[str, typing.Any], /) -> None"),
          "`arguments` by the names of the C struct and its options; what is absent, and None\n"
          "where it is legal, leaves a default.")
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
