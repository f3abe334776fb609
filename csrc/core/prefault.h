// SPDX-License-Identifier: Apache-2.0
// Commits the memory of a pool when it is constructed, instead of in the calls that first use it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace kvcache {

// The kernel commits and clears a page on first access. For a huge page, this takes longer than an
// entire step should take. While a Prefault exists, it records the zeroed arrays (zeroed_array.h)
// that its thread constructs, and `commit` commits them together. Nested Prefaults are independent.
class Prefault {
 public:
  explicit Prefault(bool is_enabled);
  ~Prefault();
  Prefault(const Prefault&) = delete;

  // Commits the memory of the recorded arrays. Arrays created later are not recorded. If the arrays
  // need more than 64 MiB and more than half of the available memory, nothing is committed, because
  // the system kills processes that exceed the available memory.
  void commit();

  // Called by arrays: `note` when an array is constructed, `remove` when it is destroyed.
  static void note(void* data, size_t num_bytes) {
    if (current_ != nullptr) current_->add(data, num_bytes);
  }
  static void remove(const void* data) {
    if (current_ != nullptr) current_->forget(data);
  }

 private:
  struct Range {
    void* data;
    size_t num_bytes;
  };
  void add(void* data, size_t num_bytes);
  void forget(const void* data);
  void stop();

  static thread_local Prefault* current_;

  bool is_noting_;
  Prefault* outer_ = nullptr;
  // Two tiers have at most 30 arrays. Arrays that do not fit here are committed on first access.
  std::array<Range, 64> ranges_;
  size_t num_ranges_ = 0;
};

// Returns the bytes that this process can commit without exceeding the memory of the machine or of
// its control groups; 0 if unknown. `root` is the folder of /proc and /sys.
int64_t available_memory(const std::string& root = "");

}  // namespace kvcache
