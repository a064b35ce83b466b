// What becomes of a legal call: the fields that are replaced.
#include "support/fuzzed_attention.hpp"

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "support/attention_call.hpp"
#include "support/call.hpp"
#include "support/fuzzed.hpp"

namespace onchip::test {

// ---- mutations ----------------------------------------------------------------------------------

std::int64_t FuzzedCall::any_integer() {
  return random_.one_of<std::int64_t>({-2, -1, 0, 1, 2, 3, 7, 8, 16, 100, 65535, INT32_MAX,
                                       INT32_MIN, std::int64_t{1} << 40, INT64_MAX, INT64_MIN,
                                       static_cast<std::int64_t>(random_.bits())});
}

double FuzzedCall::any_double() {
  return random_.one_of({0.0, -0.0, 1.0, -1.0, 0.5, 0.999999, 0.99999999, 1e-300, 1e300, 7.5,
                         std::numeric_limits<double>::infinity(),
                         -std::numeric_limits<double>::infinity(),
                         std::numeric_limits<double>::quiet_NaN()});
}

FuzzedCall::Slot& FuzzedCall::any_slot() {
  return slots_[static_cast<std::size_t>(
      random_.integer(0, static_cast<std::int64_t>(slots_.size()) - 1))];
}

void FuzzedCall::mutate() {
  switch (random_.integer(0, 9)) {
    case 0:
    case 1:
    case 2:
    case 3:
      return mutate_tensor(any_slot());
    case 4:
    case 5:
    case 6:
      return op_ == Op::merge ? mutate_tensor(any_slot()) : mutate_option();
    case 7:
      return mutate_values();
    case 8:
      return mutate_presence();
    default:
      story_ += "struct ";
      return structs_.mutate(random_);
  }
}

void FuzzedCall::mutate_tensor(Slot& slot) {
  onchip_tensor& t = slot.tensor;
  slot.changed = true;
  const auto axis = [&] {
    return random_.integer(0, std::clamp<std::int64_t>(t.rank, 1, ONCHIP_MAX_RANK) - 1);
  };
  story_ += slot.name;
  switch (random_.integer(0, 9)) {
    case 0:
      t.dtype =
          random_.chance(0.7) ? static_cast<std::int32_t>(random_.integer(0, 9)) : any_int32();
      story_ += ".dtype ";
      break;
    case 1:
      t.rank =
          random_.chance(0.7) ? static_cast<std::int32_t>(random_.integer(-1, 7)) : any_int32();
      story_ += ".rank ";
      break;
    case 2:
      (random_.chance(0.5) ? t.device_type : t.device_id) =
          random_.chance(0.7) ? static_cast<std::int32_t>(random_.integer(-1, 3)) : any_int32();
      story_ += ".device ";
      break;
    case 3:
    case 4:
      t.shape[axis()] = random_.chance(0.6) ? random_.integer(0, 6) : any_integer();
      story_ += ".shape ";
      break;
    case 5:
    case 6:
      t.strides[axis()] = random_.chance(0.6) ? random_.integer(-30, 60) : any_integer();
      story_ += ".stride ";
      break;
    case 7:
      t.data = nullptr;
      story_ += ".data = NULL ";
      break;
    case 8:
      t.data = reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(t.data) +
                                       static_cast<std::uintptr_t>(random_.integer(-9, 9)));
      story_ += ".data shifted ";
      break;
    default:
      t.data = any_slot().tensor.data;
      story_ += ".data shared ";
      break;
  }
}

void FuzzedCall::mutate_option() {
  story_ += "option ";
  switch (random_.integer(0, 13)) {
    case 0:
      story_ += "scale ";
      options_.scale = any_double();
      break;
    case 1:
      story_ += "softcap ";
      options_.softcap = any_double();
      break;
    case 2:
      story_ += "dropout_p ";
      options_.dropout_p = any_double();
      break;
    case 3:
      story_ += "window_left ";
      options_.window_left = any_integer();
      break;
    case 4:
      story_ += "window_right ";
      options_.window_right = any_integer();
      break;
    case 5:
      story_ += "max_seqlen_q ";
      options_.max_seqlen_q = any_integer();
      break;
    case 6:
      story_ += "max_seqlen_kv ";
      options_.max_seqlen_kv = any_integer();
      break;
    case 7:
      story_ += "causal ";
      options_.causal = any_int32();
      break;
    case 8:
      story_ += "alignment ";
      options_.alignment = any_int32();
      break;
    case 9:
      story_ += "precision ";
      options_.precision = any_int32();
      break;
    case 10:
      story_ += "deterministic ";
      options_.deterministic = any_int32();
      break;
    case 11:
      story_ += "batch_invariant ";
      options_.batch_invariant = any_int32();
      break;
    case 12:
      story_ += "check ";
      options_.check = any_int32();
      break;
    default:
      static const std::string endless(10000, 'x');
      options_.backend = merge_.backend =
          random_.one_of<const char*>({nullptr, "", "reference", "Reference", "cuda.sm80",
                                       "cuda.sm90", "nonsense", endless.c_str()});
      backend_changed_ = true;
      break;
  }
}

void FuzzedCall::mutate_values() {
  std::vector<Slot*> integers;
  for (Slot& slot : slots_) {
    if (slot.read_by_plan && well_formed(slot.tensor) && !empty(slot.tensor)) {
      integers.push_back(&slot);
    }
  }
  if (integers.empty()) return mutate_tensor(any_slot());
  value_changes_.push_back(integers[static_cast<std::size_t>(random_.integer(
                                        0, static_cast<std::int64_t>(integers.size()) - 1))]
                               ->name);
  story_ += "values of " + value_changes_.back() + " ";
}

void FuzzedCall::mutate_presence() {
  if (random_.chance(0.5)) {
    const auto at =
        static_cast<std::size_t>(random_.integer(0, static_cast<std::int64_t>(slots_.size()) - 1));
    story_ += slots_[at].name + " = NULL ";
    *slots_[at].field = nullptr;
    slots_.erase(slots_.begin() + static_cast<std::ptrdiff_t>(at));
    if (slots_.empty()) add("lse", merge_.lse);
    if (slots_.empty()) structs_.no_args = true;
    return;
  }
  const onchip_tensor** fields[] = {&options_.bias,           &options_.mask,
                                    &options_.alibi_slopes,   &options_.q_segment_ids,
                                    &options_.kv_segment_ids, &options_.sink,
                                    &options_.dropout_rng,    &options_.seqlens_q,
                                    &options_.seqlens_kv,     &options_.cu_seqlens_kv};
  const std::int64_t which = random_.integer(0, 9);
  if (op_ == Op::merge || *fields[which] != nullptr) return mutate_tensor(any_slot());
  onchip_tensor t = any_slot().tensor;
  slots_.push_back({"added " + std::to_string(which), fields[which], t, false, which >= 6, true});
  *fields[which] = &t;  // replaced by build_structs
  story_ += slots_.back().name + " ";
}

}  // namespace onchip::test
