// SPDX-License-Identifier: Apache-2.0
// The clock for eviction policies: the time that the caller sets or, by default, the system's
// steady clock with a resolution of a few milliseconds. Every call reads it, so reads must be fast.
//
// Invariant: time never decreases.
#pragma once

#include <time.h>

#include <chrono>
#include <cstdint>

#include "core/errors.h"

namespace kvcache {

class Clock {
 public:
  // Without `reads_system`, time changes only when it is set. Used by managers that do not need the
  // time.
  explicit Clock(bool reads_system = true) : reads_system_(reads_system) {}

  int64_t now_ms() const { return now_ms_; }

  // Sets the time in milliseconds, relative to any fixed moment. Throws std::invalid_argument,
  // without any change, if time would decrease.
  void set(int64_t ms) {
    if (ms < now_ms_) {
      throw_invalid("the clock is set to ", ms, " ms: expected ", now_ms_,
                    " or more, because it cannot go back (set it before the first call)");
    }
    is_set_ = true;
    now_ms_ = ms;
  }

  // Reads the system clock unless the caller sets the time. Returns whether it was read.
  bool read() {
    if (is_set_ || !reads_system_) return false;
    now_ms_ = system_ms() - made_at_ms_;
    return true;
  }

 private:
  static int64_t system_ms() {
#ifdef CLOCK_MONOTONIC_COARSE
    timespec now;
    if (clock_gettime(CLOCK_MONOTONIC_COARSE, &now) == 0) {
      return int64_t{now.tv_sec} * 1000 + now.tv_nsec / 1'000'000;
    }
#endif
    const auto since = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::milliseconds>(since).count();
  }

  const int64_t made_at_ms_ = system_ms();
  bool reads_system_;
  bool is_set_ = false;
  int64_t now_ms_ = 0;
};

}  // namespace kvcache
