// SPDX-License-Identifier: Apache-2.0
// Fibers: separate stacks between which the scheduler switches.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <new>

#include "emul/context.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace emul {

// AddressSanitizer must know which stack is in use. It is notified before each switch, with the
// destination, and after the switch, when the call returns the origin.
#if defined(__SANITIZE_ADDRESS__)
inline void asan_leave(void** save, const void* to_stack, size_t to_bytes) {
  __sanitizer_start_switch_fiber(save, to_stack, to_bytes);
}
inline void asan_arrive(void* saved, const void** from_stack, size_t* from_bytes) {
  __sanitizer_finish_switch_fiber(saved, from_stack, from_bytes);
}
inline void asan_unpoison(void* stack, size_t bytes) {
  __asan_unpoison_memory_region(stack, bytes);
}
// large, because instrumented stack frames are several times larger
inline constexpr size_t kStackBytes = 256 * 1024;
#else
inline void asan_leave(void**, const void*, size_t) {}
inline void asan_arrive(void*, const void**, size_t*) {}
inline void asan_unpoison(void*, size_t) {}
inline constexpr size_t kStackBytes = 64 * 1024;
#endif

// One side of a switch: the scheduler, which runs on the stack of launch()'s caller, or a fiber.
struct Side {
  Context context;
  const void* stack = nullptr;
  size_t stack_bytes = 0;
  void* asan_saved = nullptr;
};

inline void switch_sides(Side& from, Side& to) {
  asan_leave(&from.asan_saved, to.stack, to.stack_bytes);
  switch_context(from.context, to.context);
  asan_arrive(from.asan_saved, nullptr, nullptr);
}

// A stack with an unmapped page below it, so that a stack overflow causes a fault instead of
// overwriting the neighboring memory. Pages are committed only when touched.
class FiberStack {
 public:
  FiberStack() : guard_bytes_(size_t(sysconf(_SC_PAGESIZE))) {
    void* memory = mmap(nullptr, guard_bytes_ + kStackBytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    mapping_ = static_cast<char*>(memory);
    mprotect(mapping_, guard_bytes_, PROT_NONE);
  }
  ~FiberStack() {
    asan_unpoison(data(), kStackBytes);  // so that the next user of this address range starts clean
    munmap(mapping_, guard_bytes_ + kStackBytes);
  }
  FiberStack(const FiberStack&) = delete;
  FiberStack& operator=(const FiberStack&) = delete;

  char* data() const { return mapping_ + guard_bytes_; }

 private:
  size_t guard_bytes_;
  char* mapping_;
};

// Runs `entry` on a separate stack. `entry` never returns.
class Fiber : public Side {
 public:
  explicit Fiber(void (*entry)()) : entry_(entry) {
    stack = memory_.data();
    stack_bytes = kStackBytes;
    restart();
  }

  // Discards the stack's state, so that the next switch starts at `entry`.
  void restart() {
    asan_unpoison(memory_.data(), kStackBytes);
    asan_saved = nullptr;
    make_context(context, memory_.data(), kStackBytes, entry_);
  }

 private:
  FiberStack memory_;
  void (*entry_)();
};

}  // namespace emul
