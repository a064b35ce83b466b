// NVRTC, opened at run time: CUDA C++ text to a cubin for one architecture.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "gpu/runtime/embedded.hpp"

namespace onchip::gpu {

struct CompileRequest {
  std::string name;                          // of the text, as messages show it
  std::string text;                          // what is compiled
  std::vector<const EmbeddedFile*> headers;  // all that it may include
  std::vector<std::string> flags;            // --gpu-architecture included
};

struct CompileResult {
  std::vector<char> cubin;  // empty: the compile failed, `log` says why
  std::string log;          // warnings, and what ptxas says about registers and spills
};

// A compiler by what it does; tests put others in its place.
struct Compiler {
  std::string version;  // "13.0"; part of the key of everything it made
  std::string path;     // of the library
  std::function<CompileResult(const CompileRequest&)> compile;
};

struct CompilerState {
  const Compiler* compiler = nullptr;  // null: `problem` says where it was looked for
  std::string problem;
};

// What find_nvrtc looks at, in this order.
struct NvrtcSearch {
  std::string setting;                     // a path; if not empty, nothing else is tried
  bool loaded_copy = true;                 // one that the process already holds
  std::vector<std::string> package_roots;  // folders that may hold nvidia/cu13/lib
  std::string cuda_home;
  bool system = true;  // the loader's search path
};

// As the settings and the folders of this process say.
NvrtcSearch process_nvrtc_search();

// Opens NVRTC. Returns what was tried where if there is none, "" if `compiler` is filled.
std::string load_nvrtc(const NvrtcSearch& search, Compiler& compiler);

// The process's NVRTC, looked for at the first call.
const CompilerState& nvrtc_state();

// The folders that hold Python packages: those above the given file, then those that any of
// `loaded` lies in.
std::vector<std::string> package_roots(const std::string& own_path,
                                       const std::vector<std::string>& loaded);

// ---- what ptxas says

struct KernelResources {
  std::int32_t registers = 0;
  std::int32_t spill_store_bytes = 0;
  std::int32_t spill_load_bytes = 0;
  std::int32_t stack_bytes = 0;
  std::int32_t static_shared_bytes = 0;
  std::int32_t barriers = 0;
  std::int32_t advisories = 0;  // C75xx lines: wgmma serialised, setmaxnreg ignored, ...
  friend bool operator==(const KernelResources&, const KernelResources&) = default;
};

// Reads the part of a log with --ptxas-options=-v that concerns the entry.
KernelResources parse_ptxas_log(std::string_view log, std::string_view entry);

}  // namespace onchip::gpu
