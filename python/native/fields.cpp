#include "fields.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>

#include "tensor.hpp"

namespace onchip_python {

namespace {

double real_of(const Place& place, nb::handle value) {
  if (!is_scalar(value)) refuse(place, describe_value(value), "a number");
  // Not nb::try_cast: that would also swallow a KeyboardInterrupt in somebody's __float__.
  const double number = PyFloat_AsDouble(value.ptr());
  if (number == -1 && PyErr_Occurred() != nullptr) {
    const bool is_large = PyErr_ExceptionMatches(PyExc_OverflowError) != 0;
    drop_error();
    refuse(place, describe_value(value), is_large ? "a finite number" : "a number");
  }
  // The C struct marks an absent scale by NaN; here that mark is None.
  if (std::isnan(number)) refuse(place, describe_value(value), "a number that is not NaN");
  return number;
}

// True, False, NumPy's bool, and the integers 0 and 1.
std::int32_t flag_of(const Place& place, nb::handle value) {
  if (PyBool_Check(value.ptr()) || is_numpy_bool(value)) return nb::bool_(value) ? 1 : 0;
  if (is_scalar(value)) {
    const nb::object integer = nb::steal(PyNumber_Index(value.ptr()));
    int overflow = 0;
    if (integer.is_valid()) {
      const long number = PyLong_AsLongAndOverflow(integer.ptr(), &overflow);
      if (overflow == 0 && (number == 0 || number == 1)) return static_cast<std::int32_t>(number);
    } else {
      drop_error();
    }
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

template <typename T>
void store(const Field& field, void* base, T value) {
  std::memcpy(static_cast<std::byte*>(base) + field.offset, &value, sizeof(value));
}

}  // namespace

void set_tensor(const Field& field, void* base, const onchip_tensor& view) {
  store(field, base, &view);
}

void set_field(const char* op, const Field& field, void* base, nb::object& held, nb::handle value) {
  static constexpr std::array<std::string_view, 2> kAlignments = {"bottom_right", "top_left"};
  static constexpr std::array<std::string_view, 1> kPrecisions = {"tf32"};
  static constexpr std::array<std::string_view, 2> kStateLayouts = {"kv", "vk"};
  static constexpr std::array<std::string_view, 1> kConvActivations = {"silu"};
  static constexpr std::array<std::string_view, 2> kActivations = {"silu", "sigmoid"};
  static constexpr std::array<std::string_view, 2> kInputGates = {"exp", "sigmoid"};
  const Place place{op, field.argument == nullptr ? field.name : field.argument};
  if (value.is_none() && takes_none(field.kind)) return;
  const auto put = [&](auto number) { store(field, base, number); };
  switch (field.kind) {
    case Kind::kTensor: {
      const Tensor* tensor = as_tensor(value);
      if (tensor == nullptr) {
        throw nb::type_error((std::string(field.name) + ": wanted a Tensor").c_str());
      }
      set_tensor(field, base, tensor->view);
      held = nb::borrow(value);
      return;
    }
    case Kind::kReal:
    case Kind::kRealOrNone:
      return put(real_of(place, value));
    case Kind::kCount:
    case Kind::kCountOrNone:
      return put(count_of(place, value));
    case Kind::kFlag:
    case Kind::kFlagOrNone:
      return put(flag_of(place, value));
    case Kind::kAlignment:
      return put(choice_of(place, value, kAlignments, ONCHIP_BOTTOM_RIGHT,
                           "\"bottom_right\" or \"top_left\""));
    case Kind::kPrecision:
      return put(choice_of(place, value, kPrecisions, ONCHIP_PRECISION_TF32, "None or \"tf32\""));
    case Kind::kStateLayout:
      return put(choice_of(place, value, kStateLayouts, ONCHIP_STATE_KV, "\"kv\" or \"vk\""));
    case Kind::kInputGate:
      return put(choice_of(place, value, kInputGates, ONCHIP_GATE_EXP, "\"exp\" or \"sigmoid\""));
    case Kind::kConvActivation:
      return put(
          choice_of(place, value, kConvActivations, ONCHIP_ACTIVATION_SILU, "None or \"silu\""));
    case Kind::kActivation:
      return put(choice_of(place, value, kActivations, ONCHIP_ACTIVATION_SILU,
                           "None, \"silu\" or \"sigmoid\""));
    case Kind::kName:
      put(name_of(place, value));
      held = nb::borrow(value);
      return;
  }
}

}  // namespace onchip_python
