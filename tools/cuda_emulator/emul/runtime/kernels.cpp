// SPDX-License-Identifier: Apache-2.0
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
#include "emul/runtime/counters.h"
#include "emul/runtime/device_memory.h"
#include "emul/runtime/limits.h"
#include "emul/runtime/settings.h"

namespace kvcache::gpuless {
namespace {

constexpr unsigned kMostClusterBlocks = 8;  // supported by every device with clusters

struct Kernel {
  const char* mangled;
  size_t asked_shared_bytes = 0;  // dynamic shared memory allowed by cudaFuncSetAttribute
  long num_launches = 0;
  bool is_loaded = false;  // loaded by a launch or by a query of its attributes
};

std::unordered_map<const void*, Kernel>& kernels() {
  static auto* const all = new std::unordered_map<const void*, Kernel>;
  return *all;
}

// Kernels from other libraries that may be skipped, because no tensor that a caller can observe
// depends on them.
struct LeftOut {
  const char* part_of_name;
  const char* why;
};
constexpr LeftOut kLeftOut[] = {
    {"FillFunctor<long>",
     "sets the random state of a CUDA graph; the tests' graphs draw no random numbers"},
};

// torch.cuda._sleep, in which a thread spins for a number of clock cycles.
constexpr const char* kSpinKernel = "at::cuda::(anonymous namespace)::spin_kernel";
constexpr double kCyclesPerMillisecond = 2e6;

std::string demangled(const char* mangled) {
  int status = 0;
  char* text = abi::__cxa_demangle(mangled, nullptr, nullptr, &status);
  std::string name = text == nullptr ? mangled : text;
  std::free(text);
  return name;
}

// Removes the return type from a demangled kernel name: "void kvcache::f<int>(long)" becomes
// "kvcache::f<int>(long)".
std::string without_result(std::string name) {
  return name.compare(0, 5, "void ") == 0 ? name.substr(5) : name;
}

// Removes the parameters: "kvcache::f(long)" becomes "kvcache::f". Names that do not end with
// parentheses are unchanged.
std::string without_parameters(const std::string& name) {
  if (name.empty() || name.back() != ')') return name;
  size_t at = name.size();
  for (int depth = 0; at-- > 0;) {
    depth += name[at] == ')' ? 1 : name[at] == '(' ? -1 : 0;
    if (depth == 0) return name.substr(0, at);
  }
  return name;
}

// Extracts the kernel's name from the name of Named<&kernel>.
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
    // If several sources instantiate the same template, weak symbols merge their registrations. Two
    // different kernels with the same name could not be distinguished at launch.
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

// Converts a mangled kernel name to the form used in launches.
std::string name_of(const char* mangled) { return without_result(demangled(mangled)); }

const LimitsByName& all_limits() {
  static const auto* const all = new LimitsByName(read_limits(settings().limits, &name_of));
  return *all;
}

Limits limits_of(const std::string& name) {
  const auto found = all_limits().find(name);
  return found == all_limits().end() ? Limits{} : found->second;
}

// Returns an error if the launch exceeds a limit. According to CUDA's documentation, such launches
// fail, but the error is not always specified.
cudaError_t refuse_beyond_limits(const Kernel& kernel, const std::string& name, dim3 block,
                                 size_t shared_bytes) {
  if (is_own(name) && !all_limits().empty() && all_limits().count(name) == 0) {
    say("the limits of %s are unknown: KVCACHE_GPULESS_LIMITS was written for another library",
        name.c_str());
    return cudaErrorInvalidDeviceFunction;
  }
  const Limits limits = limits_of(name);
  const size_t static_bytes = std::min(limits.static_shared_bytes, kSharedBytes);
  const size_t allowed = std::max(kernel.asked_shared_bytes, kSharedBytes - static_bytes);
  if (shared_bytes > allowed) {
    say("%s needs %zu bytes of shared memory, but at most %zu are available", name.c_str(),
        shared_bytes, allowed);
    return cudaErrorInvalidValue;
  }
  const int threads = int(block.x * block.y * block.z);
  if (threads > limits.max_threads) {
    say("%s is launched with %d threads per block, compiled for at most %d", name.c_str(), threads,
        limits.max_threads);
    return cudaErrorInvalidValue;
  }
  if (registers_of_block(limits, threads) > kRegisters) {
    say("%s is launched with %d threads of %d registers, more than a multiprocessor has",
        name.c_str(), threads, limits.registers);
    return cudaErrorLaunchOutOfResources;
  }
  return cudaSuccess;
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

// Returns the kernel with a demangled name, or nullptr. In type names, kernels that are not
// templates have no parameters.
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
  const size_t static_bytes = limits_of(name_of(found->second.mangled)).static_shared_bytes;
  if (bytes < 0 || size_t(bytes) + static_bytes > kMaxSharedBytes) return cudaErrorInvalidValue;
  found->second.asked_shared_bytes = size_t(bytes);
  return cudaSuccess;
}

cudaError_t launch(const void* stub, dim3 grid, dim3 block, void** arguments, size_t shared_bytes,
                   unsigned cluster, Stream& stream) {
  const auto found = kernels().find(stub);
  if (found == kernels().end()) return cudaErrorInvalidDeviceFunction;
  Kernel& kernel = found->second;
  const std::string name = name_of(kernel.mangled);
  if (!fits(grid, block)) return cudaErrorInvalidConfiguration;
  if (cluster < 1 || cluster > kMostClusterBlocks || grid.x % cluster != 0) {
    return cudaErrorInvalidClusterSize;
  }
  if (const cudaError_t error = refuse_beyond_limits(kernel, name, block, shared_bytes)) {
    return error;
  }
  // Loading a kernel allocates memory. Drivers before 12.3 load a kernel at its first launch.
  if (!kernel.is_loaded && settings().no_loading_in_captures) {
    if (const cudaError_t error = refuse_while_capturing()) return error;
  }
  kernel.is_loaded = true;
  ++kernel.num_launches;
  if (is_own(name)) count(Counter::kLaunches);
  if (without_parameters(name) == kSpinKernel) {
    const double cycles = double(*static_cast<int64_t*>(arguments[0]));
    return pause_or_capture(stream, cycles / kCyclesPerMillisecond);
  }
  const Bound* emulated = find_bound(name);
  if (emulated == nullptr) return refuse_foreign(name);
  const LaunchShape shape{
      {grid.x, grid.y, grid.z}, {block.x, block.y, block.z}, shared_bytes, cluster};
  return submit_or_capture(stream, run_kernel(name, emulated->bind(arguments, shape)));
}

cudaError_t describe(const void* stub, cudaFuncAttributes* attributes) {
  count(Counter::kDeviceQueries);
  if (!load_kernel(stub)) return cudaErrorInvalidDeviceFunction;
  const Kernel& kernel = kernels().at(stub);
  const Limits limits = limits_of(name_of(kernel.mangled));
  std::memset(attributes, 0, sizeof *attributes);
  attributes->sharedSizeBytes = limits.static_shared_bytes;
  attributes->maxThreadsPerBlock = limits.max_threads;
  attributes->maxDynamicSharedSizeBytes =
      int(std::max(kernel.asked_shared_bytes, kSharedBytes - limits.static_shared_bytes));
  // Callers expect a positive number, even for kernels whose machine code is unknown.
  attributes->numRegs = limits.registers > 0 ? limits.registers : 32;
  attributes->ptxVersion = attributes->binaryVersion = 90;
  return cudaSuccess;
}

cudaError_t occupancy(const void* stub, int threads, size_t shared_bytes, int* blocks) {
  count(Counter::kDeviceQueries);
  const auto found = kernels().find(stub);
  if (found == kernels().end()) return cudaErrorInvalidDeviceFunction;
  if (threads <= 0 || threads > kMaxThreads) return cudaErrorInvalidValue;
  const Limits limits = limits_of(name_of(found->second.mangled));
  *blocks =
      threads > limits.max_threads ? 0 : blocks_per_multiprocessor(limits, threads, shared_bytes);
  return cudaSuccess;
}

std::vector<std::string> unbound_kernels() {
  std::vector<std::string> names;
  for (const auto& [stub, kernel] : kernels()) {
    if (std::strstr(kernel.mangled, "kvcache") == nullptr) continue;
    const std::string name = name_of(kernel.mangled);
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
