// The time of residency and of eviction policies: the caller's, or the system's steady clock, to a
// few milliseconds: each call reads it, so it must not take long.
//
// Invariant: time does not go back.
#pragma once

#include <time.h>

#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace kvcache {

class Clock {
 public:
  // Without `reads_system` time stands still unless it is set: nothing asks for it.
  explicit Clock(bool reads_system = true) : reads_system_(reads_system) {}

  int64_t now_ms() const { return now_ms_; }

  // Milliseconds since any moment, from now on. Throws std::invalid_argument where time would go
  // back, with nothing changed.
  void set(int64_t ms) {
    if (ms < now_ms_) {
      throw std::invalid_argument("the clock is set to " + std::to_string(ms) + " ms: expected " +
                                  std::to_string(now_ms_) +
                                  " or more, it does not go back (set it before the first call)");
    }
    is_set_ = true;
    now_ms_ = ms;
  }

  // Reads the system's clock, unless the caller sets this one. Whether it did.
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
