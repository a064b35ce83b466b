#include "ops/call.hpp"

#include <algorithm>
#include <cstdio>
#include <limits>

#include "core/status.hpp"

namespace onchip::ops {

TensorView Call::input(std::string_view name, const onchip_tensor* tensor) {
  TensorView view = checked_view(op_, name, tensor);
  fingerprint.add(tensor);
  if (view.present()) inputs_.push_back({name, view});
  return view;
}

TensorView Call::output(std::string_view name, const onchip_tensor* tensor) {
  TensorView view = checked_view(op_, name, tensor);
  fingerprint.add(tensor);
  if (view.present()) outputs_.push_back({name, view});
  return view;
}

TensorView Call::covered(std::string_view name, const onchip_tensor* tensor) {
  TensorView view = checked_view(op_, name, tensor);
  fingerprint.add(tensor);
  if (view.present()) covered_.push_back({name, view});
  return view;
}

void Call::check_devices(Device device, std::string_view owner) const {
  for (const auto* list : {&inputs_, &outputs_, &covered_}) {
    for (const Named& tensor : *list) {
      const bool host_allowed = tensor.name.starts_with("cu_seqlens") ||
                                tensor.name.starts_with("seqlens") || tensor.name == "dropout_rng";
      if (tensor.view.device == device) continue;
      if (host_allowed && tensor.view.device == Device{}) continue;
      throw_invalid(op_, tensor.name, device_text(tensor.view.device),
                    std::string(owner) + "'s device " + device_text(device) +
                        (host_allowed ? " or cpu" : ""));
    }
  }
}

void Call::check_aliasing() const {
  std::vector<Footprint> prints;
  prints.reserve(inputs_.size() + outputs_.size());
  for (const Named& tensor : outputs_) {
    require_no_self_overlap(op_, tensor.name, tensor.view);
    prints.push_back(footprint(tensor.view));
  }
  for (const Named& tensor : inputs_) prints.push_back(footprint(tensor.view));
  for (std::size_t i = 0; i < outputs_.size(); ++i) {
    for (std::size_t j = i + 1; j < prints.size(); ++j) {
      if (!may_overlap(prints[i], prints[j])) continue;
      const std::string_view other =
          j < outputs_.size() ? outputs_[j].name : inputs_[j - outputs_.size()].name;
      throw_invalid(op_, outputs_[i].name, "memory it shares with " + std::string(other),
                    "an output apart from every other tensor");
    }
  }
}

std::string number_text(double value) {
  char buffer[32];
  std::snprintf(buffer, sizeof(buffer), "%.9g", value);
  return buffer;
}

std::int32_t flag(std::string_view op, std::string_view name, std::int32_t value) {
  if (value != 0 && value != 1) throw_invalid(op, name, std::to_string(value), "0 or 1");
  return value;
}

std::int64_t nearest_multiple(std::int64_t value, std::int64_t step) {
  const std::int64_t over = value % step;
  const std::int64_t below = value - over;
  const bool up = below == 0 || over >= step - over;
  // No type holds a multiple above the largest numbers: then the one below.
  return up && below <= std::numeric_limits<std::int64_t>::max() - step ? below + step : below;
}

void require_at_most(std::string_view op, std::string_view name, std::string_view what,
                     std::int64_t size, std::int64_t most) {
  if (size <= most) return;
  throw_invalid(op, name, std::string(what) + " = " + std::to_string(size),
                std::string(what) + " at most " + std::to_string(most), std::to_string(most));
}

void require_both(std::string_view op, std::string_view first, bool has_first,
                  std::string_view second, bool has_second) {
  if (has_first == has_second) return;
  const std::string_view given = has_first ? first : second;
  const std::string_view missing = has_first ? second : first;
  throw_invalid(op, missing, std::string(given) + " without " + std::string(missing),
                "both or neither");
}

std::string backend_name(Call& call, const char* name) {
  std::string text = name == nullptr ? "" : name;
  call.fingerprint.add(std::string_view(text));
  return text;
}

RowsView rows_view(const TensorView& tensor, bool packed) {
  RowsView view;
  if (!tensor.present()) return view;
  const std::size_t first = packed ? 0 : 1;
  view.data = tensor.data;
  view.dtype = tensor.dtype;
  view.batch_stride = packed ? 0 : bytes(tensor, 0);
  view.row_stride = bytes(tensor, first);
  view.head_stride = bytes(tensor, first + 1);
  view.wanted = true;
  return view;
}

void check_cu_seqlens(const Call& call, std::string_view name, const TensorView& tensor,
                      std::int64_t total) {
  if (!on_host(tensor)) return;
  std::int64_t previous = 0;
  for (std::int64_t n = 0; n < tensor.shape[0]; ++n) {
    const std::int64_t value = load_integer(tensor.at(n), tensor.dtype);
    if (value < previous || value > total) {
      throw_invalid(call.op(), std::string(name) + "[" + std::to_string(n) + "]",
                    std::to_string(value),
                    "at least " + std::to_string(previous) + " and at most the " +
                        std::to_string(total) + " rows there are");
    }
    previous = value;
  }
}

void check_seqlens(const Call& call, std::string_view name, const TensorView& lengths,
                   const TensorView& cu_seqlens, std::int64_t slot) {
  if (!lengths.present() || !on_host(lengths)) return;
  if (cu_seqlens.present() && !on_host(cu_seqlens)) return;
  for (std::int64_t n = 0; n < lengths.shape[0]; ++n) {
    const std::int64_t value = load_integer(lengths.at(n), lengths.dtype);
    const std::int64_t room = cu_seqlens.present()
                                  ? load_integer(cu_seqlens.at(n + 1), cu_seqlens.dtype) -
                                        load_integer(cu_seqlens.at(n), cu_seqlens.dtype)
                                  : slot;
    if (value < 0 || value > room) {
      throw_invalid(call.op(), std::string(name) + "[" + std::to_string(n) + "]",
                    std::to_string(value), "0 to the slot's " + std::to_string(room) + " rows");
    }
  }
}

TensorView read_lengths(Call& call, std::string_view name, const onchip_tensor* tensor) {
  TensorView view = call.input(name, tensor);
  if (!view.present()) return view;
  require_dtype(call.op(), name, view, {DType::i32, DType::i64});
  if (view.rank != 1) {
    throw_invalid(call.op(), name, "shape " + shape_text(view), "rank 1");
  }
  return view;
}

void check_state_indices(const Call& call, const TensorView& indices, std::int64_t slots) {
  if (!on_host(indices)) return;
  std::vector<std::int64_t> used;
  for (std::int64_t n = 0; n < indices.shape[0]; ++n) {
    const std::int64_t slot = load_integer(indices.at(n), indices.dtype);
    if (slot < -1 || slot >= slots) {
      throw_invalid(call.op(), "state_indices[" + std::to_string(n) + "]", std::to_string(slot),
                    "a slot below " + std::to_string(slots) + ", or -1 to skip the row");
    }
    if (slot >= 0) used.push_back(slot);
  }
  std::sort(used.begin(), used.end());
  const auto twice = std::adjacent_find(used.begin(), used.end());
  if (twice != used.end()) {
    throw_invalid(call.op(), "state_indices", "slot " + std::to_string(*twice) + " twice",
                  "each slot once: a step writes it in place");
  }
}

}  // namespace onchip::ops
