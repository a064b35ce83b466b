// onchip._native.Tensor: an onchip_tensor together with what keeps its memory alive.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "dlpack.hpp"
#include "errors.hpp"

namespace onchip_python {

struct DTypeRow {
  const char* name;
  std::int32_t dtype;  // onchip_dtype
  std::int64_t size;
  dlpack::TypeCode code;
};

// For "wanted": what an argument takes, of those there are.
const char* dtypes_wanted(const Place& place);

// NULL if there is no such one.
const DTypeRow* find_dtype(std::string_view name);
const DTypeRow* find_dtype(dlpack::DataType type);

// Gives memory back with the function that its kind needs.
using Owner = std::unique_ptr<void, void (*)(void*)>;

struct Tensor {
  onchip_tensor view{};
  std::int64_t byte_strides[ONCHIP_MAX_RANK] = {};
  Owner owner{nullptr, nullptr};
  bool has_data = true;  // false: a shape alone, for plans and explanations

  void set_rank(const Place& place, std::int64_t rank);

  // Fills both kinds of strides. Extents too large to address saturate; the C library refuses them.
  void set_row_major();

  // Fills strides in elements from byte_strides. Needs dtype and shape.
  void set_strides();

  // Why the C library would not take this layout; "" = it would.
  std::string layout_problem() const;
};

inline nb::handle tensor_type;

// `value` as a Tensor, NULL if it is something else. The type is final: no other type is one.
inline Tensor* as_tensor(nb::handle value) {
  // Tensor.__new__ alone makes an object without a Tensor in it.
  return value.type().is(tensor_type) && nb::inst_ready(value) ? nb::inst_ptr<Tensor>(value)
                                                               : nullptr;
}

// Called once, by the module.
void bind_tensor(nb::module_& module);

}  // namespace onchip_python
