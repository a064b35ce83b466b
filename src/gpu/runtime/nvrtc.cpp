#include "gpu/runtime/nvrtc.hpp"

#include <dlfcn.h>
#include <link.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <memory>
#include <utility>

#include "core/settings.hpp"
#include "core/status.hpp"

namespace onchip::gpu {

using NvrtcResult = std::int32_t;
using NvrtcProgram = struct NvrtcProgramObject*;

#define ONCHIP_NVRTC_FUNCTIONS(X)                                                          \
  X(nvrtcVersion, NvrtcResult, (std::int32_t* major, std::int32_t* minor))                 \
  X(nvrtcGetErrorString, const char*, (NvrtcResult result))                                \
  X(nvrtcCreateProgram, NvrtcResult,                                                       \
    (NvrtcProgram * program, const char* text, const char* name, std::int32_t num_headers, \
     const char* const* headers, const char* const* include_names))                        \
  X(nvrtcDestroyProgram, NvrtcResult, (NvrtcProgram * program))                            \
  X(nvrtcCompileProgram, NvrtcResult,                                                      \
    (NvrtcProgram program, std::int32_t num_options, const char* const* options))          \
  X(nvrtcGetProgramLogSize, NvrtcResult, (NvrtcProgram program, std::size_t* size))        \
  X(nvrtcGetProgramLog, NvrtcResult, (NvrtcProgram program, char* log))                    \
  X(nvrtcGetCUBINSize, NvrtcResult, (NvrtcProgram program, std::size_t* size))             \
  X(nvrtcGetCUBIN, NvrtcResult, (NvrtcProgram program, char* cubin))

namespace {

struct Nvrtc {
#define ONCHIP_DECLARE(name, result, parameters) result(*name) parameters = nullptr;
  ONCHIP_NVRTC_FUNCTIONS(ONCHIP_DECLARE)
#undef ONCHIP_DECLARE
};

constexpr const char* kSonames[] = {"libnvrtc.so.13", "libnvrtc.so.12"};
constexpr const char* kPackageFolders[] = {"/nvidia/cu13/lib/", "/nvidia/cuda_nvrtc/lib/"};
constexpr const char* kToolkitFolders[] = {"/lib64/", "/lib/", "/targets/x86_64-linux/lib/"};

bool readable(const std::string& path) { return access(path.c_str(), R_OK) == 0; }

std::string loader_message() {
  const char* why = dlerror();
  return why == nullptr ? "dlopen fails" : why;
}

std::string path_of(void* handle) {
  const link_map* map = nullptr;
  if (dlinfo(handle, RTLD_DI_LINKMAP, static_cast<void*>(&map)) != 0 || map == nullptr) return {};
  return map->l_name;
}

// NVRTC opens its builtins library by bare name at the first compile and does not look beside
// itself. Once that name is loaded, from wherever, it finds it.
void load_builtins(const std::string& library, const std::string& version) {
  const std::size_t slash = library.rfind('/');
  if (slash == std::string::npos) return;
  const std::string path = library.substr(0, slash + 1) + "libnvrtc-builtins.so." + version;
  // Where it is not beside the library, the loader's search path may still hold it: the compile
  // tells.
  static_cast<void>(dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL));
}

std::string bind_nvrtc(void* handle, Nvrtc& api) {
  std::string missing;
#define ONCHIP_BIND(name, result, parameters)                            \
  api.name = reinterpret_cast<decltype(api.name)>(dlsym(handle, #name)); \
  if (api.name == nullptr) missing += missing.empty() ? #name : ", " #name;
  ONCHIP_NVRTC_FUNCTIONS(ONCHIP_BIND)
#undef ONCHIP_BIND
  return missing.empty() ? missing : "it lacks " + missing;
}

class Program {
 public:
  Program(const Nvrtc& api, const CompileRequest& request) : api_(api) {
    std::vector<const char*> texts;
    std::vector<const char*> names;
    texts.reserve(request.headers.size());
    names.reserve(request.headers.size());
    for (const EmbeddedFile* header : request.headers) {
      texts.push_back(header->text);
      names.push_back(header->path);
    }
    check(api_.nvrtcCreateProgram(&program_, request.text.c_str(), request.name.c_str(),
                                  static_cast<std::int32_t>(texts.size()), texts.data(),
                                  names.data()),
          "nvrtcCreateProgram");
  }
  ~Program() { static_cast<void>(api_.nvrtcDestroyProgram(&program_)); }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  CompileResult compile(const std::vector<std::string>& flags) {
    std::vector<const char*> options;
    options.reserve(flags.size());
    for (const std::string& flag : flags) options.push_back(flag.c_str());
    const NvrtcResult status = api_.nvrtcCompileProgram(
        program_, static_cast<std::int32_t>(options.size()), options.data());

    CompileResult result;
    std::size_t size = 0;
    if (api_.nvrtcGetProgramLogSize(program_, &size) == 0 && size > 1) {
      result.log.resize(size);
      check(api_.nvrtcGetProgramLog(program_, result.log.data()), "nvrtcGetProgramLog");
      result.log.resize(std::char_traits<char>::length(result.log.c_str()));
    }
    // After a failed compile the cubin is still "there", with size 0 and status success.
    if (status != 0) {
      result.log = std::string(api_.nvrtcGetErrorString(status)) + "\n" + result.log;
      return result;
    }
    check(api_.nvrtcGetCUBINSize(program_, &size), "nvrtcGetCUBINSize");
    result.cubin.resize(size);
    if (size > 0) check(api_.nvrtcGetCUBIN(program_, result.cubin.data()), "nvrtcGetCUBIN");
    return result;
  }

 private:
  void check(NvrtcResult status, const char* what) const {
    if (status == 0) return;
    throw Error(ONCHIP_COMPILE_FAILED, std::string(what) + ": " + api_.nvrtcGetErrorString(status));
  }

  const Nvrtc& api_;
  NvrtcProgram program_ = nullptr;
};

class Finder {
 public:
  bool open(const char* name, int flags, const char* place) {
    void* handle = dlopen(name, RTLD_NOW | RTLD_LOCAL | flags);
    if (handle == nullptr) {
      // Clears the loader's message: nothing loaded yet is no fault to report.
      const std::string why = loader_message();
      if ((flags & RTLD_NOLOAD) == 0) note(place, why);
      return false;
    }
    const std::string fault = bind_nvrtc(handle, api_);
    if (!fault.empty()) {
      note(place, path_of(handle) + ": " + fault);
      return false;
    }
    std::int32_t major = 0;
    std::int32_t minor = 0;
    if (api_.nvrtcVersion(&major, &minor) != 0 || major < 12) {
      note(place, path_of(handle) + ": version " + std::to_string(major) + "." +
                      std::to_string(minor) + ", wanted 12.0 or newer");
      return false;
    }
    has_own_cache_ = major >= 13;
    version_ = std::to_string(major) + "." + std::to_string(minor);
    path_ = path_of(handle);
    load_builtins(path_, version_);
    return true;
  }

  // The first of the sonames that is a file in the folder.
  bool open_in(const std::string& folder, const char* place) {
    for (const char* soname : kSonames) {
      const std::string path = folder + soname;
      if (readable(path) && open(path.c_str(), 0, place)) return true;
    }
    return false;
  }

  void note(const std::string& place, const std::string& why) {
    problem_ += problem_.empty() ? place : "; " + place;
    problem_ += ": " + why;
  }

  void fill(Compiler& compiler) const {
    compiler.version = version_;
    compiler.path = path_;
    compiler.compile = [api = api_, own_cache = has_own_cache_](const CompileRequest& request) {
      // Where there is a driver, NVRTC keeps a cache of its own, whose hits come without the log
      // that resources are read from. Ours is enough.
      std::vector<std::string> flags = request.flags;
      if (own_cache) flags.emplace_back("--no-cache");
      return Program(api, request).compile(flags);
    };
  }

  const std::string& problem() const { return problem_; }

 private:
  Nvrtc api_;
  bool has_own_cache_ = false;
  std::string version_;
  std::string path_;
  std::string problem_;
};

bool find_nvrtc(const NvrtcSearch& search, Finder& finder) {
  if (!search.setting.empty()) return finder.open(search.setting.c_str(), 0, "ONCHIP_NVRTC");
  if (search.loaded_copy) {
    for (const char* soname : kSonames) {
      if (finder.open(soname, RTLD_NOLOAD, "already loaded")) return true;
    }
  }
  for (const std::string& root : search.package_roots) {
    for (const char* folder : kPackageFolders) {
      if (finder.open_in(root + folder, "Python packages")) return true;
    }
  }
  if (!search.cuda_home.empty()) {
    for (const char* folder : kToolkitFolders) {
      if (finder.open_in(search.cuda_home + folder, "CUDA_HOME")) return true;
    }
    finder.note("CUDA_HOME", search.cuda_home + " holds no libnvrtc.so.13 or .12");
  }
  if (search.system) {
    for (const char* soname : kSonames) {
      if (finder.open(soname, 0, "system")) return true;
    }
  }
  return false;
}

void add_unique(std::vector<std::string>& list, std::string text) {
  if (std::find(list.begin(), list.end(), text) == list.end()) list.push_back(std::move(text));
}

}  // namespace

std::vector<std::string> package_roots(const std::string& own_path,
                                       const std::vector<std::string>& loaded) {
  std::vector<std::string> roots;
  // <root>/onchip/_native.so or <root>/onchip/lib/libonchip.so, with room for one folder more.
  std::string folder = own_path;
  for (int level = 0; level < 4; ++level) {
    const std::size_t slash = folder.rfind('/');
    if (slash == std::string::npos || slash == 0) break;
    folder.resize(slash);
    add_unique(roots, folder);
  }
  for (const std::string& path : loaded) {
    for (const char* name : {"/site-packages/", "/dist-packages/"}) {
      const std::size_t at = path.find(name);
      if (at == std::string::npos) continue;
      add_unique(roots, path.substr(0, path.find('/', at + 1)));
    }
  }
  return roots;
}

NvrtcSearch process_nvrtc_search() {
  NvrtcSearch search;
  search.setting = settings().nvrtc;
  search.cuda_home = settings().cuda_home;
  std::string own_path;
  Dl_info info{};
  if (dladdr(reinterpret_cast<const void*>(&process_nvrtc_search), &info) != 0 &&
      info.dli_fname != nullptr) {
    own_path = info.dli_fname;
  }
  std::vector<std::string> loaded;
  dl_iterate_phdr(
      [](dl_phdr_info* object, std::size_t, void* list) {
        if (object->dlpi_name != nullptr) {
          static_cast<std::vector<std::string>*>(list)->emplace_back(object->dlpi_name);
        }
        return 0;
      },
      &loaded);
  search.package_roots = package_roots(own_path, loaded);
  return search;
}

std::string load_nvrtc(const NvrtcSearch& search, Compiler& compiler) {
  Finder finder;
  if (!find_nvrtc(search, finder)) {
    return "no NVRTC to compile GPU kernels with (" + finder.problem() +
           "); pip install nvidia-cuda-nvrtc, or set ONCHIP_NVRTC";
  }
  finder.fill(compiler);
  return {};
}

const CompilerState& nvrtc_state() {
  static const CompilerState state = [] {
    static Compiler compiler;
    CompilerState result;
    result.problem = load_nvrtc(process_nvrtc_search(), compiler);
    if (result.problem.empty()) result.compiler = &compiler;
    return result;
  }();
  return state;
}

namespace {

// The number that ends right before `label`, 0 if the line has no such label.
std::int32_t number_before(std::string_view line, std::string_view label) {
  const std::size_t at = line.find(label);
  if (at == std::string_view::npos) return 0;
  std::size_t begin = at;
  while (begin > 0 && line[begin - 1] >= '0' && line[begin - 1] <= '9') --begin;
  std::int32_t value = 0;
  std::from_chars(line.data() + begin, line.data() + at, value);
  return value;
}

}  // namespace

KernelResources parse_ptxas_log(std::string_view log, std::string_view entry) {
  KernelResources resources;
  // ptxas names a function in "Compiling entry function 'x'" and "Function properties for x"; the
  // lines that follow are about it until the next name.
  bool ours = false;
  while (!log.empty()) {
    const std::size_t end = std::min(log.find('\n'), log.size());
    const std::string_view line = log.substr(0, end);
    log.remove_prefix(std::min(end + 1, log.size()));
    for (const std::string_view label :
         {"Compiling entry function '", "Function properties for "}) {
      const std::size_t at = line.find(label);
      if (at == std::string_view::npos) continue;
      std::string_view name = line.substr(at + label.size());
      name = name.substr(0, name.find_first_of("' \r"));
      ours = name == entry;
    }
    if (line.find("(C75") != std::string_view::npos) ++resources.advisories;
    if (!ours) continue;
    if (line.find("bytes spill stores") != std::string_view::npos) {
      resources.stack_bytes = number_before(line, " bytes stack frame");
      resources.spill_store_bytes = number_before(line, " bytes spill stores");
      resources.spill_load_bytes = number_before(line, " bytes spill loads");
    }
    if (line.find("Used ") != std::string_view::npos) {
      resources.registers = number_before(line, " registers");
      resources.barriers = number_before(line, " barriers");
      resources.static_shared_bytes = number_before(line, " bytes smem");
    }
  }
  return resources;
}

}  // namespace onchip::gpu
