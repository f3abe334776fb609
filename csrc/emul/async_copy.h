// SPDX-License-Identifier: Apache-2.0
// A thread's asynchronous copies from global to shared memory (cp.async). The bytes are read
// immediately, but arrive only when the thread waits, so a kernel that forgets to commit or to wait
// reads stale memory. An error is reported if the source was overwritten in the meantime.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

#include "emul/scheduler.h"
#include "emul/thread.h"

namespace emul {

// Starts a copy of 4, 8 or 16 bytes.
inline void begin_async_copy(void* shared, const void* global, size_t num_bytes) {
  if (num_bytes != 4 && num_bytes != 8 && num_bytes != 16) {
    throw std::logic_error("asynchronous copy of " + std::to_string(num_bytes) +
                           " bytes: expected 4, 8 or 16");
  }
  if (reinterpret_cast<uintptr_t>(shared) % num_bytes != 0 ||
      reinterpret_cast<uintptr_t>(global) % num_bytes != 0) {
    throw std::runtime_error("misaligned address of an asynchronous copy of " +
                             std::to_string(num_bytes) + " bytes");
  }
  AsyncCopy copy{shared, global, num_bytes, {}};
  std::memcpy(copy.bytes, global, num_bytes);
  emulator().current().async_copies.begun.push_back(copy);
}

// Commits the copies that the thread has started since its last commit, as a new group.
inline void commit_async_copies() {
  AsyncCopies& copies = emulator().current().async_copies;
  copies.group_ends.push_back(copies.begun.size());
}

// Waits for all but the last `num_groups` of the thread's groups.
inline void wait_async_copies(size_t num_groups) {
  AsyncCopies& copies = emulator().current().async_copies;
  if (copies.group_ends.size() <= num_groups) return;
  const size_t done = copies.group_ends.size() - num_groups;
  const size_t end = copies.group_ends[done - 1];
  for (size_t i = 0; i < end; ++i) {
    const AsyncCopy& copy = copies.begun[i];
    if (std::memcmp(copy.bytes, copy.global, copy.num_bytes) != 0) {
      throw std::runtime_error("the source of an asynchronous copy changed before the wait for it");
    }
    std::memcpy(copy.shared, copy.bytes, copy.num_bytes);
  }
  copies.begun.erase(copies.begun.begin(), copies.begun.begin() + std::ptrdiff_t(end));
  copies.group_ends.erase(copies.group_ends.begin(),
                          copies.group_ends.begin() + std::ptrdiff_t(done));
  for (size_t& group_end : copies.group_ends) group_end -= end;
}

}  // namespace emul
