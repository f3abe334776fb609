// SPDX-License-Identifier: Apache-2.0
// Listeners are notified of what happens to the blocks of a pool. Events, reasons of misses, the
// host tier and policies that learn are listeners.
//
// A listener is notified after the pool has made a change, once per batch, and decides nothing. It
// may allocate memory, read the pool, and change other pools. If it calls a method that changes the
// pool it listens to, that method throws std::logic_error. If a listener throws, the pool has made
// the whole change and is consistent, but its caller does not get the result. Therefore, the pool
// counts as broken (soundness.h).
//
// Listeners are notified in the order in which they were added. An eviction order that also listens
// is notified last, so that the others can ask it about the blocks of a batch.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "core/hash.h"
#include "core/pool/block.h"
#include "core/pool/content.h"

namespace kvcache {

// Retention priority that a caller assigns to tokens [first, stop) of a request.
struct Retention {
  int64_t first, stop;
  int32_t priority;  // 0 to 100; lower priorities are evicted first
  int64_t ttl_ms;    // counted from the release; negative: unlimited
};

// Features of a request segment whose blocks are being released.
struct ReleaseFeatures {
  int64_t num_prefix_tokens = 0;  // hit length at admission
  int64_t num_new_blocks = 0;
  int64_t num_output_tokens = -1;  // -1: the manager counts the tokens appended to the prompt
  int64_t logical_time = 0;        // number of releases so far
  int64_t wall_ms = 0;             // time on the caller's clock
  int64_t tokens_per_block = 1;    // blocks start at multiples of this number
  const Retention* retention = nullptr;
  int64_t num_retention = 0;
  // Whether a turn of the conversation ends here, after which a person reads or the session ends;
  // unset: unknown.
  std::optional<bool> ends_turn = std::nullopt;
  // Whether the blocks form a chain. If false, they are window or state blocks of a request whose
  // chains are released next.
  bool is_chain = true;
  bool is_swapped_out = false;  // the request continues later, from copies on the host
};

// One access by a request. It is recorded for the request's blocks only when they are released,
// because most requests access their blocks far more often than they release them.
struct Access {
  double now = 0;      // time on the caller's clock
  int64_t number = 0;  // sequence number of the access; 0: no access
};

enum class Tier : uint8_t { kDevice = 0, kHost = 1 };

// Blocks of one pool.
struct Blocks {
  Blocks(const BlockId* first, int64_t num) : ids(first), n(num) {}
  Blocks(const std::vector<BlockId>& all) : Blocks(all.data(), static_cast<int64_t>(all.size())) {}

  const BlockId* ids;
  int64_t n;

  const BlockId* begin() const { return ids; }
  const BlockId* end() const { return ids + n; }
};

// Held blocks that are now cached. Partial content and copies are published one by one.
struct Published : Blocks {
  uint8_t group;
  const uint8_t* is_first;           // whether no other block is cached under the block's hash
  const Content* content = nullptr;  // null: partial content, or a copy
  const Copied* copied = nullptr;    // set: the block holds a copy of another pool's block
  bool is_again = false;  // the copy was already cached, and its original was evicted once more

  const Hash* hash(int64_t i) const {  // null: partial content
    if (copied != nullptr) return &copied->hash;
    return content == nullptr ? nullptr : &content->hash(i);
  }
};

struct Hit : Blocks {
  enum class By : uint8_t {
    kRequest,    // a request hits these cached blocks
    kExpected,   // repeated prompts will probably hit these window or state blocks, which are held
    kOtherTier,  // the content of these copies is cached in the other pool again
  };
  By by;
};

// Blocks that a request is about to release, unless a fence defers that. Ids may repeat, and blocks
// need not be cached.
struct Released : Blocks {
  // The request's last access, which is not recorded for the blocks yet. If it is set, another call
  // follows.
  Access access{};
  // If the request ends: the number of tokens up to the end of each block, and the request. Another
  // call without them follows. It is the only call if the request continues: the blocks left the
  // window, were replaced by a copy, or are invalid.
  const int64_t* prefix_tokens = nullptr;
  const ReleaseFeatures* features = nullptr;
  // Set before a request ends, for cached window and state blocks that likely hits would read: the
  // lengths of those hits in tokens. These blocks may stay held.
  const int64_t* hit_ends = nullptr;
};

struct Forgotten : Blocks {
  enum class Why : uint8_t {
    kEvicted,  // to make room
    kRemoved,  // their content is invalid, or their owner has removed it
    kReset,    // nothing is cached any more
    kFreed,    // they became free without being cached
  };
  enum Flag : uint8_t {
    kHasHash = 1,  // the block was published under a hash
    kIsLast = 2,   // and no other block is
  };
  Why why;
  const uint8_t* flags;  // one per block, without kIsLast after a reset; null if `why` is kFreed
  const Block* blocks;   // blocks of the pool, by id

  bool is_last(int64_t i) const { return (flags[i] & kIsLast) != 0; }
  const Hash* hash(int64_t i) const {
    return (flags[i] & kHasHash) != 0 ? &blocks[ids[i]].hash : nullptr;
  }
  uint8_t group(int64_t i) const { return blocks[ids[i]].group; }
};

class BlockListener {
 public:
  virtual ~BlockListener() = default;

  virtual void on_publish(const Published&) {}
  virtual void on_hit(const Hit&) {}
  virtual void on_release(const Released&) {}
  // Cached blocks are no longer held; in the order of their release.
  virtual void on_idle(const Blocks&) {}
  // Blocks are no longer cached, or free without having been cached. Records of them end.
  virtual void on_forget(const Forgotten&) {}
};

}  // namespace kvcache
