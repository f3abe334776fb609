#include "emul/runtime/kernels.h"

#include <cxxabi.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <stdexcept>
#include <unordered_map>

#include "emul/runtime/api.h"
#include "emul/runtime/bound.h"
#include "emul/runtime/capture.h"
#include "emul/runtime/device_memory.h"
#include "emul/runtime/settings.h"

namespace kvcache::gpuless {
namespace {

constexpr size_t kSharedBytes = 48 * 1024;   // without asking
constexpr int kMaxSharedBytes = 227 * 1024;  // per thread block, compute capability 9.0
constexpr unsigned kMostClusterBlocks = 8;   // that every device with clusters launches

struct Kernel {
  const char* mangled;
  size_t allowed_shared_bytes = kSharedBytes;
  long num_launches = 0;
  bool is_loaded = false;  // by a launch, or because its attributes were asked for
};

std::unordered_map<const void*, Kernel>& kernels() {
  static auto* const all = new std::unordered_map<const void*, Kernel>;
  return *all;
}

// Kernels of others that may be left out: no tensor that a caller sees depends on them.
struct LeftOut {
  const char* part_of_name;
  const char* why;
};
constexpr LeftOut kLeftOut[] = {
    {"FillFunctor<long>", "torch writes its random state of a graph; no graph here draws numbers"},
};

std::string demangled(const char* mangled) {
  int status = 0;
  char* text = abi::__cxa_demangle(mangled, nullptr, nullptr, &status);
  std::string name = text == nullptr ? mangled : text;
  std::free(text);
  return name;
}

// "void kvcache::f<int>(long)" as a compiler names a kernel -> "kvcache::f<int>(long)".
std::string without_result(std::string name) {
  return name.compare(0, 5, "void ") == 0 ? name.substr(5) : name;
}

// "kvcache::f(long)" -> "kvcache::f"; as it is where nothing in parentheses ends the name.
std::string without_parameters(const std::string& name) {
  if (name.empty() || name.back() != ')') return name;
  size_t at = name.size();
  for (int depth = 0; at-- > 0;) {
    depth += name[at] == ')' ? 1 : name[at] == '(' ? -1 : 0;
    if (depth == 0) return name.substr(0, at);
  }
  return name;
}

// The kernel's name within that of Named<&kernel>.
std::string name_in_type(const char* type_name) {
  std::string name = demangled(type_name);
  const size_t begin = name.find('<') + 1, end = name.rfind('>');
  name = name.substr(begin, end - begin);
  if (name[0] == '&') name = name.substr(1);
  if (name[0] == '(') name = name.substr(1, name.size() - 2);
  return without_result(name);
}

bool is_own(const std::string& name) { return name.compare(0, 9, "kvcache::") == 0; }

using BoundByName = std::map<std::string, const Bound*>;

BoundByName load_bound() {
  BoundByName found;
  const std::string& path = settings().kernels;
  if (path.empty()) return found;
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  auto* const list = library == nullptr ? nullptr
                                        : reinterpret_cast<const Bound* (*)(size_t*)>(
                                              dlsym(library, "kvcache_gpuless_bound_kernels"));
  if (list == nullptr) {
    say("cannot load the emulated kernels: %s", dlerror());
    std::abort();
  }
  size_t count = 0;
  const Bound* bound = list(&count);
  for (size_t i = 0; i < count; ++i) {
    const std::string name = name_in_type(bound[i].type_name);
    const auto [at, is_new] = found.emplace(name, &bound[i]);
    // Weak symbols make one registration of what several sources instantiate; two different
    // kernels of one name would be launched one for the other.
    if (!is_new && std::strcmp(at->second->type_name, bound[i].type_name) != 0) {
      say("two emulated kernels are called %s", name.c_str());
      std::abort();
    }
  }
  return found;
}

const BoundByName& bound() {
  static const auto* const all = new BoundByName(load_bound());
  return *all;
}

bool fits(dim3 grid, dim3 block) {
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  return grid.x > 0 && grid.x <= 0x7fffffffu && grid.y > 0 && grid.y <= 65535 && grid.z > 0 &&
         grid.z <= 65535 && threads > 0 && threads <= 1024 && block.z <= 64;
}

cudaError_t error_of(const std::exception& error) {
  return std::strstr(error.what(), "misaligned") ? cudaErrorMisalignedAddress
                                                 : cudaErrorLaunchFailure;
}

Work run_kernel(const std::string& name, std::function<void()> body) {
  return [name, body = std::move(body)] {
    const OpenDevice open(name.c_str());
    try {
      body();
    } catch (const std::exception& error) {
      say("kernel %s failed: %s", name.c_str(), error.what());
      set_sticky(error_of(error));
    }
  };
}

// The kernel of a demangled name; nullptr where there is none. Kernels that are not templates stand
// in a type's name without their parameters.
const Bound* find_bound(const std::string& name) {
  for (const std::string& key : {name, without_parameters(name)}) {
    const auto found = bound().find(key);
    if (found != bound().end()) return found->second;
  }
  return nullptr;
}

cudaError_t refuse_foreign(const std::string& name) {
  for (const LeftOut& left : kLeftOut) {
    if (name.find(left.part_of_name) != std::string::npos) return cudaSuccess;
  }
  say("cannot run this kernel%s: %s", is_own(name) ? " (no emulated kernel of that name)" : "",
      name.c_str());
  return cudaErrorInvalidDeviceFunction;
}

}  // namespace

void register_kernel(const void* stub, const char* mangled_name) {
  kernels().emplace(stub, Kernel{mangled_name});
}

bool is_kernel(const void* stub) { return kernels().count(stub) > 0; }

bool load_kernel(const void* stub) {
  const auto found = kernels().find(stub);
  if (found != kernels().end()) found->second.is_loaded = true;
  return found != kernels().end();
}

cudaError_t allow_shared_bytes(const void* stub, int bytes) {
  const auto found = kernels().find(stub);
  if (found == kernels().end()) return cudaErrorInvalidDeviceFunction;
  if (bytes < 0 || bytes > kMaxSharedBytes) return cudaErrorInvalidValue;
  found->second.allowed_shared_bytes = std::max(kSharedBytes, size_t(bytes));
  return cudaSuccess;
}

cudaError_t launch(const void* stub, dim3 grid, dim3 block, void** arguments, size_t shared_bytes,
                   unsigned cluster, Stream& stream) {
  const auto found = kernels().find(stub);
  if (found == kernels().end()) return cudaErrorInvalidDeviceFunction;
  Kernel& kernel = found->second;
  const std::string name = without_result(demangled(kernel.mangled));
  if (!fits(grid, block)) return cudaErrorInvalidConfiguration;
  if (cluster < 1 || cluster > kMostClusterBlocks || grid.x % cluster != 0) {
    return cudaErrorInvalidClusterSize;
  }
  if (shared_bytes > kernel.allowed_shared_bytes) {
    say("%s wants %zu bytes of shared memory, allowed are %zu", name.c_str(), shared_bytes,
        kernel.allowed_shared_bytes);
    return cudaErrorInvalidValue;
  }
  // Loading allocates, as drivers before 12.3 do at a kernel's first launch.
  if (!kernel.is_loaded && settings().no_loading_in_captures) {
    if (const cudaError_t error = refuse_while_capturing()) return error;
  }
  kernel.is_loaded = true;
  ++kernel.num_launches;
  const Bound* emulated = find_bound(name);
  if (emulated == nullptr) return refuse_foreign(name);
  const LaunchShape shape{
      {grid.x, grid.y, grid.z}, {block.x, block.y, block.z}, shared_bytes, cluster};
  return submit_or_capture(stream, run_kernel(name, emulated->bind(arguments, shape)));
}

std::vector<std::string> unbound_kernels() {
  std::vector<std::string> names;
  for (const auto& [stub, kernel] : kernels()) {
    if (std::strstr(kernel.mangled, "kvcache") == nullptr) continue;
    const std::string name = without_result(demangled(kernel.mangled));
    if (is_own(name) && find_bound(name) == nullptr) names.push_back(name);
  }
  return names;
}

size_t num_bound_kernels() { return bound().size(); }

void print_launches() {
  for (const auto& [stub, kernel] : kernels()) {
    if (kernel.num_launches > 0)
      say("%ld x %s", kernel.num_launches, demangled(kernel.mangled).c_str());
  }
}

}  // namespace kvcache::gpuless
