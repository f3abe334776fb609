// SPDX-License-Identifier: Apache-2.0
#include "emul/runtime/limits.h"

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "emul/runtime/api.h"

namespace kvcache::gpuless {
namespace {

constexpr int kWarp = 32;
constexpr int kRegistersPerStep = 256;       // allocation granularity of a warp's registers
constexpr size_t kSharedBytesPerStep = 128;  // allocation granularity of a block's shared memory

template <class T>
T up_to_multiple(T n, T step) {
  return (n + step - 1) / step * step;
}

int warps_of(int threads) { return (threads + kWarp - 1) / kWarp; }

}  // namespace

LimitsByName read_limits(const std::string& path, std::string (*name_of)(const char* mangled)) {
  LimitsByName found;
  if (path.empty()) return found;
  std::ifstream file(path);
  std::string line, mangled;
  while (std::getline(file, line)) {
    std::istringstream fields(line);
    Limits limits;
    if (!(fields >> mangled >> limits.registers >> limits.static_shared_bytes >>
          limits.max_threads)) {
      say("%s has the line \"%s\": expected a name and three numbers", path.c_str(), line.c_str());
      std::abort();
    }
    found[name_of(mangled.c_str())] = limits;
  }
  if (found.empty()) {
    say("%s holds no limits of kernels", path.c_str());
    std::abort();
  }
  return found;
}

int registers_of_block(const Limits& limits, int threads) {
  return warps_of(threads) * up_to_multiple(limits.registers * kWarp, kRegistersPerStep);
}

int blocks_per_multiprocessor(const Limits& limits, int threads, size_t dynamic_shared_bytes) {
  int blocks =
      std::min(kThreadsPerMultiprocessor / (warps_of(threads) * kWarp), kBlocksPerMultiprocessor);
  if (limits.registers > 0) {
    blocks = std::min(blocks, kRegisters / registers_of_block(limits, threads));
  }
  const size_t shared =
      up_to_multiple(limits.static_shared_bytes + dynamic_shared_bytes, kSharedBytesPerStep) +
      kReservedSharedBytes;
  return std::min(blocks, int(kSharedPerMultiprocessor / shared));
}

}  // namespace kvcache::gpuless
