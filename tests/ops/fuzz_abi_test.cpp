// Structured fuzzing of the C ABI. A legal call gets 0 to 3 of its fields replaced: pointers stay
// null or lead to guarded buffers, everything else (dtypes, ranks, shapes, strides, devices,
// options, lengths, struct sizes, names) may become anything. A refused call has changed no byte
// anywhere; an accepted one is legal by the independent reading of the contract, equals the
// reference within section 5 of docs/semantics.md, and has written the elements of its outputs and
// nothing else.
//
// Every call is drawn from its own number, so that a failing one repeats alone.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "support/attention_call.hpp"
#include "support/call.hpp"
#include "support/compare.hpp"
#include "support/fuzzed.hpp"

namespace onchip::test {
namespace {

enum class Op { forward, backward, merge };

// One tensor argument: the struct that the call sees, and where its address stands.
struct Slot {
  std::string name;
  const onchip_tensor** field;
  onchip_tensor tensor;
  bool output;
  bool read_by_plan;  // lengths and random state: values in host memory
  bool changed = false;
};

struct Tally {
  int calls = 0;
  int accepted = 0;
  int planned_only = 0;
  int mutated_accepted = 0;
  int unjudged = 0;
  int refused_runs = 0;
};

class FuzzedCall {
 public:
  FuzzedCall(std::uint64_t number, const char* backend)
      : random_(number * 0x9E3779B97F4A7C15u + 1), backend_(backend) {
    op_ = random_.one_of({Op::forward, Op::forward, Op::backward, Op::merge});
    if (op_ == Op::merge) {
      make_merge();
    } else {
      make_attention();
    }
  }

  // "" or what went wrong.
  std::string check(Tally& tally) {
    const std::int64_t mutations = random_.one_of<std::int64_t>({0, 0, 1, 1, 1, 2, 3});
    for (std::int64_t m = 0; m < mutations; ++m) mutate();
    if (!has_options_) {
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
    planned.struct_size = plan_size_;
    const onchip_plan before = planned;
    const onchip_status status = plan(no_plan_ ? nullptr : &planned);
    if (std::string wrong = changed({}); !wrong.empty()) return "plan changed " + wrong;
    if (status != ONCHIP_OK) {
      const bool may_decline = backend_ != nullptr && std::string(backend_) != "reference";
      if (mutations == 0 && !(status == ONCHIP_UNSUPPORTED && may_decline)) {
        return std::string("a legal call was refused: ") + onchip_last_error();
      }
      if (std::memcmp(&before, &planned, sizeof(planned)) != 0) return "a refused plan was written";
      return judge_refusal(status);
    }
    if (no_plan_ || no_args_ || plan_size_ != sizeof(onchip_plan)) {
      return "accepted without plan or args";
    }
    if (std::string why = bad_sizes(); !why.empty()) return "accepted: " + why;
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

  const std::string& story() const { return story_; }

 private:
  // ---- a legal call ----------------------------------------------------------------------------

  void make_attention() {
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
    has_options_ = true;
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

  void make_merge() {
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

  void add(const char* name, const onchip_tensor*& field, bool output = false,
           bool read_by_plan = false) {
    if (field != nullptr) slots_.push_back({name, &field, *field, output, read_by_plan, false});
  }

  // ---- mutations -------------------------------------------------------------------------------

  std::int64_t any_integer() {
    return random_.one_of<std::int64_t>({-2, -1, 0, 1, 2, 3, 7, 8, 16, 100, 65535, INT32_MAX,
                                         INT32_MIN, std::int64_t{1} << 40, INT64_MAX, INT64_MIN,
                                         static_cast<std::int64_t>(random_.bits())});
  }
  std::int32_t any_int32() { return static_cast<std::int32_t>(any_integer()); }
  double any_double() {
    return random_.one_of({0.0, -0.0, 1.0, -1.0, 0.5, 0.999999, 0.99999999, 1e-300, 1e300, 7.5,
                           std::numeric_limits<double>::infinity(),
                           -std::numeric_limits<double>::infinity(),
                           std::numeric_limits<double>::quiet_NaN()});
  }

  Slot& any_slot() {
    return slots_[static_cast<std::size_t>(
        random_.integer(0, static_cast<std::int64_t>(slots_.size()) - 1))];
  }

  void mutate() {
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
        return mutate_struct();
    }
  }

  void mutate_tensor(Slot& slot) {
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

  void mutate_option() {
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

  // Stored integers that plan reads: lengths and the random state.
  void mutate_values() {
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

  // A tensor goes, or appears in a field that was empty: another argument's, so most often misfit.
  void mutate_presence() {
    if (random_.chance(0.5)) {
      const auto at = static_cast<std::size_t>(
          random_.integer(0, static_cast<std::int64_t>(slots_.size()) - 1));
      story_ += slots_[at].name + " = NULL ";
      *slots_[at].field = nullptr;
      slots_.erase(slots_.begin() + static_cast<std::ptrdiff_t>(at));
      if (slots_.empty()) add("lse", merge_.lse);
      if (slots_.empty()) no_args_ = true;
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

  void mutate_struct() {
    story_ += "struct ";
    const auto size = [&](std::size_t whole) {
      return random_.one_of<std::size_t>(
          {0, 7, 8, whole - 8, whole - 1, whole, whole + 8, whole + 64, 4096, 4097, SIZE_MAX});
    };
    switch (random_.integer(0, 5)) {
      case 0:
        args_size_ = size(args_sizeof());
        break;
      case 1:
        options_size_ = size(sizeof(onchip_attention_options));
        break;
      case 2:
        plan_size_ = size(sizeof(onchip_plan));
        break;
      case 3:
        no_args_ = random_.chance(0.3);
        no_plan_ = random_.chance(0.3);
        break;
      case 4:
        has_options_ = false;
        break;
      default:
        args_size_ = args_sizeof() + 16;
        options_size_ = sizeof(onchip_attention_options) + 16;
        dirty_tail_ = random_.chance(0.5);
        break;
    }
  }

  // ---- memory ----------------------------------------------------------------------------------

  void back_with_memory() {
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
          change_one_value(slot.tensor,
                           random_.chance(0.5) ? random_.integer(0, 12) : any_integer(), random_);
        }
      }
    }
  }

  std::size_t args_sizeof() const {
    switch (op_) {
      case Op::forward:
        return sizeof(onchip_attention_forward_args);
      case Op::backward:
        return sizeof(onchip_attention_backward_args);
      default:
        return sizeof(onchip_attention_merge_args);
    }
  }

  void build_structs() {
    for (Slot& slot : slots_) *slot.field = &slot.tensor;
    const std::size_t options_size =
        options_size_ == kUnset ? sizeof(onchip_attention_options) : options_size_;
    options_memory_ = std::make_unique<StructMemory>(options_, options_size, dirty_tail_);
    const auto* options =
        has_options_ ? static_cast<const onchip_attention_options*>(options_memory_->data())
                     : nullptr;
    forward_.options = options;
    backward_.options = options;
    const std::size_t size = args_size_ == kUnset ? args_sizeof() : args_size_;
    switch (op_) {
      case Op::forward:
        args_memory_ = std::make_unique<StructMemory>(forward_, size, dirty_tail_);
        break;
      case Op::backward:
        args_memory_ = std::make_unique<StructMemory>(backward_, size, dirty_tail_);
        break;
      default:
        args_memory_ = std::make_unique<StructMemory>(merge_, size, dirty_tail_);
    }
  }

  // ---- nothing else changes --------------------------------------------------------------------

  std::vector<std::span<std::byte>> watched() const {
    std::vector<std::span<std::byte>> all = memory_.buffers();
    all.push_back(options_memory_->accessible());
    all.push_back(args_memory_->accessible());
    return all;
  }

  void remember() {
    memory_before_.clear();
    for (const auto& buffer : watched()) memory_before_.emplace_back(buffer.begin(), buffer.end());
    tensors_before_.clear();
    for (const Slot& slot : slots_) tensors_before_.push_back(slot.tensor);
  }

  std::vector<const onchip_tensor*> outputs() const {
    std::vector<const onchip_tensor*> result;
    for (const Slot& slot : slots_) {
      if (slot.output) result.push_back(&slot.tensor);
    }
    return result;
  }

  // "" unless a byte differs that is no element of `outputs`.
  std::string changed(const std::vector<const onchip_tensor*>& outputs) const {
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

  // ---- the calls -------------------------------------------------------------------------------

  const void* args() const { return no_args_ ? nullptr : args_memory_->data(); }

  onchip_status plan(onchip_plan* to) const {
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

  onchip_status run(const onchip_plan& planned, void* workspace, void* stream) const {
    return run_as(op_, &planned, args(), workspace, stream);
  }

  static onchip_status run_as(Op op, const onchip_plan* planned, const void* args, void* workspace,
                              void* stream) {
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

  // One way of misusing run, or none: refused, and nothing written.
  std::string refused_run(const onchip_plan& planned, const GuardedMemory& workspace,
                          Tally& tally) {
    RunArguments misused{planned, nullptr, args(), workspace.data(), nullptr};
    misused.given_plan = &misused.plan;
    // One way more is another scale than the planned one; the last two are none.
    const std::int64_t way = random_.integer(0, kWaysToMisuseRun + 2);
    onchip_attention_options* options = nullptr;
    double planned_scale = 0.0;
    if (way < kWaysToMisuseRun) {
      if (!misuse_run(way, misused, random_)) return "";
    } else if (way == kWaysToMisuseRun && op_ != Op::merge && has_options_) {
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

  std::string bad_sizes() const {
    const std::size_t size = args_size_ == kUnset ? args_sizeof() : args_size_;
    const std::size_t options_size =
        options_size_ == kUnset ? sizeof(onchip_attention_options) : options_size_;
    const auto bad = [this](std::size_t stated, std::size_t whole) {
      return stated < whole || stated > 4096 || (dirty_tail_ && stated > whole);
    };
    if (bad(size, args_sizeof())) return "args of size " + std::to_string(size);
    if (op_ != Op::merge && has_options_ && bad(options_size, sizeof(onchip_attention_options))) {
      return "options of size " + std::to_string(options_size);
    }
    return "";
  }

  std::string why_illegal() const {
    switch (op_) {
      case Op::forward:
        return illegal(*static_cast<const onchip_attention_forward_args*>(args()));
      case Op::backward:
        return illegal(*static_cast<const onchip_attention_backward_args*>(args()));
      default:
        return illegal(*static_cast<const onchip_attention_merge_args*>(args()));
    }
  }

  std::string judged() const {
    switch (op_) {
      case Op::forward:
        return judge(*static_cast<const onchip_attention_forward_args*>(args()));
      case Op::backward:
        return judge(*static_cast<const onchip_attention_backward_args*>(args()), Saved::given);
      default:
        return judge(*static_cast<const onchip_attention_merge_args*>(args()));
    }
  }

  // Gives backward the o and lse of the changed call. False where they cannot hold them (o or lse
  // share memory with something, or repeat along an axis): then P = exp(S - lse) may be anything.
  bool save_forward() {
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

  // A changed view or length may show poison, or numbers that fp32 cannot hold, inside a sequence.
  // Only the reference says exactly which rows that reaches (docs/semantics.md section 1,
  // non-finite values, b).
  bool reads_foreign_poison() const {
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

  static constexpr std::size_t kUnset = SIZE_MAX - 1;

  Random random_;
  const char* backend_;
  Op op_;
  std::string story_;
  std::unique_ptr<AttentionCall> attention_;
  HostTensor merge_tensors_[6];
  onchip_attention_forward_args forward_ = ONCHIP_ATTENTION_FORWARD_ARGS_INIT;
  onchip_attention_backward_args backward_ = ONCHIP_ATTENTION_BACKWARD_ARGS_INIT;
  onchip_attention_merge_args merge_ = ONCHIP_ATTENTION_MERGE_ARGS_INIT;
  onchip_attention_options options_ = ONCHIP_ATTENTION_OPTIONS_INIT;
  bool has_options_ = false;
  bool backend_changed_ = false;
  bool no_args_ = false;
  bool no_plan_ = false;
  bool dirty_tail_ = false;
  bool unbacked_ = false;
  std::size_t args_size_ = kUnset;
  std::size_t options_size_ = kUnset;
  std::size_t plan_size_ = sizeof(onchip_plan);
  std::vector<Slot> slots_;
  std::vector<std::string> value_changes_;
  FuzzedMemory memory_;
  std::unique_ptr<StructMemory> args_memory_;
  std::unique_ptr<StructMemory> options_memory_;
  std::vector<std::vector<std::byte>> memory_before_;
  std::vector<onchip_tensor> tensors_before_;
};

class FuzzAbi : public ::testing::TestWithParam<const char*> {};

TEST_P(FuzzAbi, RefusedChangesNothingAcceptedIsRight) {
  const std::string name = GetParam();
  const char* backend = name == "automatic" ? nullptr : GetParam();
  const bool long_run = std::getenv("ONCHIP_TEST_LONG") != nullptr;
  const std::uint64_t calls = long_run ? 200000 : 1500;
  // Under sanitizers time ends the run first: processor time, so that a busy machine does not.
  const double budget_seconds = long_run ? 60.0 : 10.0;
  const std::clock_t start = std::clock();
  Tally tally;
  for (std::uint64_t number = 0; number < calls; ++number) {
    const auto spent = static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
    if (spent > budget_seconds) break;
    FuzzedCall fuzzed(number, backend);
    const std::string wrong = fuzzed.check(tally);
    ASSERT_EQ(wrong, "") << "call " << number << ", changed: " << fuzzed.story();
  }
  std::printf(
      "%d calls, %d accepted (%d of them changed, %d not to be judged), %d only planned, "
      "%d refused runs\n",
      tally.calls, tally.accepted, tally.mutated_accepted, tally.unjudged, tally.planned_only,
      tally.refused_runs);
  EXPECT_GE(tally.calls, 200);
  EXPECT_GE(tally.accepted, tally.calls * 3 / 10);
  EXPECT_GE(tally.mutated_accepted, tally.calls / 20);
  EXPECT_LE(tally.unjudged, tally.calls / 20);
  EXPECT_GT(tally.refused_runs, 0);
}

INSTANTIATE_TEST_SUITE_P(Backends, FuzzAbi, ::testing::Values("reference", "cpu", "automatic"),
                         [](const auto& test) { return std::string(test.param); });

}  // namespace
}  // namespace onchip::test
