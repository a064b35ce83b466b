// What a GPU kernel is compiled for: its definition, the values of its fields, the architecture,
// and the text that follows from them.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "gpu/runtime/driver.hpp"
#include "gpu/runtime/embedded.hpp"
#include "gpu/runtime/nvrtc.hpp"

namespace onchip::gpu {

// Real architectures only: cubins are made for one, never PTX. "a" cubins run on that one alone.
struct Architecture {
  std::int16_t number = 0;  // 90
  bool specific = false;    // sm_90a
  friend bool operator==(const Architecture&, const Architecture&) = default;
};

std::string architecture_text(Architecture architecture);

inline constexpr std::size_t kMaxSpecFields = 20;

struct KernelSpec;

// A kernel's part that does not depend on the call. One constant a kernel, with static storage.
struct KernelDefinition {
  const char* name;   // "cuda.sm90/attention_forward"
  const char* file;   // embedded, "gpu/kernels/sm90/attention_forward.cuh"
  const char* entry;  // its extern "C" __global__ function
  const char* macro;  // is defined as the comma-separated values of the fields
  std::span<const char* const> fields;

  // Dynamic shared memory that a launch of the spec takes.
  std::int32_t (*shared_bytes)(const KernelSpec& spec);

  // The architecture to compile for on a device, given 10 major + minor; number 0: none.
  Architecture (*architecture_for)(std::int32_t compute_capability);

  // Those built ahead of time, and the specs built for each (at most 40).
  std::span<const Architecture> architectures;
  std::int32_t registered_count;
  KernelSpec (*registered)(std::int32_t index);
};

inline constexpr std::int32_t kMaxRegisteredSpecs = 40;

struct KernelSpec {
  const KernelDefinition* kernel = nullptr;
  std::array<std::int32_t, kMaxSpecFields> values{};  // past the definition's fields: 0
  friend bool operator==(const KernelSpec&, const KernelSpec&) = default;
};

std::uint64_t hash_spec(const KernelSpec& spec);

// "cuda.sm90/attention_forward[bf16=1,head_dim_qk=128,...]"
std::string spec_text(const KernelSpec& spec);

// Where kernel text comes from: the embedded files, or a test's own.
struct KernelText {
  std::span<const EmbeddedFile> files;  // sorted by path
};

KernelText embedded_text();

// The file and everything it includes, each once, in order of first mention. Throws
// Error(compile_failed) where a file is missing.
std::vector<const EmbeddedFile*> source_closure(const KernelText& text, const std::string& path);

// Everything the compiler's output depends on, except the compiler itself.
struct KernelSource {
  CompileRequest request;
  std::string identity;  // one line each: library version, spec, architecture, source hash, flags
};

KernelSource kernel_source(const KernelText& text, const KernelSpec& spec,
                           Architecture architecture);

}  // namespace onchip::gpu
