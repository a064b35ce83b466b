#include "gpu/runtime/kernel_spec.hpp"

#include <algorithm>
#include <cstring>
#include <string_view>

#include "core/status.hpp"
#include "gpu/runtime/sha256.hpp"

namespace onchip::gpu {

namespace {

#define ONCHIP_TEXT_(x) #x
#define ONCHIP_TEXT(x) ONCHIP_TEXT_(x)
constexpr char kLibraryVersion[] = ONCHIP_TEXT(ONCHIP_VERSION_MAJOR) "." ONCHIP_TEXT(
    ONCHIP_VERSION_MINOR) "." ONCHIP_TEXT(ONCHIP_VERSION_PATCH);
#undef ONCHIP_TEXT
#undef ONCHIP_TEXT_

const EmbeddedFile* find_file(const KernelText& text, std::string_view path) {
  const auto at = std::lower_bound(
      text.files.begin(), text.files.end(), path,
      [](const EmbeddedFile& file, std::string_view wanted) { return file.path < wanted; });
  return at != text.files.end() && at->path == path ? &*at : nullptr;
}

// The path that a line names if it is an #include "..." line, else "".
std::string_view included_path(std::string_view line) {
  const auto skip_blanks = [&line] {
    line.remove_prefix(std::min(line.find_first_not_of(" \t"), line.size()));
  };
  skip_blanks();
  if (!line.starts_with('#')) return {};
  line.remove_prefix(1);
  skip_blanks();
  if (!line.starts_with("include")) return {};
  line.remove_prefix(7);
  skip_blanks();
  if (!line.starts_with('"')) return {};
  line.remove_prefix(1);
  return line.substr(0, line.find('"'));
}

std::string values_text(const KernelSpec& spec) {
  std::string text;
  for (std::size_t i = 0; i < spec.kernel->fields.size(); ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(spec.values[i]);
  }
  return text;
}

}  // namespace

std::string architecture_text(Architecture architecture) {
  return "sm_" + std::to_string(architecture.number) + (architecture.specific ? "a" : "");
}

std::uint64_t hash_spec(const KernelSpec& spec) {
  // Multiply and fold, 8 bytes at a time; 30 ns would already show in the time of a call.
  static_assert(sizeof(spec.values) % 8 == 0);
  auto hash = static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(spec.kernel));
  for (std::size_t i = 0; i < kMaxSpecFields; i += 2) {
    std::uint64_t word;
    std::memcpy(&word, spec.values.data() + i, sizeof(word));
    hash = (hash ^ word) * 0x9e3779b97f4a7c15ull;
    hash ^= hash >> 29;
  }
  return hash;
}

std::string spec_text(const KernelSpec& spec) {
  std::string text = spec.kernel->name;
  text += '[';
  for (std::size_t i = 0; i < spec.kernel->fields.size(); ++i) {
    if (i > 0) text += ',';
    text.append(spec.kernel->fields[i]).append("=").append(std::to_string(spec.values[i]));
  }
  return text + ']';
}

KernelText embedded_text() { return {{embedded_files, embedded_file_count}}; }

std::vector<const EmbeddedFile*> source_closure(const KernelText& text, const std::string& path) {
  std::vector<const EmbeddedFile*> closure;
  const auto add = [&](std::string_view wanted, std::string_view by) {
    const EmbeddedFile* file = find_file(text, wanted);
    if (file == nullptr) {
      throw Error(ONCHIP_COMPILE_FAILED, "kernel text \"" + std::string(wanted) + "\", which " +
                                             std::string(by) + " includes, is not in the library");
    }
    if (std::find(closure.begin(), closure.end(), file) == closure.end()) closure.push_back(file);
  };
  add(path, "a kernel");
  // The list grows while it is walked.
  std::size_t next = 0;
  while (next < closure.size()) {
    const EmbeddedFile& file = *closure[next++];
    std::string_view rest(file.text, file.size);
    while (!rest.empty()) {
      const std::size_t end = std::min(rest.find('\n'), rest.size());
      const std::string_view name = included_path(rest.substr(0, end));
      if (!name.empty()) add(name, file.path);
      rest.remove_prefix(std::min(end + 1, rest.size()));
    }
  }
  return closure;
}

KernelSource kernel_source(const KernelText& text, const KernelSpec& spec,
                           Architecture architecture) {
  const KernelDefinition& kernel = *spec.kernel;
  KernelSource source;
  CompileRequest& request = source.request;
  request.name = std::string(kernel.entry) + ".cu";
  request.headers = source_closure(text, kernel.file);
  request.text = "#define " + std::string(kernel.macro) + " " + values_text(spec) +
                 "\n#include \"" + kernel.file + "\"\n";
  // The plan headers' constexpr functions carry no CUDA words: by default a function is the
  // device's. Without the source folder (the current one) on the include path, no file on disk can
  // slip in.
  request.flags = {"--gpu-architecture=" + architecture_text(architecture), "--std=c++20",
                   "--device-as-default-execution-space", "--no-source-include",
                   "--ptxas-options=-v"};

  std::string all;
  for (const EmbeddedFile* file : request.headers) {
    all.append(file->path).push_back('\0');
    all.append(file->text, file->size).push_back('\0');
  }
  std::string& identity = source.identity;
  identity = "onchip " + std::string(kLibraryVersion) + "\nspec " + spec_text(spec) +
             "\narchitecture " + architecture_text(architecture) + "\nsource " + hex(sha256(all)) +
             "\nprogram " + hex(sha256(request.text)) + "\nflags";
  for (const std::string& flag : request.flags) identity += ' ' + flag;
  identity += '\n';
  return source;
}

}  // namespace onchip::gpu
