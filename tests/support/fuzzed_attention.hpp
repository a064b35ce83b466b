// A legal call of attention's forward, backward or merge of which some fields are replaced, with
// all that it leads to in guarded memory, and the verdict on what the library makes of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "support/attention_call.hpp"
#include "support/fuzzed.hpp"

namespace onchip::test {

class FuzzedCall {
 public:
  struct Tally {
    int calls = 0;
    int accepted = 0;
    int planned_only = 0;
    int mutated_accepted = 0;
    int unjudged = 0;
    int refused_runs = 0;
  };

  FuzzedCall(std::uint64_t number, const char* backend);

  // "" or what went wrong.
  std::string check(Tally& tally);

  const std::string& story() const { return story_; }

 private:
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

  // ---- a legal call ----------------------------------------------------------------------------

  void make_attention();

  void make_merge();

  void add(const char* name, const onchip_tensor*& field, bool output = false,
           bool read_by_plan = false);

  // ---- mutations -------------------------------------------------------------------------------

  std::int64_t any_integer();
  std::int32_t any_int32() { return static_cast<std::int32_t>(any_integer()); }
  double any_double();

  Slot& any_slot();

  void mutate();

  void mutate_tensor(Slot& slot);

  void mutate_option();

  // Stored integers that plan reads: lengths and the random state.
  void mutate_values();

  // A tensor goes, or appears in a field that was empty: another argument's, so most often misfit.
  void mutate_presence();

  // ---- memory ----------------------------------------------------------------------------------

  void back_with_memory();

  std::size_t args_sizeof() const;

  void build_structs();

  // ---- nothing else changes --------------------------------------------------------------------

  std::vector<std::span<std::byte>> watched() const;

  void remember();

  std::vector<const onchip_tensor*> outputs() const;

  // "" unless a byte differs that is no element of `outputs`.
  std::string changed(const std::vector<const onchip_tensor*>& outputs) const;

  // ---- the calls -------------------------------------------------------------------------------

  const void* args() const { return structs_.no_args ? nullptr : args_memory_->data(); }

  onchip_status plan(onchip_plan* to) const;

  onchip_status run(const onchip_plan& planned, void* workspace, void* stream) const;

  static onchip_status run_as(Op op, const onchip_plan* planned, const void* args, void* workspace,
                              void* stream);

  // One way of misusing run, or none: refused, and nothing written.
  std::string refused_run(const onchip_plan& planned, const GuardedMemory& workspace, Tally& tally);

  std::string why_illegal() const;

  std::string judged() const;

  // Gives backward the o and lse of the changed call. False where they cannot hold them (o or lse
  // share memory with something, or repeat along an axis): then P = exp(S - lse) may be anything.
  bool save_forward();

  // A changed view or length may show poison, or numbers that fp32 cannot hold, inside a sequence.
  // Only the reference says exactly which rows that reaches (docs/semantics.md section 1,
  // non-finite values, b).
  bool reads_foreign_poison() const;

  Random random_;
  const char* backend_;
  Op op_;
  FuzzedStructs structs_;
  std::string story_;
  std::unique_ptr<AttentionCall> attention_;
  HostTensor merge_tensors_[6];
  onchip_attention_forward_args forward_ = ONCHIP_ATTENTION_FORWARD_ARGS_INIT;
  onchip_attention_backward_args backward_ = ONCHIP_ATTENTION_BACKWARD_ARGS_INIT;
  onchip_attention_merge_args merge_ = ONCHIP_ATTENTION_MERGE_ARGS_INIT;
  onchip_attention_options options_ = ONCHIP_ATTENTION_OPTIONS_INIT;
  bool backend_changed_ = false;
  bool unbacked_ = false;
  std::vector<Slot> slots_;
  std::vector<std::string> value_changes_;
  FuzzedMemory memory_;
  std::unique_ptr<StructMemory> args_memory_;
  std::unique_ptr<StructMemory> options_memory_;
  std::vector<std::vector<std::byte>> memory_before_;
  std::vector<onchip_tensor> tensors_before_;
};

}  // namespace onchip::test
