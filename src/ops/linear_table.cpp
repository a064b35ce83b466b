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
constexpr LinearRole kA{&Given::a, &Views::a};
constexpr LinearRole kB{&Given::b, &Views::b};
constexpr LinearRole kU{&Given::u, &Views::u};
constexpr LinearRole kRate{&Given::rate, &Views::rate};
constexpr LinearRole kDtBias{&Given::dt_bias, &Views::dt_bias};
constexpr LinearRole kSkip{&Given::skip, &Views::skip};
constexpr LinearRole kZ{&Given::z, &Views::z};

constexpr LinearTensorRow kQueries{kQ, "dq", LinearShape::key};
constexpr LinearTensorRow kKeys{kK, "dk", LinearShape::key};
constexpr LinearTensorRow kValues{kV, "dv", LinearShape::value};

constexpr LinearTensorRow kBetas{kBeta, "dbeta", LinearShape::scalar};
constexpr LinearTensorRow kScalarDecays{kGate, "dlog_decay", LinearShape::scalar_or_head, true};
constexpr LinearTensorRow kChannelDecays{kGate, "dlog_decay", LinearShape::channel};

constexpr std::array kPlain = {kQueries, kKeys, kValues};
constexpr std::array kHeadDecay = {kQueries, kKeys, kValues,
                                   LinearTensorRow{kGate, "dlog_decay", LinearShape::head}};
constexpr std::array kScalarDecayTensors = {kQueries, kKeys, kValues, kScalarDecays};
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

constexpr std::array kGla = {kQueries, kKeys, kValues, kChannelDecays};
constexpr std::array kRwkv6 = {LinearTensorRow{kQ, "dr", LinearShape::key}, kKeys, kValues,
                               kChannelDecays, LinearTensorRow{kU, "du", LinearShape::head_key}};
constexpr std::array kHgrn2 = {kQueries, kValues, kChannelDecays};
constexpr std::array kDelta = {kQueries, kKeys, kValues, kBetas};
constexpr std::array kGatedDelta = {kQueries,
                                    kKeys,
                                    kValues,
                                    kScalarDecays,
                                    kBetas,
                                    LinearTensorRow{kRate, "dA_log", LinearShape::head, true},
                                    LinearTensorRow{kDtBias, "ddt_bias", LinearShape::head, true}};
constexpr std::array kKda = {kQueries,
                             kKeys,
                             kValues,
                             kChannelDecays,
                             kBetas,
                             LinearTensorRow{kRate, "dA_log", LinearShape::head, true},
                             LinearTensorRow{kDtBias, "ddt_bias", LinearShape::head_key, true}};
constexpr std::array kComba = {
    kQueries, kKeys, kValues, LinearTensorRow{kA, "dp", LinearShape::key}, kScalarDecays, kBetas};
constexpr std::array kGdn2 = {kQueries,
                              kKeys,
                              kValues,
                              kChannelDecays,
                              LinearTensorRow{kA, "db", LinearShape::channel},
                              LinearTensorRow{kB, "dw", LinearShape::value}};
constexpr std::array kProduct = {kQueries, LinearTensorRow{kK, "dk", LinearShape::key_rows},
                                 LinearTensorRow{kV, "dv", LinearShape::value_rows}, kScalarDecays,
                                 LinearTensorRow{kBeta, "dbeta", LinearShape::scalar_rows}};
constexpr LinearTensorRow kReadAgain{kA, "da", LinearShape::key};
constexpr LinearTensorRow kWriteAgain{kB, "db", LinearShape::key};
constexpr std::array kRwkv7 = {LinearTensorRow{kQ, "dr", LinearShape::key},
                               kChannelDecays,
                               kKeys,
                               kValues,
                               kReadAgain,
                               kWriteAgain};
constexpr std::array kIplr = {kQueries, kKeys, kValues, kReadAgain, kWriteAgain};

constexpr std::array kGsa = {kQueries, kKeys, kValues,
                             LinearTensorRow{kA, "ds", LinearShape::slots},
                             LinearTensorRow{kGate, "dlog_decay", LinearShape::slots}};

constexpr std::array kHgrn = {LinearTensorRow{kV, "dx", LinearShape::scalar},
                              LinearTensorRow{kGate, "dlog_decay", LinearShape::scalar}};
constexpr std::array kMamba1 = {LinearTensorRow{kV, "du", LinearShape::scalar},
                                LinearTensorRow{kGate, "ddelta", LinearShape::scalar},
                                LinearTensorRow{kRate, "dA", LinearShape::head_key},
                                LinearTensorRow{kK, "dB", LinearShape::shared},
                                LinearTensorRow{kQ, "dC", LinearShape::shared},
                                LinearTensorRow{kDtBias, "ddelta_bias", LinearShape::head, true},
                                LinearTensorRow{kSkip, "dD", LinearShape::head, true},
                                LinearTensorRow{kZ, "dz", LinearShape::scalar, true}};
constexpr std::array kRwkv4 = {LinearTensorRow{kV, "dv", LinearShape::scalar},
                               LinearTensorRow{kBeta, "dk", LinearShape::scalar},
                               LinearTensorRow{kGate, "dlog_decay", LinearShape::head},
                               LinearTensorRow{kU, "du", LinearShape::head}};

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

constexpr LinearTraits channel_decay(bool exclusive, KeyForm keys) {
  return {.engine = LinearEngine::channel_decay,
          .decay = DecayAxis::key,
          .gate = GateForm::log_decay,
          .keys = keys,
          .exclusive = exclusive};
}

constexpr LinearTraits delta_rule(DecayAxis decay, EraseForm erase, bool exclusive = false) {
  return {.engine = LinearEngine::delta_rule,
          .decay = decay,
          .gate = decay == DecayAxis::none ? GateForm::none : GateForm::log_decay,
          .erase = erase,
          .exclusive = exclusive};
}

constexpr LinearTraits dplr(DecayAxis decay) {
  return {.engine = LinearEngine::dplr,
          .decay = decay,
          .gate = decay == DecayAxis::none ? GateForm::none : GateForm::log_decay,
          .erase = EraseForm::given};
}

constexpr LinearTraits kGsaTraits = {.engine = LinearEngine::gated_slots,
                                     .decay = DecayAxis::slot,
                                     .gate = GateForm::log_decay,
                                     .erase = EraseForm::slots};

constexpr LinearTraits kHgrnTraits = {
    .engine = LinearEngine::scan, .decay = DecayAxis::scalar, .gate = GateForm::log_decay};

constexpr LinearTraits kMamba1Traits = {.engine = LinearEngine::scan,
                                        .decay = DecayAxis::key,
                                        .gate = GateForm::mamba2,
                                        .write = WriteForm::time_step,
                                        .read = ReadForm::mamba2};

constexpr LinearTraits kRwkv4Traits = {.engine = LinearEngine::scan,
                                       .decay = DecayAxis::scalar,
                                       .gate = GateForm::log_decay,
                                       .write = WriteForm::exp_gate,
                                       .read = ReadForm::quotient,
                                       .exclusive = true};

LinearRow row(onchip_linear_operator op, const char* name, const char* forward,
              const char* backward, const char* step, LinearTraits traits,
              std::span<const LinearTensorRow> tensors, std::uint32_t options = 0) {
  return {.op = op,
          .name = name,
          .forward = forward,
          .backward = backward,
          .step = step,
          .traits = traits,
          .tensors = tensors,
          .options = options};
}

// Numbers of onchip_linear_operator in order, from 1.
std::array<LinearRow, 21> make_rows() {
  std::array rows = {
      row(ONCHIP_LINEAR_ATTENTION, ONCHIP_LINEAR_NAMES("linear_attention"),
          scalar_decay(GateForm::none), kPlain, kTakesNormalize),
      row(ONCHIP_RETENTION, ONCHIP_LINEAR_NAMES("retention"), scalar_decay(GateForm::retention),
          kPlain),
      row(ONCHIP_LIGHTNING_ATTENTION, ONCHIP_LINEAR_NAMES("lightning_attention"),
          scalar_decay(GateForm::log_decay), kHeadDecay),
      row(ONCHIP_SIMPLE_GLA, ONCHIP_LINEAR_NAMES("simple_gla"), scalar_decay(GateForm::log_decay),
          kScalarDecayTensors),
      row(ONCHIP_MAMBA2, ONCHIP_LINEAR_NAMES("mamba2"), kMamba2Traits, kMamba2,
          kTakesTimeStep | kTakesTimeLimit),
      row(ONCHIP_MLSTM, ONCHIP_LINEAR_NAMES("mlstm"), kMlstmTraits, kMlstm,
          kTakesNormalize | kTakesGateOptions),
      row(ONCHIP_GLA, ONCHIP_LINEAR_NAMES("gla"), channel_decay(false, KeyForm::given), kGla),
      row(ONCHIP_RWKV6, ONCHIP_LINEAR_NAMES("rwkv6"), channel_decay(true, KeyForm::given), kRwkv6),
      row(ONCHIP_HGRN2, ONCHIP_LINEAR_NAMES("hgrn2"), channel_decay(false, KeyForm::complement),
          kHgrn2),
      row(ONCHIP_DELTA_RULE, ONCHIP_LINEAR_NAMES("delta_rule"),
          delta_rule(DecayAxis::none, EraseForm::keys), kDelta, kTakesL2Norm),
      row(ONCHIP_GATED_DELTA_RULE, ONCHIP_LINEAR_NAMES("gated_delta_rule"),
          delta_rule(DecayAxis::scalar, EraseForm::keys), kGatedDelta,
          kTakesL2Norm | kTakesRawGates),
      row(ONCHIP_KDA, ONCHIP_LINEAR_NAMES("kda"), delta_rule(DecayAxis::key, EraseForm::keys), kKda,
          kTakesL2Norm | kTakesRawGates),
      row(ONCHIP_COMBA, ONCHIP_LINEAR_NAMES("comba"),
          delta_rule(DecayAxis::scalar, EraseForm::other_keys, true), kComba, kTakesL2Norm),
      row(ONCHIP_GDN2, ONCHIP_LINEAR_NAMES("gdn2"), delta_rule(DecayAxis::key, EraseForm::channels),
          kGdn2, kTakesL2Norm),
      row(ONCHIP_GATED_DELTA_PRODUCT, ONCHIP_LINEAR_NAMES("gated_delta_product"),
          delta_rule(DecayAxis::scalar, EraseForm::keys), kProduct,
          kTakesL2Norm | kTakesHouseholder),
      row(ONCHIP_RWKV7, ONCHIP_LINEAR_NAMES("rwkv7"), dplr(DecayAxis::key), kRwkv7),
      row(ONCHIP_IPLR, ONCHIP_LINEAR_NAMES("iplr"), dplr(DecayAxis::none), kIplr),
      row(ONCHIP_GSA, ONCHIP_LINEAR_NAMES("gsa"), kGsaTraits, kGsa),
      row(ONCHIP_HGRN, ONCHIP_LINEAR_NAMES("hgrn"), kHgrnTraits, kHgrn),
      row(ONCHIP_MAMBA1, ONCHIP_LINEAR_NAMES("mamba1"), kMamba1Traits, kMamba1, kTakesTimeStep),
      row(ONCHIP_RWKV4, ONCHIP_LINEAR_NAMES("rwkv4"), kRwkv4Traits, kRwkv4),
  };
  const auto of = [&rows](onchip_linear_operator op) -> LinearRow& {
    return rows[static_cast<std::size_t>(op - 1)];
  };
  of(ONCHIP_MAMBA2).unit_scale = true;
  of(ONCHIP_MAMBA2).vk = true;
  of(ONCHIP_RWKV7).unit_scale = true;
  for (const onchip_linear_operator scan : {ONCHIP_HGRN, ONCHIP_MAMBA1, ONCHIP_RWKV4}) {
    of(scan).unit_scale = true;
  }
  of(ONCHIP_MAMBA1).vk = true;
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
