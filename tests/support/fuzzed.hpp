// What the fuzzing of the C ABI shares: structs of the ABI that may hold anything, and memory for
// them.
#pragma once

#include <onchip/onchip.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "support/host_tensor.hpp"
#include "support/random.hpp"

namespace onchip::test {

bool well_formed(const onchip_tensor& t);
bool empty(const onchip_tensor& t);
bool share_memory(const onchip_tensor& a, const onchip_tensor& b);

// A struct in memory of exactly its stated size, with nothing accessible behind it.
class StructMemory {
 public:
  template <typename T>
  StructMemory(const T& value, std::size_t stated_size, bool dirty_tail)
      : StructMemory(&value, sizeof(T), stated_size, dirty_tail) {}

  void* data() const { return memory_.data(); }
  std::span<std::byte> accessible() const { return memory_.accessible(); }

 private:
  StructMemory(const void* value, std::size_t whole, std::size_t stated_size, bool dirty_tail);

  GuardedMemory memory_;
};

// What a call states of its structs, and which of them it has: right at first.
struct FuzzedStructs {
  FuzzedStructs(std::size_t args_sizeof, bool has_options)
      : args_sizeof(args_sizeof), args_size(args_sizeof), has_options(has_options) {}

  void mutate(Random& random);
  // "" or the struct whose size no call may be accepted with.
  std::string bad_sizes() const;

  std::size_t args_sizeof;
  std::size_t args_size;
  std::size_t options_size = sizeof(onchip_attention_options);
  std::size_t plan_size = sizeof(onchip_plan);
  bool has_options;
  bool no_args = false;
  bool no_plan = false;
  bool dirty_tail = false;
};

// The memory that a call's tensors may lead to.
class FuzzedMemory {
 public:
  void add(std::span<std::byte> buffer) { buffers_.push_back(buffer); }
  const std::vector<std::span<std::byte>>& buffers() const { return buffers_; }

  // Leads a well-formed tensor to memory of its own size: what it has, or a fresh buffer with small
  // integers or random numbers. False where nobody could allocate it, or where loops over its axes
  // would not end.
  bool back(onchip_tensor& t, Random& random);

 private:
  std::vector<std::unique_ptr<GuardedMemory>> fresh_;
  std::vector<std::span<std::byte>> buffers_;
};

// Replaces one stored int32 or int64.
void change_one_value(const onchip_tensor& t, std::int64_t value, Random& random);

// What a run is given.
struct RunArguments {
  onchip_plan plan;  // a copy of the call's
  const onchip_plan* given_plan;
  const void* given;
  void* workspace;
  void* stream;
};

// Spoils one of them, in one of the ways 0..kWaysToMisuseRun - 1. False: this plan has nothing to
// spoil there.
inline constexpr std::int64_t kWaysToMisuseRun = 7;
bool misuse_run(std::int64_t way, RunArguments& run, Random& random);

// "" or what is wrong with a refusal of this status and with its message.
std::string judge_refusal(onchip_status status);

// The same of planning, with the plan before and after; a legal call is refused only by a backend
// that was asked for by name and is not the reference.
std::string judge_refused_plan(onchip_status status, bool legal, const char* backend,
                               const onchip_plan& before, const onchip_plan& after);

}  // namespace onchip::test
