#include "support/fuzzed_attention.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "support/attention_call.hpp"
#include "support/call.hpp"
#include "support/compare.hpp"
#include "support/fuzzed.hpp"

namespace onchip::test {

// ---- the calls that a test makes ----------------------------------------------------------------

FuzzedCall::FuzzedCall(std::uint64_t number, const char* backend)
    : random_(number * 0x9E3779B97F4A7C15u + 1),
      backend_(backend),
      op_(random_.one_of({Op::forward, Op::forward, Op::backward, Op::merge})),
      structs_(args_sizeof(), op_ != Op::merge) {
  if (op_ == Op::merge) {
    make_merge();
  } else {
    make_attention();
  }
}

std::string FuzzedCall::check(Tally& tally) {
  const std::int64_t mutations = random_.one_of<std::int64_t>({0, 0, 1, 1, 1, 2, 3});
  for (std::int64_t m = 0; m < mutations; ++m) mutate();
  if (!structs_.has_options) {
    // With the struct, all that it points to leaves the call.
    std::erase_if(slots_, [this](const Slot& slot) {
      const auto at = reinterpret_cast<std::uintptr_t>(slot.field);
      return at >= reinterpret_cast<std::uintptr_t>(&options_) &&
             at < reinterpret_cast<std::uintptr_t>(&options_ + 1);
    });
  }
  back_with_memory();
  build_structs();
  remember();
  ++tally.calls;

  onchip_plan planned = ONCHIP_PLAN_INIT;
  planned.struct_size = structs_.plan_size;
  const onchip_plan before = planned;
  const onchip_status status = plan(structs_.no_plan ? nullptr : &planned);
  if (std::string wrong = changed({}); !wrong.empty()) return "plan changed " + wrong;
  if (status != ONCHIP_OK) {
    return judge_refused_plan(status, mutations == 0, backend_, before, planned);
  }
  if (structs_.no_plan || structs_.no_args || structs_.plan_size != sizeof(onchip_plan)) {
    return "accepted without plan or args";
  }
  if (std::string why = structs_.bad_sizes(); !why.empty()) return "accepted: " + why;
  if (unbacked_) {
    ++tally.planned_only;
    return "";
  }
  if (std::string why = why_illegal(); !why.empty()) return "accepted an illegal call: " + why;

  const GuardedMemory workspace = workspace_for(planned);
  if (std::string wrong = refused_run(planned, workspace, tally); !wrong.empty()) return wrong;
  const bool judgeable = (op_ != Op::backward || save_forward()) &&
                         (std::string(planned.backend) == "reference" || !reads_foreign_poison());
  remember();
  if (run(planned, workspace.data(), nullptr) != ONCHIP_OK) {
    return std::string("planned, then refused: ") + onchip_last_error();
  }
  if (!workspace_guard_holds(workspace)) return "memory behind the workspace was written";
  if (std::string wrong = changed(outputs()); !wrong.empty()) return "run changed " + wrong;
  ++tally.accepted;
  if (mutations > 0) ++tally.mutated_accepted;
  if (!judgeable) {
    ++tally.unjudged;
    return "";
  }
  const std::string wrong = judged();
  return wrong.empty() ? "" : std::string(planned.backend) + ": " + wrong;
}

// ---- a legal call -------------------------------------------------------------------------------

void FuzzedCall::make_attention() {
  AttentionSpec spec = random_spec(random_);
  // Many small calls find more than few large ones.
  for (std::int64_t* length : {&spec.seqlen_q, &spec.seqlen_kv})
    *length = std::min<std::int64_t>(*length, 20);
  for (auto* slots : {&spec.slots_q, &spec.slots_kv}) {
    for (std::int64_t& slot : *slots) slot = std::min<std::int64_t>(slot, 20);
  }
  for (std::size_t n = 0; n < spec.used_q.size(); ++n) {
    spec.used_q[n] = std::min(spec.used_q[n], spec.slots_q[n]);
  }
  for (std::size_t n = 0; n < spec.used_kv.size(); ++n) {
    spec.used_kv[n] = std::min(spec.used_kv[n], spec.slots_kv[n]);
  }
  spec.lse = spec.lse || op_ == Op::backward;
  attention_ = std::make_unique<AttentionCall>(spec, random_);
  attention_->options.backend = backend_;
  forward_ = attention_->forward_args();
  backward_ = attention_->backward_args();
  options_ = attention_->options;
  for (const auto& [name, tensor] : attention_->inputs()) memory_.add(tensor->accessible());
  for (const auto& [name, tensor] : attention_->forward_outputs()) {
    memory_.add(tensor->accessible());
  }
  for (const auto& [name, tensor] : attention_->backward_outputs()) {
    memory_.add(tensor->accessible());
  }
  if (op_ == Op::forward) {
    add("q", forward_.q);
    add("k", forward_.k);
    add("v", forward_.v);
    add("o", forward_.o, true);
    add("lse", forward_.lse, true);
  } else {
    add("d_o", backward_.d_o);
    add("q", backward_.q);
    add("k", backward_.k);
    add("v", backward_.v);
    add("o", backward_.o);
    add("lse", backward_.lse);
    add("d_lse", backward_.d_lse);
    add("dq", backward_.dq, true);
    add("dk", backward_.dk, true);
    add("dv", backward_.dv, true);
    add("dbias", backward_.dbias, true);
    add("dsink", backward_.dsink, true);
  }
  add("bias", options_.bias);
  add("mask", options_.mask);
  add("alibi_slopes", options_.alibi_slopes);
  add("q_segment_ids", options_.q_segment_ids);
  add("kv_segment_ids", options_.kv_segment_ids);
  add("sink", options_.sink);
  add("dropout_rng", options_.dropout_rng, false, true);
  add("cu_seqlens_q", options_.cu_seqlens_q, false, true);
  add("cu_seqlens_kv", options_.cu_seqlens_kv, false, true);
  add("seqlens_q", options_.seqlens_q, false, true);
  add("seqlens_kv", options_.seqlens_kv, false, true);
}

void FuzzedCall::make_merge() {
  const DType dtype = random_.one_of({DType::f64, DType::f32, DType::f16, DType::bf16});
  const bool packed = random_.chance(0.4);
  const std::int64_t rows = random_.integer(0, 9);
  const std::int64_t heads = random_.integer(1, 3);
  const std::int64_t batch = random_.integer(0, 3);
  const Shape o_shape = packed ? Shape{rows, heads, random_.integer(0, 20)}
                               : Shape{batch, rows, heads, random_.integer(0, 20)};
  const Shape lse_shape = packed ? Shape{heads, rows} : Shape{batch, heads, rows};
  const DType lse_dtype = dtype == DType::f64 ? DType::f64 : DType::f32;
  for (int i = 0; i < 6; ++i) {
    merge_tensors_[i] =
        HostTensor(i % 2 == 0 ? dtype : lse_dtype, i % 2 == 0 ? o_shape : lse_shape);
    if (i >= 4) continue;
    merge_tensors_[i].fill([&] {
      if (i % 2 == 1 && random_.chance(0.25)) return -std::numeric_limits<double>::infinity();
      return 3.0 * random_.normal();
    });
  }
  const onchip_tensor** fields[] = {&merge_.o1,   &merge_.lse1, &merge_.o2,
                                    &merge_.lse2, &merge_.o,    &merge_.lse};
  const char* names[] = {"o1", "lse1", "o2", "lse2", "o", "lse"};
  merge_.backend = backend_;
  for (int i = 0; i < 6; ++i) {
    *fields[i] = merge_tensors_[i].abi();
    memory_.add(merge_tensors_[i].accessible());
    add(names[i], *fields[i], i >= 4);
  }
}

void FuzzedCall::add(const char* name, const onchip_tensor*& field, bool output,
                     bool read_by_plan) {
  if (field != nullptr) slots_.push_back({name, &field, *field, output, read_by_plan, false});
}

// ---- memory -------------------------------------------------------------------------------------

void FuzzedCall::back_with_memory() {
  for (Slot& slot : slots_) {
    if (memory_.back(slot.tensor, random_)) continue;
    unbacked_ = true;
    // What plan reads must be there: that tensor goes.
    if (slot.read_by_plan) {
      slot.tensor.shape[0] = 0;
      slot.tensor.rank = std::max(slot.tensor.rank, 1);
    }
  }
  for (const std::string& name : value_changes_) {
    for (Slot& slot : slots_) {
      if (slot.name == name && well_formed(slot.tensor) && !empty(slot.tensor) &&
          slot.tensor.data != nullptr &&
          (slot.tensor.dtype == ONCHIP_INT32 || slot.tensor.dtype == ONCHIP_INT64) &&
          reinterpret_cast<std::uintptr_t>(slot.tensor.data) % 8 == 0) {
        change_one_value(slot.tensor, random_.chance(0.5) ? random_.integer(0, 12) : any_integer(),
                         random_);
      }
    }
  }
}

std::size_t FuzzedCall::args_sizeof() const {
  switch (op_) {
    case Op::forward:
      return sizeof(onchip_attention_forward_args);
    case Op::backward:
      return sizeof(onchip_attention_backward_args);
    default:
      return sizeof(onchip_attention_merge_args);
  }
}

void FuzzedCall::build_structs() {
  for (Slot& slot : slots_) *slot.field = &slot.tensor;
  options_memory_ =
      std::make_unique<StructMemory>(options_, structs_.options_size, structs_.dirty_tail);
  const auto* options = structs_.has_options
                            ? static_cast<const onchip_attention_options*>(options_memory_->data())
                            : nullptr;
  forward_.options = options;
  backward_.options = options;
  const std::size_t size = structs_.args_size;
  switch (op_) {
    case Op::forward:
      args_memory_ = std::make_unique<StructMemory>(forward_, size, structs_.dirty_tail);
      break;
    case Op::backward:
      args_memory_ = std::make_unique<StructMemory>(backward_, size, structs_.dirty_tail);
      break;
    default:
      args_memory_ = std::make_unique<StructMemory>(merge_, size, structs_.dirty_tail);
  }
}

// ---- nothing else changes -----------------------------------------------------------------------

std::vector<std::span<std::byte>> FuzzedCall::watched() const {
  std::vector<std::span<std::byte>> all = memory_.buffers();
  all.push_back(options_memory_->accessible());
  all.push_back(args_memory_->accessible());
  return all;
}

void FuzzedCall::remember() {
  memory_before_.clear();
  for (const auto& buffer : watched()) memory_before_.emplace_back(buffer.begin(), buffer.end());
  tensors_before_.clear();
  for (const Slot& slot : slots_) tensors_before_.push_back(slot.tensor);
}

std::vector<const onchip_tensor*> FuzzedCall::outputs() const {
  std::vector<const onchip_tensor*> result;
  for (const Slot& slot : slots_) {
    if (slot.output) result.push_back(&slot.tensor);
  }
  return result;
}

std::string FuzzedCall::changed(const std::vector<const onchip_tensor*>& outputs) const {
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    if (std::memcmp(&tensors_before_[i], &slots_[i].tensor, sizeof(onchip_tensor)) != 0) {
      return "the struct of " + slots_[i].name;
    }
  }
  std::vector<const std::byte*> written;
  for (const onchip_tensor* output : outputs) {
    const std::int64_t size = dtype_size(static_cast<DType>(output->dtype));
    for_each_element(*output, [&](std::byte* at) {
      for (std::int64_t byte = 0; byte < size; ++byte) written.push_back(at + byte);
    });
  }
  std::sort(written.begin(), written.end());
  const auto all = watched();
  for (std::size_t b = 0; b < all.size(); ++b) {
    for (std::size_t i = 0; i < all[b].size(); ++i) {
      if (all[b][i] == memory_before_[b][i]) continue;
      if (std::binary_search(written.begin(), written.end(), &all[b][i])) continue;
      return "byte " + std::to_string(i) + " of buffer " + std::to_string(b);
    }
  }
  return "";
}

// ---- the calls ----------------------------------------------------------------------------------

onchip_status FuzzedCall::plan(onchip_plan* to) const {
  switch (op_) {
    case Op::forward:
      return onchip_attention_forward_plan(
          static_cast<const onchip_attention_forward_args*>(args()), to);
    case Op::backward:
      return onchip_attention_backward_plan(
          static_cast<const onchip_attention_backward_args*>(args()), to);
    default:
      return onchip_attention_merge_plan(static_cast<const onchip_attention_merge_args*>(args()),
                                         to);
  }
}

onchip_status FuzzedCall::run(const onchip_plan& planned, void* workspace, void* stream) const {
  return run_as(op_, &planned, args(), workspace, stream);
}

onchip_status FuzzedCall::run_as(Op op, const onchip_plan* planned, const void* args,
                                 void* workspace, void* stream) {
  switch (op) {
    case Op::forward:
      return onchip_attention_forward_run(
          planned, static_cast<const onchip_attention_forward_args*>(args), workspace, stream);
    case Op::backward:
      return onchip_attention_backward_run(
          planned, static_cast<const onchip_attention_backward_args*>(args), workspace, stream);
    default:
      return onchip_attention_merge_run(
          planned, static_cast<const onchip_attention_merge_args*>(args), workspace, stream);
  }
}

std::string FuzzedCall::refused_run(const onchip_plan& planned, const GuardedMemory& workspace,
                                    Tally& tally) {
  RunArguments misused{planned, nullptr, args(), workspace.data(), nullptr};
  misused.given_plan = &misused.plan;
  // One way more is another scale than the planned one; the last two are none.
  const std::int64_t way = random_.integer(0, kWaysToMisuseRun + 2);
  onchip_attention_options* options = nullptr;
  double planned_scale = 0.0;
  if (way < kWaysToMisuseRun) {
    if (!misuse_run(way, misused, random_)) return "";
  } else if (way == kWaysToMisuseRun && op_ != Op::merge && structs_.has_options) {
    options = static_cast<onchip_attention_options*>(options_memory_->data());
    planned_scale = options->scale;
    options->scale = planned_scale == 0.3125 ? 0.4375 : 0.3125;
  } else {
    return "";
  }
  remember();
  const onchip_status status =
      run_as(op_, misused.given_plan, misused.given, misused.workspace, misused.stream);
  ++tally.refused_runs;
  if (status != ONCHIP_INVALID_ARGUMENT) return "a misused run was not refused";
  if (std::string wrong = changed({}); !wrong.empty()) return "a refused run changed " + wrong;
  if (options != nullptr) options->scale = planned_scale;
  return judge_refusal(status);
}

std::string FuzzedCall::why_illegal() const {
  switch (op_) {
    case Op::forward:
      return illegal(*static_cast<const onchip_attention_forward_args*>(args()));
    case Op::backward:
      return illegal(*static_cast<const onchip_attention_backward_args*>(args()));
    default:
      return illegal(*static_cast<const onchip_attention_merge_args*>(args()));
  }
}

std::string FuzzedCall::judged() const {
  switch (op_) {
    case Op::forward:
      return judge(*static_cast<const onchip_attention_forward_args*>(args()));
    case Op::backward:
      return judge(*static_cast<const onchip_attention_backward_args*>(args()), Saved::given);
    default:
      return judge(*static_cast<const onchip_attention_merge_args*>(args()));
  }
}

bool FuzzedCall::save_forward() {
  const auto& backward = *static_cast<const onchip_attention_backward_args*>(args());
  const auto store = [](const onchip_tensor& t, const std::vector<double>& values) {
    std::size_t next = 0;
    for_each_element(t, [&](std::byte* at) {
      store_from_double(at, static_cast<DType>(t.dtype), values[next++]);
    });
  };
  // Written into a view of the lengths, say, they would make another call of this one.
  for (const Slot& slot : slots_) {
    for (const onchip_tensor* saved : {backward.o, backward.lse}) {
      if (&slot.tensor != saved && share_memory(slot.tensor, *saved)) return false;
    }
  }
  const PlainForward forward = plain_forward(read_case(backward), Arithmetic::exact());
  store(*backward.o, forward.o);
  store(*backward.lse, forward.lse);
  const AttentionCase now = read_case(backward);
  const std::vector<double> wanted = plain_forward(now, Arithmetic::exact()).lse;
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    // Beyond, not even fp64 says S - lse to three digits.
    if (std::isfinite(wanted[i]) && std::fabs(wanted[i]) > 1e12) return false;
    if (wanted[i] == now.lse.at[i]) continue;
    if (!(std::fabs(wanted[i] - now.lse.at[i]) <= 0.01)) return false;
  }
  return true;
}

bool FuzzedCall::reads_foreign_poison() const {
  const auto poisoned = [](const std::vector<double>& values, std::int64_t begin,
                           std::int64_t count) {
    const auto first = values.begin() + begin;
    return std::any_of(first, first + count, [](double x) { return !(std::fabs(x) < 1e30); });
  };
  if (op_ == Op::merge) {
    return std::any_of(slots_.begin(), slots_.end(), [&](const Slot& slot) {
      const std::vector<double> values = read_values(slot.tensor);
      return slot.changed && poisoned(values, 0, static_cast<std::int64_t>(values.size()));
    });
  }
  const AttentionCase c =
      op_ == Op::forward ? read_case(*static_cast<const onchip_attention_forward_args*>(args()))
                         : read_case(*static_cast<const onchip_attention_backward_args*>(args()));
  for (std::int64_t n = 0; n < c.num_seqs; ++n) {
    const std::int64_t q_values = c.length_q(n) * c.num_heads_q * c.head_dim_qk;
    const std::int64_t o_values = c.length_q(n) * c.num_heads_q * c.head_dim_v;
    const std::int64_t k_values = c.length_kv(n) * c.num_heads_kv * c.head_dim_qk;
    const std::int64_t v_values = c.length_kv(n) * c.num_heads_kv * c.head_dim_v;
    if (poisoned(c.q.at, c.q_row(n, 0, 0, c.head_dim_qk), q_values) ||
        poisoned(c.k.at, c.kv_row(n, 0, 0, c.head_dim_qk), k_values) ||
        poisoned(c.v.at, c.kv_row(n, 0, 0, c.head_dim_v), v_values) ||
        (op_ == Op::backward && poisoned(c.d_o.at, c.q_row(n, 0, 0, c.head_dim_v), o_values))) {
      return true;
    }
  }
  const auto all = [&](const Values& values) {
    return poisoned(values.at, 0, static_cast<std::int64_t>(values.at.size()));
  };
  return all(c.sink) || all(c.alibi_slopes) || all(c.d_lse) ||
         std::any_of(c.bias.at.begin(), c.bias.at.end(), [](double x) { return std::isnan(x); });
}

}  // namespace onchip::test
