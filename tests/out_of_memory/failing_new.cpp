// To be preloaded: `operator new` that throws std::bad_alloc at the n-th call after fail_new_at(n),
// in the thread that asked for it. n < 0: never.
#include <cstdlib>
#include <new>

namespace {
thread_local long left = -1;
thread_local long count = 0;

void* allocate(std::size_t size, std::size_t alignment) {
  ++count;
  if (left > 0 && --left == 0) {
    left = -1;
    throw std::bad_alloc();
  }
  // aligned_alloc takes multiples of the alignment only.
  const std::size_t rounded =
      alignment == 0 ? size : (size + alignment - 1) / alignment * alignment;
  void* const memory =
      alignment == 0 ? std::malloc(size == 0 ? 1 : size) : std::aligned_alloc(alignment, rounded);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
}  // namespace

extern "C" void fail_new_at(long n) {
  left = n;
  count = 0;
}
// Calls since then.
extern "C" long num_new() { return count; }

void* operator new(std::size_t size) { return allocate(size, 0); }
void* operator new[](std::size_t size) { return allocate(size, 0); }
void* operator new(std::size_t size, std::align_val_t alignment) {
  return allocate(size, static_cast<std::size_t>(alignment));
}
void* operator new[](std::size_t size, std::align_val_t alignment) {
  return allocate(size, static_cast<std::size_t>(alignment));
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }
