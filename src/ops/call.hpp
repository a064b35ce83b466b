// What the contract checks of all operators share: the tensors of one call with their names,
// lengths, flags, and what dispatch learns from a call.
#pragma once

#include <onchip/onchip.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/rows.hpp"
#include "core/tensor.hpp"
#include "ops/fingerprint.hpp"

namespace onchip::ops {

// What dispatch needs besides the problem.
struct CallFacts {
  std::string_view op;            // for messages; static storage
  std::string forced_backend;     // "" = pick
  std::uint64_t fingerprint = 0;  // of everything a plan may depend on
};

// Tensors of one call, for the checks that concern all of them. Names have static storage.
class Call {
 public:
  explicit Call(std::string_view op) : op_(op) {}

  TensorView input(std::string_view name, const onchip_tensor* tensor);
  TensorView output(std::string_view name, const onchip_tensor* tensor);
  // A view of memory that another argument's view covers: it takes no part in check_aliasing.
  TensorView covered(std::string_view name, const onchip_tensor* tensor);

  // All on `device`; lengths and the random state may be in host memory.
  void check_devices(Device device, std::string_view owner) const;

  // Outputs keep apart from each other, from themselves and from every input.
  void check_aliasing() const;

  std::string_view op() const { return op_; }

  Fingerprint fingerprint;

 private:
  struct Named {
    std::string_view name;
    TensorView view;
  };

  std::string_view op_;
  std::vector<Named> inputs_;
  std::vector<Named> outputs_;
  std::vector<Named> covered_;
};

std::string number_text(double value);

std::int32_t flag(std::string_view op, std::string_view name, std::int32_t value);

// The multiple of `step` > 0 nearest to `value` >= 1, and at least one step; the larger of two that
// are equally near.
std::int64_t nearest_multiple(std::int64_t value, std::int64_t step);

// `what` names a size of the tensor `name`.
void require_at_most(std::string_view op, std::string_view name, std::string_view what,
                     std::int64_t size, std::int64_t most);

// Of two arguments that come together, given or not.
void require_both(std::string_view op, std::string_view first, bool has_first,
                  std::string_view second, bool has_second);

// "" for NULL.
std::string backend_name(Call& call, const char* name);

inline bool on_host(const TensorView& tensor) { return tensor.device == Device{}; }

// Stride of an axis in bytes.
inline std::int64_t bytes(const TensorView& tensor, std::size_t axis) {
  return tensor.strides[axis] * tensor.element_size();
}

// [batch, row, head, dim], or [row, head, dim] where packed.
RowsView rows_view(const TensorView& tensor, bool packed);

// cu_seqlens or seqlens: integers of rank 1, or absent.
TensorView read_lengths(Call& call, std::string_view name, const onchip_tensor* tensor);

// Values of host-side cu_seqlens: from >= 0 up to at most `total`, never decreasing.
void check_cu_seqlens(const Call& call, std::string_view name, const TensorView& tensor,
                      std::int64_t total);

// Values of host-side seqlens: 0 up to the slot's rows. `cu_seqlens` may be absent.
void check_seqlens(const Call& call, std::string_view name, const TensorView& lengths,
                   const TensorView& cu_seqlens, std::int64_t slot);

// Values of host-side state_indices: slots below `slots`, each at most once, or -1.
void check_state_indices(const Call& call, const TensorView& indices, std::int64_t slots);

}  // namespace onchip::ops
