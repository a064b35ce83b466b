// The operators of the C library as tables: which fields their argument structs have, and how they
// are planned and run.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "errors.hpp"

namespace onchip_python {

enum class Kind : std::uint8_t {
  kTensor,
  kReal,
  kRealOrNone,
  kCount,
  kCountOrNone,
  kFlag,
  kFlagOrNone,
  kAlignment,
  kPrecision,
  kStateLayout,
  kInputGate,
  kConvActivation,
  kActivation,
  kName
};

// Whether None leaves a field at its default.
constexpr bool takes_none(Kind kind) {
  switch (kind) {
    case Kind::kTensor:
    case Kind::kRealOrNone:
    case Kind::kCountOrNone:
    case Kind::kFlagOrNone:
    case Kind::kPrecision:
    case Kind::kConvActivation:
    case Kind::kActivation:
    case Kind::kName:
      return true;
    case Kind::kReal:
    case Kind::kCount:
    case Kind::kFlag:
    case Kind::kAlignment:
    case Kind::kStateLayout:
    case Kind::kInputGate:
      return false;
  }
  return false;
}

struct Field {
  const char* name;
  Kind kind;
  std::size_t offset;
  const char* argument = nullptr;  // the one in Python that it is a part of
  nb::handle key = {};             // `name` as an interned Python string, kept for ever
};

union Args {
  std::size_t struct_size;
  onchip_attention_forward_args forward;
  onchip_attention_backward_args backward;
  onchip_attention_merge_args merge;
  onchip_attention_decode_args decode;
  onchip_linear_forward_args linear_forward;
  onchip_linear_backward_args linear_backward;
  onchip_linear_step_args linear_step;
  onchip_conv_forward_args conv_forward;
  onchip_conv_backward_args conv_backward;
  onchip_conv_step_args conv_step;
  onchip_norm_forward_args norm_forward;
  onchip_norm_backward_args norm_backward;
};

// Everything that a call's args point to.
struct Structs {
  Args args{};
  onchip_attention_options options = ONCHIP_ATTENTION_OPTIONS_INIT;
  onchip_linear_options linear_options = ONCHIP_LINEAR_OPTIONS_INIT;
  onchip_linear_tensors inputs = ONCHIP_LINEAR_TENSORS_INIT;
  onchip_linear_tensors gradients = ONCHIP_LINEAR_TENSORS_INIT;
  onchip_conv_options conv_options = ONCHIP_CONV_OPTIONS_INIT;
  onchip_norm_options norm_options = ONCHIP_NORM_OPTIONS_INIT;
};

// One struct of an operator.
struct Section {
  std::span<Field> fields;
  std::size_t offset;  // in Structs
  bool outputs;        // some of its tensors may be
};

// Of all sections together, at most.
constexpr std::size_t kMostFields = 64;

struct Operator {
  onchip_operator number;
  const char* name;
  std::span<const Section> sections;
  void (*initialise)(Structs& structs);
  onchip_status (*plan)(const Structs& structs, onchip_plan& plan);
  onchip_status (*run)(const Structs& structs, const onchip_plan& plan, void* workspace,
                       void* stream);
};

// "mamba2_forward" is linear_forward with the number of mamba2; others have no number.
struct Named {
  const Operator& op;
  std::int32_t linear = 0;
};

// Raises a ValueError where there is none of that name.
Named named(std::string_view name);

// Called once, by the module, before any field is looked at by its key.
void intern_field_names();

}  // namespace onchip_python
