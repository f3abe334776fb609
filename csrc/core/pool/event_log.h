// What became findable in a cache and what left it, in order, until somebody asks.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "core/hash.h"

namespace kvcache {

enum class Medium : uint8_t { kDevice = 0, kHost = 1 };

class EventLog {
 public:
  enum class Kind : uint8_t { kStored = 0, kRemoved = 1, kCleared = 2 };
  struct Event {
    Kind kind;
    uint8_t group;
    Medium medium;
    Hash hash;
    Hash parent;  // of one stored on the device
  };
  struct Drained {
    std::vector<Event> events;
    std::vector<int32_t> tokens;  // of the stored ones, one after the other
  };

  void stored(const Hash& hash, const Hash& parent, uint8_t group, const int32_t* tokens,
              int64_t num_tokens) {
    drained_.events.push_back({Kind::kStored, group, Medium::kDevice, hash, parent});
    if (tokens != nullptr) {
      drained_.tokens.insert(drained_.tokens.end(), tokens, tokens + num_tokens);
    }
  }
  void stored_on_host(const Hash& hash, uint8_t group) {
    drained_.events.push_back({Kind::kStored, group, Medium::kHost, hash, {}});
  }
  void removed(const Hash& hash, uint8_t group, Medium medium) {
    drained_.events.push_back({Kind::kRemoved, group, medium, hash, {}});
  }
  void cleared(Medium medium) { drained_.events.push_back({Kind::kCleared, 0, medium, {}, {}}); }

  Drained drain() { return std::exchange(drained_, {}); }

 private:
  Drained drained_;
};

}  // namespace kvcache
