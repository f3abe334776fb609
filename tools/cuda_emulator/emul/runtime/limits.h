// SPDX-License-Identifier: Apache-2.0
// Launch limits that follow from kernels' machine code. They are read from the file named by
// KVCACHE_GPULESS_LIMITS, which has one line per kernel with its mangled name, registers per
// thread, bytes of static shared memory and threads per block. tests/machinery/gpu_less/limits.py
// creates the file from a cubin.
#pragma once

#include <cstddef>
#include <map>
#include <string>

namespace kvcache::gpuless {

constexpr size_t kSharedBytes = 48 * 1024;  // per thread block, unless a kernel opts in to more
// Limits per thread block and per multiprocessor for compute capability 9.0.
constexpr size_t kMaxSharedBytes = 227 * 1024;
constexpr size_t kSharedPerMultiprocessor = 228 * 1024, kReservedSharedBytes = 1024;
constexpr int kRegisters = 65536;  // per thread block, and per multiprocessor
constexpr int kMaxThreads = 1024, kThreadsPerMultiprocessor = 2048, kBlocksPerMultiprocessor = 32;

struct Limits {
  int registers = 0;  // per thread; 0: unknown
  size_t static_shared_bytes = 0;
  int max_threads = kMaxThreads;
};

using LimitsByName = std::map<std::string, Limits>;

// Reads the limits, keyed by demangled name. Aborts with a message if the file cannot be read.
LimitsByName read_limits(const std::string& path, std::string (*name_of)(const char* mangled));

// Returns the number of registers that a thread block with this number of threads uses.
int registers_of_block(const Limits& limits, int threads);
// Returns the number of thread blocks that fit into a multiprocessor at the same time.
int blocks_per_multiprocessor(const Limits& limits, int threads, size_t dynamic_shared_bytes);

}  // namespace kvcache::gpuless
