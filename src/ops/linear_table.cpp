#include "ops/linear_table.hpp"

#include <array>
#include <string>

#include "core/status.hpp"

namespace onchip::ops {

namespace {

using Given = onchip_linear_tensors;
using Views = LinearTensors;

constexpr LinearRole kQ{&Given::q, &Views::q};
constexpr LinearRole kK{&Given::k, &Views::k};
constexpr LinearRole kV{&Given::v, &Views::v};
constexpr LinearRole kGate{&Given::gate, &Views::gate};
constexpr LinearRole kBeta{&Given::beta, &Views::beta};
constexpr LinearRole kRate{&Given::A, &Views::rate};
constexpr LinearRole kDtBias{&Given::dt_bias, &Views::dt_bias};
constexpr LinearRole kSkip{&Given::D, &Views::skip};
constexpr LinearRole kZ{&Given::z, &Views::z};

constexpr LinearTensorRow kQueries{kQ, "dq", LinearShape::key};
constexpr LinearTensorRow kKeys{kK, "dk", LinearShape::key};
constexpr LinearTensorRow kValues{kV, "dv", LinearShape::value};

constexpr std::array kPlain = {kQueries, kKeys, kValues};
constexpr std::array kHeadDecay = {kQueries, kKeys, kValues,
                                   LinearTensorRow{kGate, "dlog_decay", LinearShape::head}};
constexpr std::array kScalarDecayTensors = {
    kQueries, kKeys, kValues,
    LinearTensorRow{kGate, "dlog_decay", LinearShape::scalar_or_head, true}};
constexpr std::array kMamba2 = {LinearTensorRow{kQ, "dC", LinearShape::key},
                                LinearTensorRow{kK, "dB", LinearShape::key},
                                LinearTensorRow{kV, "dx", LinearShape::value},
                                LinearTensorRow{kGate, "ddt", LinearShape::scalar},
                                LinearTensorRow{kRate, "dA", LinearShape::head},
                                LinearTensorRow{kDtBias, "ddt_bias", LinearShape::head, true},
                                LinearTensorRow{kSkip, "dD", LinearShape::head_or_channel, true},
                                LinearTensorRow{kZ, "dz", LinearShape::value, true}};
constexpr std::array kMlstm = {kQueries, kKeys, kValues,
                               LinearTensorRow{kBeta, "di", LinearShape::scalar},
                               LinearTensorRow{kGate, "df", LinearShape::scalar}};

#define ONCHIP_LINEAR_NAMES(name) name, name "_forward", name "_backward", name "_step"

constexpr LinearTraits scalar_decay(GateForm gate) {
  return {.engine = LinearEngine::scalar_decay,
          .decay = gate == GateForm::none ? DecayAxis::none : DecayAxis::scalar,
          .gate = gate};
}

constexpr LinearTraits kMamba2Traits = {.engine = LinearEngine::scalar_decay,
                                        .decay = DecayAxis::scalar,
                                        .gate = GateForm::mamba2,
                                        .write = WriteForm::time_step,
                                        .read = ReadForm::mamba2};

// The contract chooses among mlstm's forms by its options.
constexpr LinearTraits kMlstmTraits = {.engine = LinearEngine::scalar_decay,
                                       .decay = DecayAxis::scalar,
                                       .gate = GateForm::mlstm,
                                       .write = WriteForm::exp_gate,
                                       .read = ReadForm::mlstm};

LinearRow row(onchip_linear_operator op, const char* name, const char* forward,
              const char* backward, const char* step, LinearTraits traits,
              std::span<const LinearTensorRow> tensors) {
  return {.op = op,
          .name = name,
          .forward = forward,
          .backward = backward,
          .step = step,
          .traits = traits,
          .tensors = tensors};
}

// Numbers of onchip_linear_operator in order, from 1.
std::array<LinearRow, 6> make_rows() {
  std::array rows = {
      row(ONCHIP_LINEAR_ATTENTION, ONCHIP_LINEAR_NAMES("linear_attention"),
          scalar_decay(GateForm::none), kPlain),
      row(ONCHIP_RETENTION, ONCHIP_LINEAR_NAMES("retention"), scalar_decay(GateForm::retention),
          kPlain),
      row(ONCHIP_LIGHTNING_ATTENTION, ONCHIP_LINEAR_NAMES("lightning_attention"),
          scalar_decay(GateForm::log_decay), kHeadDecay),
      row(ONCHIP_SIMPLE_GLA, ONCHIP_LINEAR_NAMES("simple_gla"), scalar_decay(GateForm::log_decay),
          kScalarDecayTensors),
      row(ONCHIP_MAMBA2, ONCHIP_LINEAR_NAMES("mamba2"), kMamba2Traits, kMamba2),
      row(ONCHIP_MLSTM, ONCHIP_LINEAR_NAMES("mlstm"), kMlstmTraits, kMlstm),
  };
  const auto of = [&rows](onchip_linear_operator op) -> LinearRow& {
    return rows[static_cast<std::size_t>(op - 1)];
  };
  of(ONCHIP_LINEAR_ATTENTION).options = kTakesNormalize;
  of(ONCHIP_MAMBA2).options = kTakesTimeStep;
  of(ONCHIP_MAMBA2).unit_scale = true;
  of(ONCHIP_MAMBA2).vk = true;
  of(ONCHIP_MLSTM).options = kTakesNormalize | kTakesGateOptions;
  return rows;
}

#undef ONCHIP_LINEAR_NAMES

}  // namespace

const LinearRow& linear_row(std::string_view op, onchip_linear_operator number) {
  static const auto rows = make_rows();
  if (number < 1 || number > static_cast<onchip_linear_operator>(rows.size())) {
    throw_invalid(op, "options.op", std::to_string(number),
                  "an onchip_linear_operator (1.." + std::to_string(rows.size()) + ")");
  }
  return rows[static_cast<std::size_t>(number - 1)];
}

}  // namespace onchip::ops
