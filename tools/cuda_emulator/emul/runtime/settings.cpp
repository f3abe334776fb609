// SPDX-License-Identifier: Apache-2.0
#include "emul/runtime/settings.h"

#include <cstdio>
#include <cstdlib>

namespace kvcache::gpuless {
namespace {

std::string text(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

uint64_t number(const char* name, uint64_t otherwise) {
  const std::string value = text(name);
  if (value.empty()) return otherwise;
  char* end = nullptr;
  const uint64_t parsed = std::strtoull(value.c_str(), &end, 10);
  if (*end == '\0' && value[0] != '-') return parsed;
  std::fprintf(stderr, "gpu-less: %s is \"%s\": expected a number\n", name, value.c_str());
  std::abort();
}

// Returns true if the variable's value is `word`, and false if it is `other`. Aborts for any other
// value, to detect typos.
bool holds(const char* name, const char* word, const char* other = "") {
  const std::string value = text(name);
  if (value.empty() || value == word) return !value.empty();
  if (value == other) return false;
  std::fprintf(stderr, "gpu-less: %s is \"%s\": expected \"%s\"%s%s or nothing\n", name,
               value.c_str(), word, *other == 0 ? "" : ", ", other);
  std::abort();
}

Settings read() {
  Settings s;
  s.seed = number("KVCACHE_GPULESS_SEED", 1);
  s.late = number("KVCACHE_GPULESS_LATE", 1) != 0;
  s.device_bytes = number("KVCACHE_GPULESS_DEVICE_BYTES", uint64_t{16} << 30);
  s.locked_bytes = number("KVCACHE_GPULESS_LOCKED_BYTES", UINT64_MAX);
  s.other_pointers = holds("KVCACHE_GPULESS_DEVICE_POINTERS", "different");
  s.joined_neighbours = holds("KVCACHE_GPULESS_NEIGHBOURS", "joined", "apart");
  s.batches_fail = holds("KVCACHE_GPULESS_BATCHES", "fail", "crash");
  s.batches_crash = holds("KVCACHE_GPULESS_BATCHES", "crash", "fail");
  s.no_loading_in_captures = holds("KVCACHE_GPULESS_LOADING", "lazy");
  s.limits = text("KVCACHE_GPULESS_LIMITS");
  s.kernels = text("KVCACHE_GPULESS_KERNELS");
  return s;
}

}  // namespace

const Settings& settings() {
  static const Settings* const s = new Settings(read());
  return *s;
}

}  // namespace kvcache::gpuless
