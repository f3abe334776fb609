// Events: hashes that became findable in a cache and those that left it, in order, until drained.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "core/hash.h"

namespace kvcache {

enum class Tier : uint8_t { kDevice = 0, kHost = 1 };

class EventLog {
 public:
  enum class Kind : uint8_t { kStored = 0, kRemoved = 1, kCleared = 2 };
  struct Event {
    Kind kind;
    uint8_t group;
    Tier tier;
    Hash hash;
    Hash parent;  // of one stored on the device
  };
  struct Drained {
    std::vector<Event> events;
    std::vector<int32_t> tokens;  // of the stored ones, one after the other
  };

  void stored(const Hash& hash, const Hash& parent, uint8_t group, const int32_t* tokens,
              int64_t num_tokens) {
    drained_.events.push_back({Kind::kStored, group, Tier::kDevice, hash, parent});
    if (tokens != nullptr) {
      drained_.tokens.insert(drained_.tokens.end(), tokens, tokens + num_tokens);
    }
  }
  void stored_on_host(const Hash& hash, uint8_t group) {
    drained_.events.push_back({Kind::kStored, group, Tier::kHost, hash, {}});
  }
  void removed(const Hash& hash, uint8_t group, Tier tier) {
    drained_.events.push_back({Kind::kRemoved, group, tier, hash, {}});
  }
  void cleared(Tier tier) { drained_.events.push_back({Kind::kCleared, 0, tier, {}, {}}); }

  Drained drain() { return std::exchange(drained_, {}); }

 private:
  Drained drained_;
};

}  // namespace kvcache
