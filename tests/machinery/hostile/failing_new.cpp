// SPDX-License-Identifier: Apache-2.0
// A library to preload whose `operator new` throws std::bad_alloc in the n-th call after
// fail_new_at(n), in the thread that called fail_new_at. With n < 0, it never throws. With `spares`,
// calls from torch's own libraries are not counted.
#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <new>

namespace {
thread_local long left = -1;
thread_local bool spares_torch = false;

// Returns whether torch itself is the caller. Some of its functions end the process if an
// allocation fails.
bool is_spared(void* caller) {
  Dl_info found{};
  if (!spares_torch || dladdr(caller, &found) == 0 || found.dli_fname == nullptr) return false;
  return std::strstr(found.dli_fname, "/torch/lib/") != nullptr;
}

void* allocate(std::size_t size, std::size_t alignment, void* caller) {
  if (left > 0 && !is_spared(caller) && --left == 0) {
    left = -1;
    throw std::bad_alloc();
  }
  // aligned_alloc accepts only multiples of the alignment.
  const std::size_t rounded =
      alignment == 0 ? size : (size + alignment - 1) / alignment * alignment;
  void* const memory =
      alignment == 0 ? std::malloc(size == 0 ? 1 : size) : std::aligned_alloc(alignment, rounded);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
}  // namespace

extern "C" void fail_new_at(long n, bool spares) {
  left = n;
  spares_torch = spares;
}

void* operator new(std::size_t size) { return allocate(size, 0, __builtin_return_address(0)); }
void* operator new[](std::size_t size) { return allocate(size, 0, __builtin_return_address(0)); }
void* operator new(std::size_t size, std::align_val_t alignment) {
  return allocate(size, static_cast<std::size_t>(alignment), __builtin_return_address(0));
}
void* operator new[](std::size_t size, std::align_val_t alignment) {
  return allocate(size, static_cast<std::size_t>(alignment), __builtin_return_address(0));
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }
