// Decays of channels in a chunk of delta_rule: from log decays or raw gates, and gradients back.
#pragma once

#include "cpu/linear_delta_tiles.hpp"
#include "cpu/logistic.hpp"

namespace onchip::cpu::ONCHIP_CPU_ISA {
namespace {

// exp(A_log) may be beyond T; its largest number leaves 0 what it multiplies if that is 0.
template <typename T>
T gate_factor(const DeltaRawGates& raw) {
  constexpr double kLargest = sizeof(T) == sizeof(float) ? double{__FLT_MAX__} : __DBL_MAX__;
  return static_cast<T>(raw.factor < kLargest ? raw.factor : kLargest);
}

template <typename T>
void load_dt_bias(const DeltaRawGates& raw, const DeltaTiles<T>& t) {
  fill_zeros(t.dt_bias, t.key_columns);
  if (raw.dt_bias.data == nullptr) return;
  load_any_tile<T>(raw.dt_bias, raw.dt_bias_dtype, t.dk, 1, 1, t.dt_bias, t.key);
}

// alpha of the chunk's rows; 0 where a log decay resets the channel.
template <typename T>
void load_channel_decays(const DeltaChunk& chunk, DeltaTiles<T>& t, std::int64_t padded) {
  using S = Simd<T>;
  const std::int64_t rows = chunk.gates->rows;
  load_any_tile<T>(chunk.gate, chunk.gate_dtype, t.dk, rows, padded, t.alpha, t.key);
  const auto decay = [](Vec<T> log_decay) {
    const auto reset = S::less(log_decay, S::broadcast(static_cast<T>(kSegmentLogDecay)));
    return S::select(reset, Vec<T>{}, power<T>(log_decay * S::broadcast(kLog2E<T>)));
  };
  const auto each = [&](auto&& log_decay) {
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t d = 0; d < t.key_columns; d += kLanes<T>) {
        T* at = t.alpha + i * t.key + d;
        S::store(at, decay(log_decay(S::load(at), d)));
      }
    }
  };
  if (chunk.raw == nullptr) {
    each([](Vec<T> x, std::int64_t) { return x; });
    return;
  }
  load_dt_bias<T>(*chunk.raw, t);
  const Vec<T> factor = S::broadcast(gate_factor<T>(*chunk.raw));
  const Vec<T> bound = S::broadcast(static_cast<T>(chunk.raw->lower_bound));
  if (chunk.raw->bounded) {
    each([&](Vec<T> x, std::int64_t d) {
      Vec<T> slope{};
      return bound * logistic<T>(factor * (x + S::load(t.dt_bias + d)), slope);
    });
  } else {
    each([&](Vec<T> x, std::int64_t d) {
      return -factor * softplus<T>(x + S::load(t.dt_bias + d));
    });
  }
}

// From the gradients of log decays, [rows][dk], to those of what they are made of. A gradient of 0
// stays 0 whatever the gate is.
template <typename T>
void pull_raw_gates(const DeltaBackwardChunk& chunk, DeltaTiles<T>& t, T* d_alpha) {
  using S = Simd<T>;
  const DeltaChunk& forward = chunk.forward;
  const DeltaRawGates& raw = *forward.raw;
  const Vec<T> factor = S::broadcast(gate_factor<T>(raw));
  const Vec<T> bound = S::broadcast(static_cast<T>(raw.lower_bound));
  const Vec<T> linear = S::broadcast(static_cast<T>(kSoftplusLinear));
  UnitRow row = forward.gate;
  for (std::int64_t i = 0; i < forward.gates->rows; ++i, row.data += row.row_stride) {
    load_any_tile<T>(row, forward.gate_dtype, t.dk, 1, 1, t.running, t.key);
    T* gradient = d_alpha + i * t.key;
    Vec<T> d_rate{};
    for (std::int64_t d = 0; d < t.key_columns; d += kLanes<T>) {
      const Vec<T> x = S::load(t.running + d) + S::load(t.dt_bias + d);
      const Vec<T> d_log = S::load(gradient + d);
      const auto none = S::equal(d_log, Vec<T>{});
      Vec<T> slope{};
      Vec<T> d_gate{};
      Vec<T> d_factor{};
      if (raw.bounded) {
        logistic<T>(factor * x, slope);
        d_gate = d_log * bound * slope * factor;
        d_factor = d_gate * x;
      } else {
        const Vec<T> of_x = logistic<T>(x, slope);
        const Vec<T> rise = S::select(S::less(linear, x), S::broadcast(T{1}), of_x);
        d_gate = -d_log * factor * rise;
        d_factor = -d_log * factor * softplus<T>(x);
      }
      S::store(gradient + d, S::select(none, Vec<T>{}, d_gate));
      d_rate = d_rate + S::select(none, Vec<T>{}, d_factor);
    }
    *chunk.d_rate += static_cast<double>(sum_of_lanes<T>(d_rate));
    for (std::int64_t d = 0; d < t.dk; ++d) {
      chunk.d_dt_bias[d] += static_cast<double>(gradient[d]);
    }
  }
}

}  // namespace
}  // namespace onchip::cpu::ONCHIP_CPU_ISA
