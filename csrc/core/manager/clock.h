// The time of residency and of eviction policies: the caller's, or the system's steady clock.
//
// Invariant: time does not go back.
#pragma once

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
    const auto since = std::chrono::steady_clock::now() - made_at_;
    now_ms_ = std::chrono::duration_cast<std::chrono::milliseconds>(since).count();
    return true;
  }

 private:
  const std::chrono::steady_clock::time_point made_at_ = std::chrono::steady_clock::now();
  bool reads_system_;
  bool is_set_ = false;
  int64_t now_ms_ = 0;
};

}  // namespace kvcache
