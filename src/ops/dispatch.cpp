#include "ops/dispatch.hpp"

#include <bit>
#include <cstring>

#include "ops/fingerprint.hpp"

namespace onchip::ops {

namespace {

constexpr std::size_t kWords = 24;
static_assert(sizeof(onchip_plan{}.opaque) == kWords * sizeof(std::uint64_t));

// opaque: [0] operator and backend, [1] fingerprint, [2] workspace bytes, [3] alignment,
// [4] the kernel name's address, [5..20] the backend's words, [23] a checksum of all that.
constexpr std::size_t kFirstWord = 5;
constexpr std::size_t kChecksum = kWords - 1;

std::uint64_t checksum(const std::uint64_t* words) {
  Fingerprint hash;
  for (std::size_t i = 0; i < kChecksum; ++i) hash.add(words[i]);
  return hash.value();
}

}  // namespace

void require_known_backend(std::string_view op, std::string_view forced) {
  if (forced.empty()) return;
  std::string names;
  for (const std::string_view name : kBackendNames) {
    if (forced == name) return;
    if (!names.empty()) names += ", ";
    names += name;
  }
  throw_invalid(op, "backend", "\"" + std::string(forced) + "\"", names);
}

void check_plan_target(std::string_view op, const onchip_plan* plan) {
  if (plan == nullptr) throw_invalid(op, "plan", "NULL", "a plan to fill");
  if (plan->struct_size != sizeof(onchip_plan)) {
    throw_invalid(op, "plan.struct_size", std::to_string(plan->struct_size),
                  std::to_string(sizeof(onchip_plan)), "ONCHIP_PLAN_INIT");
  }
}

void write_plan(std::string_view op, const StoredPlan& stored, const char* backend,
                onchip_plan* plan) {
  check_plan_target(op, plan);
  std::uint64_t words[kWords] = {};
  words[0] =
      (static_cast<std::uint64_t>(static_cast<std::uint32_t>(stored.op)) << 32) | stored.backend;
  words[1] = stored.fingerprint;
  words[2] = stored.plan.workspace_bytes;
  words[3] = stored.plan.workspace_alignment;
  words[4] = static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(stored.plan.kernel));
  for (std::size_t i = 0; i < stored.plan.words.size(); ++i) {
    words[kFirstWord + i] = stored.plan.words[i];
  }
  words[kChecksum] = checksum(words);
  plan->workspace_bytes = stored.plan.workspace_bytes;
  plan->workspace_alignment = stored.plan.workspace_alignment;
  plan->backend = backend;
  plan->kernel = stored.plan.kernel;
  std::memcpy(plan->opaque, words, sizeof(words));
}

StoredPlan read_plan(std::string_view op_name, onchip_operator op, std::uint64_t fingerprint,
                     std::size_t num_backends, const onchip_plan* plan) {
  check_plan_target(op_name, plan);
  std::uint64_t words[kWords];
  std::memcpy(words, plan->opaque, sizeof(words));
  StoredPlan stored;
  stored.op = static_cast<onchip_operator>(words[0] >> 32);
  stored.backend = static_cast<std::uint32_t>(words[0]);
  if (words[kChecksum] != checksum(words) || stored.op != op || stored.backend >= num_backends) {
    throw_invalid(op_name, "plan", "memory that holds no plan of this operator",
                  "what " + std::string(op_name) + "'s plan call filled");
  }
  stored.fingerprint = words[1];
  if (stored.fingerprint != fingerprint) {
    throw_invalid(op_name, "args", "arguments that differ from the planned ones",
                  "the same types, shapes, strides, devices, 16-byte alignment and options",
                  "a new plan");
  }
  stored.plan.workspace_bytes = words[2];
  stored.plan.workspace_alignment = words[3];
  stored.plan.kernel = reinterpret_cast<const char*>(static_cast<std::uintptr_t>(words[4]));
  for (std::size_t i = 0; i < stored.plan.words.size(); ++i) {
    stored.plan.words[i] = words[kFirstWord + i];
  }
  return stored;
}

RunContext checked_context(std::string_view op, const BackendPlan& plan, bool on_cpu,
                           void* workspace, void* stream) {
  const std::string wanted = std::to_string(plan.workspace_bytes) + " bytes aligned to " +
                             std::to_string(plan.workspace_alignment);
  if (plan.workspace_bytes > 0) {
    if (workspace == nullptr) throw_invalid(op, "workspace", "NULL", wanted);
    if (reinterpret_cast<std::uintptr_t>(workspace) % plan.workspace_alignment != 0) {
      throw_invalid(op, "workspace", "a misaligned address", wanted);
    }
  }
  if (on_cpu && stream != nullptr) {
    throw_invalid(op, "stream", "a stream with CPU tensors", "NULL");
  }
  return {static_cast<std::byte*>(workspace), stream};
}

}  // namespace onchip::ops
