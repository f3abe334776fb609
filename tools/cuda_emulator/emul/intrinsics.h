// SPDX-License-Identifier: Apache-2.0
// Integer functions and __trap.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "emul/types.h"

inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __ffsll(long long v) { return __builtin_ffsll(v); }
inline int __clz(int v) { return v == 0 ? 32 : __builtin_clz(unsigned(v)); }

// Loads and stores with cache hints, for the types that CUDA supports and the project uses.
// Misaligned accesses, which GPUs reject and x86 CPUs accept, are reported as errors.
template <class T>
void emul_require_aligned(const T* address) {
  if (reinterpret_cast<uintptr_t>(address) % sizeof(T) != 0)
    throw std::runtime_error("misaligned address of an access of " + std::to_string(sizeof(T)) +
                             " bytes");
}
template <class T>
T __ldcs(const T* address) {
  emul_require_aligned(address);
  return *address;
}
template <class T>
void __stcs(T* address, T value) {
  emul_require_aligned(address);
  *address = value;
}

// These functions are not templates, because overload resolution must prefer them to std::min and
// std::max in files with `using namespace std`.
#define KV_EMUL_MIN_MAX(T)                                   \
  constexpr inline T min(T a, T b) { return b < a ? b : a; } \
  constexpr inline T max(T a, T b) { return a < b ? b : a; }
KV_EMUL_MIN_MAX(int)
KV_EMUL_MIN_MAX(unsigned)
KV_EMUL_MIN_MAX(int64_t)
KV_EMUL_MIN_MAX(uint64_t)
#undef KV_EMUL_MIN_MAX

[[noreturn]] inline void __trap() {
  throw std::runtime_error("__trap() in block " + emul::to_string(blockIdx) + ", thread " +
                           emul::to_string(threadIdx));
}
