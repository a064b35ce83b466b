#include "torch_call.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "call.hpp"
#include "cast.hpp"
#include "fields.hpp"
#include "operators.hpp"
#include "tensor.hpp"

namespace onchip_python {

namespace {

// Interned, kept for ever.
struct Words {
  nb::handle is_neg, requires_grad;
};
Words words;

nb::handle item(const nb::tuple& values, std::size_t index) {
  return PyTuple_GetItem(values.ptr(), static_cast<Py_ssize_t>(index));
}

bool is_true(PyObject* answer) {
  const nb::object kept = nb::steal(answer);
  if (!kept.is_valid()) nb::raise_python_error();
  return kept.is(Py_True);
}

// What a call fills in.
struct Slot {
  const Field* field;
  std::size_t base;  // of its struct, in Structs
};

std::vector<Slot> slots_of(const Operator& op, const nb::tuple& names, bool tensors) {
  const auto find = [&](nb::handle name) -> Slot {
    for (const Section& section : op.sections) {
      for (const Field& field : section.fields) {
        const bool is_tensor = field.kind == Kind::kTensor;
        if (is_tensor == tensors && field.key.equal(name)) return {&field, section.offset};
      }
    }
    throw nb::value_error(
        (std::string(op.name) + " has no " + (tensors ? "tensor " : "value ") + utf8(name))
            .c_str());
  };
  std::vector<Slot> slots;
  slots.reserve(names.size());
  for (const nb::handle name : names) slots.push_back(find(name));
  return slots;
}

void require_size(const nb::tuple& given, std::size_t wanted) {
  if (given.size() != wanted) {
    throw nb::value_error(
        (std::to_string(given.size()) + " given, " + std::to_string(wanted) + " wanted").c_str());
  }
}

class TorchCall {
 public:
  TorchCall(const nb::str& operator_name, const nb::tuple& inputs, const nb::tuple& outputs,
            const nb::tuple& values, std::size_t required, const nb::tuple& types)
      : called_(named(utf8(operator_name))),
        held_name_(operator_name),
        name_(utf8(held_name_)),
        inputs_(slots_of(called_.op, inputs, true)),
        outputs_(slots_of(called_.op, outputs, true)),
        values_(slots_of(called_.op, values, false)),
        required_(required),
        types_(types) {}

  nb::object examine(const nb::tuple& inputs) const {
    require_size(inputs, inputs_.size());
    bool requires_grad = false;
    for (std::size_t i = 0; i < inputs_.size(); ++i) {
      const nb::handle tensor = item(inputs, i);
      if (tensor.is_none() && i >= required_) continue;
      if (!is_plain(tensor.type())) return nb::none();
      requires_grad =
          requires_grad || is_true(PyObject_GetAttr(tensor.ptr(), words.requires_grad.ptr()));
    }
    return nb::bool_(requires_grad);
  }

  bool run(const nb::tuple& inputs, const nb::tuple& outputs, const nb::tuple& values,
           const nb::callable& allocate) const {
    require_size(inputs, inputs_.size());
    require_size(outputs, outputs_.size());
    require_size(values, values_.size());
    Structs structs;
    called_.op.initialise(structs);
    if (called_.linear != 0) structs.linear_options.op = called_.linear;
    Views views(name_, structs, inputs.size() + outputs.size() + 1);
    for (std::size_t i = 0; i < inputs_.size(); ++i) {
      if (!views.add(item(inputs, i), inputs_[i], true)) return false;
    }
    for (std::size_t i = 0; i < outputs_.size(); ++i) {
      if (!views.add(item(outputs, i), outputs_[i], false)) return false;
    }
    nb::object held;  // what set_field keeps, `values` does
    for (std::size_t i = 0; i < values_.size(); ++i) {
      const Slot& slot = values_[i];
      set_field(name_, *slot.field, at(structs, slot), held, item(values, i));
    }
    onchip_plan plan = ONCHIP_PLAN_INIT;
    check_without_gil([&] { return called_.op.plan(structs, plan); });  // may compile a kernel
    void* workspace = nullptr;
    nb::object memory;
    if (plan.workspace_bytes != 0) {
      memory = allocate(plan.workspace_bytes + plan.workspace_alignment - 1);
      Tensor view;
      if (!borrow_memory({name_, "workspace"}, memory, view)) {
        throw nb::type_error("the workspace is no tensor");
      }
      workspace = aligned_workspace(plan, view);
    }
    check_without_gil([&] {
      return called_.op.run(structs, plan, workspace, reinterpret_cast<void*>(views.stream()));
    });
    return true;
  }

 private:
  static void* at(Structs& structs, const Slot& slot) {
    return reinterpret_cast<std::byte*>(&structs) + slot.base;
  }

  // The tensors of one call, where they stay.
  class Views {
   public:
    Views(const char* name, Structs& structs, std::size_t most) : name_(name), structs_(structs) {
      tensors_.reserve(most);
    }

    // False: the call has to go another way.
    bool add(nb::handle tensor, const Slot& slot, bool input) {
      if (tensor.is_none()) return true;
      if (input && is_true(PyObject_CallMethodObjArgs(tensor.ptr(), words.is_neg.ptr(), nullptr))) {
        return false;  // its memory holds the negatives
      }
      Tensor& view = tensors_.emplace_back();
      if (!borrow_memory({name_, slot.field->name}, tensor, view)) return false;
      if (!view.layout_problem().empty()) return false;
      set_tensor(*slot.field, at(structs_, slot), view.view);
      return view.view.device_type != ONCHIP_DEVICE_CUDA ||
             find_stream(tensor, view.view.device_id);
    }

    std::uint64_t stream() const { return stream_; }

   private:
    bool find_stream(nb::handle tensor, std::int32_t device_id) {
      if (device_id_ == device_id) return true;
      if (device_id_ != kNone || !current_stream(tensor, device_id, stream_)) return false;
      device_id_ = device_id;
      return true;
    }

    static constexpr std::int32_t kNone = -1;
    const char* name_;
    Structs& structs_;
    std::vector<Tensor> tensors_;
    std::int32_t device_id_ = kNone;  // the GPU of those so far
    std::uint64_t stream_ = 0;
  };

  bool is_plain(nb::handle type) const {
    for (std::size_t i = 0; i < types_.size(); ++i) {
      if (item(types_, i).is(type)) return true;
    }
    return false;
  }

  Named called_;
  nb::object held_name_;
  const char* name_;  // of the operator as messages say it
  std::vector<Slot> inputs_, outputs_, values_;
  std::size_t required_;
  nb::tuple types_;
};

}  // namespace

void bind_torch_call(nb::module_& module) {
  words = {PyUnicode_InternFromString("is_neg"), PyUnicode_InternFromString("requires_grad")};
  if (!words.is_neg.is_valid() || !words.requires_grad.is_valid()) nb::raise_python_error();
  nb::class_<TorchCall>(
      module, "TorchCall", nb::is_final(), nb::sig("@typing.final\nclass TorchCall()"),
      "An operator's calls with PyTorch's tensors, in few steps: names once, then everything by\n"
      "position. Whatever is out of the ordinary is left to others.")
      .def(
          nb::init<const nb::str&, const nb::tuple&, const nb::tuple&, const nb::tuple&,
                   std::size_t, const nb::tuple&>(),
          nb::sig("def __init__(self, operator: str, inputs: tuple[str, ...], "
                  "outputs: tuple[str, ...], values: tuple[str, ...], required: int, "
                  "types: tuple[type, ...], /) -> None"),
          "Names as in the C struct and its options. The first `required` inputs may not be None.\n"
          "types: what tensors have to be, exactly.")
      .def("examine", &TorchCall::examine,
           nb::sig("def examine(self, inputs: tuple[object, ...], /) -> bool | None"),
           "Whether some tensor requires grad; None if some is not of the types.")
      .def("run", &TorchCall::run,
           nb::sig("def run(self, inputs: tuple[typing.Any, ...], "
                   "outputs: tuple[typing.Any, ...], values: tuple[typing.Any, ...], "
                   "allocate: collections.abc.Callable[[int], typing.Any], /) -> bool"),
           "Plans and computes, on PyTorch's current stream, without holding the GIL. False, and\n"
           "nothing is done, where the C library does not take a tensor's memory as it is.\n\n"
           "allocate: makes a workspace of so many bytes, as a tensor of bytes.");
}

}  // namespace onchip_python
