// SPDX-License-Identifier: Apache-2.0
#include "emul/runtime/ranges.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <map>

#include "emul/runtime/api.h"
#include "emul/runtime/device_memory.h"
#include "emul/runtime/settings.h"

namespace kvcache::gpuless {
namespace {

constexpr uintptr_t kPage = 4096;

// All ranges, keyed by their first byte. The map is never destroyed, because memory is still freed
// while the process exits.
std::map<char*, Range>& ranges() {
  static auto* const all = new std::map<char*, Range>;
  return *all;
}

char* page_begin(const void* p) {
  return reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(p) / kPage * kPage);
}
char* page_end(const void* p) { return page_begin(static_cast<const char*>(p) + kPage - 1); }

size_t locked_bytes() {
  size_t sum = 0;
  for (const auto& [begin, r] : ranges()) {
    if (r.kind != RangeKind::kDevice) sum += size_t(page_end(begin + r.bytes) - page_begin(begin));
  }
  return sum;
}

bool may_lock(const char* begin, const char* end) {
  const size_t limit = settings().locked_bytes, locked = locked_bytes();
  return locked <= limit && size_t(end - begin) <= limit - locked;
}

bool shares_a_page(const char* begin, const char* end) {
  for (const auto& [at, r] : ranges()) {
    if (r.kind != RangeKind::kDevice && page_begin(at) < end && begin < page_end(at + r.bytes)) {
      return true;
    }
  }
  return false;
}

// Returns the pointer with which a kernel accesses `memory`, which lies in the pages [begin, end).
char* device_pointer(void* memory, char* begin, char* end) {
  auto* const host = static_cast<char*>(memory);
  if (!settings().other_pointers) return host;
  auto* const alias = static_cast<char*>(alias_host_pages(begin, size_t(end - begin)));
  return alias == nullptr ? nullptr : alias + (host - begin);
}

cudaError_t add_host(void* memory, size_t bytes, RangeKind kind, unsigned flags) {
  auto* const host = static_cast<char*>(memory);
  char *begin = page_begin(host), *end = page_end(host + bytes);
  if (!may_lock(begin, end)) return cudaErrorMemoryAllocation;
  char* device = device_pointer(memory, begin, end);
  if (device == nullptr) return cudaErrorMemoryAllocation;
  ranges()[host] = {host, bytes, kind, device, flags};
  return cudaSuccess;
}

}  // namespace

const Range* range_of(const void* p) {
  auto next = ranges().upper_bound(static_cast<char*>(const_cast<void*>(p)));
  if (next == ranges().begin()) return nullptr;
  const Range& r = std::prev(next)->second;
  return static_cast<const char*>(p) < r.begin + r.bytes ? &r : nullptr;
}

bool is_pageable(const void* p) { return range_of(p) == nullptr && !in_device_arena(p); }

cudaError_t add_device(void** memory, size_t bytes) {
  *memory = nullptr;
  if (bytes == 0) return cudaSuccess;
  auto* const p = static_cast<char*>(allocate_device(bytes));
  if (p == nullptr) return cudaErrorMemoryAllocation;
  ranges()[p] = {p, bytes, RangeKind::kDevice, p, 0};
  *memory = p;
  return cudaSuccess;
}

cudaError_t add_pinned(void** memory, size_t bytes, unsigned flags) {
  *memory = nullptr;
  if (bytes == 0) return cudaSuccess;
  const size_t whole = (bytes + kPage - 1) / kPage * kPage;
  void* p = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) return cudaErrorMemoryAllocation;
  const cudaError_t error = add_host(p, bytes, RangeKind::kPinned, flags);
  if (error != cudaSuccess) {
    munmap(p, whole);
    return error;
  }
  *memory = p;
  return cudaSuccess;
}

cudaError_t add_registered(void* memory, size_t bytes, unsigned flags) {
  constexpr unsigned kKnown = cudaHostRegisterPortable | cudaHostRegisterMapped |
                              cudaHostRegisterIoMemory | cudaHostRegisterReadOnly;
  if (memory == nullptr || bytes == 0 || (flags & ~kKnown) != 0) return cudaErrorInvalidValue;
  if (in_device_arena(memory)) return cudaErrorInvalidValue;
  const auto* begin = static_cast<const char*>(memory);
  if (shares_a_page(page_begin(begin), page_end(begin + bytes))) {
    return cudaErrorHostMemoryAlreadyRegistered;
  }
  return add_host(memory, bytes, RangeKind::kRegistered, flags);
}

cudaError_t remove_range(void* memory, RangeKind kind) {
  const auto found = ranges().find(static_cast<char*>(memory));
  if (found == ranges().end() || found->second.kind != kind) {
    return kind == RangeKind::kRegistered ? cudaErrorHostMemoryNotRegistered
                                          : cudaErrorInvalidValue;
  }
  const Range r = found->second;
  ranges().erase(found);
  if (kind == RangeKind::kDevice) {
    free_device(memory);
    return cudaSuccess;
  }
  if (r.device_begin != r.begin) drop_host_alias(page_begin(r.begin));
  if (kind == RangeKind::kPinned) munmap(memory, size_t(page_end(r.begin + r.bytes) - r.begin));
  return cudaSuccess;
}

bool is_operand(const void* p, size_t bytes) {
  const char *begin = static_cast<const char*>(p), *end = begin + bytes;
  if (const Range* r = range_of(p)) {
    while (settings().joined_neighbours && r->kind == RangeKind::kRegistered &&
           end > r->begin + r->bytes) {
      const Range* next = range_of(r->begin + r->bytes);
      if (next == nullptr || next->kind != RangeKind::kRegistered) break;
      r = next;
    }
    return end <= r->begin + r->bytes;
  }
  if (in_device_arena(p)) return false;  // freed or never allocated
  const auto next = ranges().lower_bound(const_cast<char*>(begin));
  return next == ranges().end() || next->first >= end;
}

char* reachable(const void* p) {
  const Range* r = range_of(p);
  if (r != nullptr && r->kind == RangeKind::kDevice) return static_cast<char*>(device_alias(p));
  return static_cast<char*>(const_cast<void*>(p));
}

}  // namespace kvcache::gpuless
