// SPDX-License-Identifier: Apache-2.0
// Stores events in order until they are drained. Events report hashes that became available in a
// cache or were removed from it. The log is bounded. When it is full, all stored events are
// dropped, and one cleared event per tier makes the reader discard its state.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "core/hash.h"
#include "core/pool/block_listener.h"
#include "core/pool/content.h"

namespace kvcache {

class EventLog {
 public:
  enum class Kind : uint8_t { kStored = 0, kRemoved = 1, kCleared = 2 };
  struct Event {
    Kind kind;
    uint8_t group;
    Tier tier;
    Hash hash;
    // Fields for blocks stored on the device:
    Hash parent = {};
    int64_t first_token = 0;
    int64_t num_dropped = 0;  // for cleared events: number of events dropped since the last drain
    // Labels of the request that computed the block.
    std::shared_ptr<const void> labels = nullptr;
  };
  struct Drained {
    std::vector<Event> events;
    std::vector<int32_t> tokens;  // tokens of the stored blocks, each followed by its lookahead
  };

  static constexpr size_t kMostEvents = size_t{1} << 20, kMostTokens = size_t{1} << 24;
  explicit EventLog(size_t most_events = kMostEvents, size_t most_tokens = kMostTokens)
      : most_events_(most_events), most_tokens_(most_tokens) {}

  // Records that block i of this content was stored.
  void stored(const Content& content, int64_t i, uint8_t group) {
    make_room();
    Event event{Kind::kStored, group, Tier::kDevice, content.hash(i), content.parent_of(i)};
    const int64_t num_tokens = content.tokens_per_block;
    event.first_token = content.first_token + i * num_tokens;
    if (content.labels != nullptr) event.labels = *content.labels;
    waiting_.events.push_back(std::move(event));
    if (content.tokens != nullptr) {
      const int32_t* tokens = content.tokens + i * num_tokens;
      waiting_.tokens.insert(waiting_.tokens.end(), tokens,
                             tokens + num_tokens + content.num_lookahead);
    }
  }
  void stored_on_host(const Hash& hash, uint8_t group) {
    make_room();
    has_host_ = true;
    waiting_.events.push_back({Kind::kStored, group, Tier::kHost, hash});
  }
  void removed(const Hash& hash, uint8_t group, Tier tier) {
    make_room();
    waiting_.events.push_back({Kind::kRemoved, group, tier, hash});
  }
  void cleared(Tier tier) {
    make_room();
    waiting_.events.push_back({Kind::kCleared, 0, tier, Hash{}});
  }

  const Drained& waiting() const { return waiting_; }
  Drained drain() {
    num_dropped_ = 0;
    num_notices_ = 0;
    return std::exchange(waiting_, {});
  }

 private:
  void make_room() {
    if (waiting_.events.size() < most_events_ && waiting_.tokens.size() < most_tokens_) return;
    num_dropped_ += static_cast<int64_t>(waiting_.events.size()) - num_notices_;
    waiting_.events.clear();
    waiting_.tokens.clear();
    num_notices_ = has_host_ ? 2 : 1;
    for (Tier tier : {Tier::kDevice, Tier::kHost}) {
      if (tier == Tier::kHost && !has_host_) continue;
      Event notice{Kind::kCleared, 0, tier, Hash{}};
      notice.num_dropped = tier == Tier::kDevice ? num_dropped_ : 0;
      waiting_.events.push_back(std::move(notice));
    }
  }

  const size_t most_events_, most_tokens_;
  bool has_host_ = false;  // whether any events are from the host
  int64_t num_dropped_ = 0;
  int64_t num_notices_ = 0;  // number of leading cleared events in `waiting_`
  Drained waiting_;
};

// Records the events of one tier.
class EventRecorder : public BlockListener {
 public:
  EventRecorder(EventLog* log, Tier tier) : log_(log), tier_(tier) {}

  void on_publish(const Published& published) override {
    if (published.hash(0) == nullptr) return;  // partial content
    for (int64_t i = 0; i < published.n; ++i) {
      if (!published.is_first[i]) continue;
      if (published.copied != nullptr) {
        log_->stored_on_host(*published.hash(i), published.group);
      } else {
        log_->stored(*published.content, i, published.group);
      }
    }
  }
  void on_forget(const Forgotten& forgotten) override {
    if (forgotten.why == Forgotten::Why::kFreed) return;
    if (forgotten.why == Forgotten::Why::kReset) return log_->cleared(tier_);
    for (int64_t i = 0; i < forgotten.n; ++i) {
      if (forgotten.is_last(i)) log_->removed(*forgotten.hash(i), forgotten.group(i), tier_);
    }
  }

 private:
  EventLog* log_;
  Tier tier_;
};

}  // namespace kvcache
