// Events: hashes that became findable in a cache and those that left it, in order, until drained.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "core/hash.h"
#include "core/pool/content.h"

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
    // Of one stored on the device:
    Hash parent = {};
    bool is_reused = false;  // it was there before, and a request has hit it
    int64_t first_token = 0;
    std::shared_ptr<const void> labels = nullptr;  // of the request that has computed or hit it
  };
  struct Drained {
    std::vector<Event> events;
    std::vector<int32_t> tokens;  // of the stored ones, one after the other
  };

  // Block i of this content.
  void stored(const Content& content, int64_t i, uint8_t group, bool is_reused) {
    Event event{Kind::kStored, group, Tier::kDevice, content.hash(i), content.parent_of(i)};
    event.is_reused = is_reused;
    const int64_t num_tokens = content.tokens_per_block;
    event.first_token = content.first_token + i * num_tokens;
    if (content.labels != nullptr) event.labels = *content.labels;
    waiting_.events.push_back(std::move(event));
    if (content.tokens != nullptr) {
      const int32_t* tokens = content.tokens + i * num_tokens;
      waiting_.tokens.insert(waiting_.tokens.end(), tokens, tokens + num_tokens);
    }
  }
  void stored_on_host(const Hash& hash, uint8_t group) {
    waiting_.events.push_back({Kind::kStored, group, Tier::kHost, hash});
  }
  void removed(const Hash& hash, uint8_t group, Tier tier) {
    waiting_.events.push_back({Kind::kRemoved, group, tier, hash});
  }
  void cleared(Tier tier) { waiting_.events.push_back({Kind::kCleared, 0, tier, Hash{}}); }

  const Drained& waiting() const { return waiting_; }
  Drained drain() { return std::exchange(waiting_, {}); }

 private:
  Drained waiting_;
};

}  // namespace kvcache
