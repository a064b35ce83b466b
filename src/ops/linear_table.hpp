// The operators of linear attention as rows of one table: engine, gates, and which tensors they
// take under which names and shapes. The contract check is driven by it; so is every message.
#pragma once

#include <onchip/onchip.h>

#include <cstdint>
#include <span>
#include <string_view>

#include "core/linear.hpp"

namespace onchip::ops {

// The fields of onchip_linear_tensors.
struct LinearRole {
  const onchip_tensor* onchip_linear_tensors::* given;
  RowsView LinearTensors::* view;
};

// R = the rows' axes: batch, T; packed total; of a step batch. A scan has channels for heads: Hv is
// D, Hk its groups, dk the numbers of a channel's state.
enum class LinearShape {
  key,              // [R, Hk, dk]
  value,            // [R, Hv, dv]
  scalar,           // [R, Hv]
  channel,          // [R, Hv, dk]
  slots,            // [R, Hv, M]
  key_rows,         // these three: with rows_per_token rows a token
  value_rows,       //
  scalar_rows,      //
  scalar_or_head,   // [R, Hv], or [Hv] for all rows
  head,             // [Hv]
  head_key,         // [Hv, dk]
  head_or_channel,  // [Hv] or [Hv, dv]
  shared,           // of a scan: [R, Hk, dk], or [R, dk] for all channels
};

struct LinearTensorRow {
  LinearRole role;
  const char* gradient_name;  // "d" and the tensor's own name
  LinearShape shape;
  bool optional = false;

  std::string_view name() const { return gradient_name + 1; }
};

// Options beyond those that every operator has.
enum LinearOptionBit : std::uint32_t {
  kTakesNormalize = 1u << 0,
  kTakesGateOptions = 1u << 1,  // gate, eps, detach_normalizer
  kTakesTimeStep = 1u << 2,     // dt_softplus
  kTakesTimeLimit = 1u << 6,    // dt_min, dt_max
  kTakesL2Norm = 1u << 3,       // qk_l2norm
  kTakesRawGates = 1u << 4,     // lower_bound, allow_neg_eigval, with A_log
  kTakesHouseholder = 1u << 5,  // num_householder
};

struct LinearRow {
  onchip_linear_operator op;
  const char* name;
  const char* forward;
  const char* backward;
  const char* step;
  LinearTraits traits;
  std::span<const LinearTensorRow> tensors;
  std::uint32_t options = 0;
  bool unit_scale = false;  // default scale 1 in place of dk^-1/2
  bool vk = false;          // default state layout
};

// Throws invalid_argument for a number that names no operator.
const LinearRow& linear_row(std::string_view op, onchip_linear_operator number);

}  // namespace onchip::ops
