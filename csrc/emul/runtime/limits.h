// What the compiler's machine code allows of each kernel's launches, from the file that
// KVCACHE_GPULESS_LIMITS names: a line per kernel with its mangled name, registers per thread,
// bytes of static shared memory and threads per block. tests/gpu_less/limits.py writes it from a
// cubin.
#pragma once

#include <cstddef>
#include <map>
#include <string>

namespace kvcache::gpuless {

constexpr size_t kSharedBytes = 48 * 1024;  // per thread block, without asking
// Per thread block and per multiprocessor, compute capability 9.0.
constexpr size_t kMaxSharedBytes = 227 * 1024;
constexpr size_t kSharedPerMultiprocessor = 228 * 1024, kReservedSharedBytes = 1024;
constexpr int kRegisters = 65536;  // per thread block, and per multiprocessor
constexpr int kMaxThreads = 1024, kThreadsPerMultiprocessor = 2048, kBlocksPerMultiprocessor = 32;

struct Limits {
  int registers = 0;  // per thread; 0: not known
  size_t static_shared_bytes = 0;
  int max_threads = kMaxThreads;
};

using LimitsByName = std::map<std::string, Limits>;

// By demangled name. Aborts, with a message, where the file cannot be read.
LimitsByName read_limits(const std::string& path, std::string (*name_of)(const char* mangled));

// Registers that a thread block of so many threads takes.
int registers_of_block(const Limits& limits, int threads);
// Thread blocks that fit into a multiprocessor at a time.
int blocks_per_multiprocessor(const Limits& limits, int threads, size_t dynamic_shared_bytes);

}  // namespace kvcache::gpuless
