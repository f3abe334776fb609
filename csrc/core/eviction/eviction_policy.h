// The interface of eviction policies, which choose the next cached block to evict.
//
// The pool enforces what holds for every policy: a block that is held, pinned, or has a cached
// child is not a candidate, and uncached blocks are taken first. A policy only ranks candidates.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/hash.h"

namespace kvcache {

// How long a caller wants the tokens [first, stop) of a request to stay.
struct Retention {
  int64_t first, stop;
  int32_t priority;  // 0 to 100; the lowest goes first
  int64_t ttl_ms;    // from the release; negative: for ever
};

// Facts about the request segment whose blocks are released.
struct ReleaseFeatures {
  int32_t turn = 0;               // of the conversation
  int64_t num_prefix_tokens = 0;  // hit length at admission
  int64_t num_new_blocks = 0;
  int64_t num_output_tokens = -1;  // -1, to a manager: those that were appended to the prompt
  int32_t request_class = -1;      // the caller's; -1: none
  int64_t logical_time = 0;        // number of releases so far
  int64_t wall_ms = 0;             // a clock of the caller's
  int64_t tokens_per_block = 1;    // blocks begin at its multiples
  const Retention* retention = nullptr;
  int64_t num_retention = 0;
  uint32_t tenant = 0;          // stands for the salt; 0: none
  bool is_swapped_out = false;  // the request goes on later, from copies on the host
};

// What a policy that learns takes a released block for.
struct ReleasedAs {
  int64_t segment = 0;     // the same of blocks that were released together; 0: nothing is known
  int64_t time = 0;        // of the policy's clock
  float cost = 1;          // of computing the block anew, in those of a first block
  uint16_t num_forks = 0;  // that were seen of its chain
  uint8_t reuse_class = 0;
};

// One access of a request. Its blocks are said to have had it when it releases them, not at once:
// most requests are accessed far more often than they have blocks that leave.
struct Access {
  double now = 0;      // the caller's clock
  int64_t number = 0;  // among all accesses, in order; 0: none
};

// A policy is notified only of blocks of its pool. What it has recorded about a block holds until
// the block is forgotten or allocated again.
class EvictionPolicy {
 public:
  virtual ~EvictionPolicy() = default;

  // Cached, not held, not pinned, without a cached child: a candidate from now on. Comes
  // again when a child or a pin has gone, so a candidate's rank may not depend on when this is
  // called.
  virtual void insert(BlockId id) = 0;
  virtual void remove(BlockId id) = 0;  // no longer a candidate
  // The next candidate to evict; the null block when there is none. Does not remove it.
  virtual BlockId victim() = 0;

  // Notifications to learn from, each before the `insert` or after the `remove` that it causes.
  virtual void on_allocate(const BlockId*, int64_t) {}  // allocated for new content
  // Cached from now on; `hash` is null while only a part of the block is, and may follow.
  virtual void on_publish(BlockId, const Hash*, uint8_t /*group*/) {}
  virtual void on_hit(const BlockId*, int64_t) {}  // cached blocks that a request takes
  // A request releases these blocks; prefix_tokens[i]: tokens of the prefix that ends with block
  // i. Behind a fence they become idle later. Of blocks that leave a request which goes on (out of
  // a window, for a copy, or invalid) only `on_released` is called.
  virtual void on_release(const BlockId*, const int64_t* /*prefix_tokens*/, int64_t,
                          const ReleaseFeatures&) {}
  virtual void on_released(const BlockId*, int64_t) {}  // whatever the reason
  virtual void on_idle(BlockId) {}  // cached, and just now no longer held: in the order of release
  // Something is accessed now: the next access. Without a policy that asks for them there are none.
  virtual Access begin_access(double /*now*/) { return {}; }
  // Blocks had this access; of those that were allocated, forgotten or accessed later it says
  // nothing.
  virtual void on_access(const BlockId*, int64_t, const Access&) {}
  // Not cached any more; `evicted`: because its space was needed.
  virtual void on_forget(BlockId, const Hash*, uint8_t /*group*/, bool /*evicted*/) {}
  virtual void set_now(int64_t /*ms*/) {}
  virtual void clear() {}  // nothing is cached any more
  // Between the policies of two tiers: what this one takes a block for, and, of one that holds a
  // copy of another tier's block, what that tier's policy takes it for. `on_copy` comes again when
  // the other tier has evicted its block once more. Blocks that are told are cached and held.
  virtual ReleasedAs released_as(BlockId) const { return {}; }
  virtual void on_copy(BlockId, const ReleasedAs&) {}
  virtual void on_load(BlockId) {}  // what this block holds is in the other tier again
  // Hits expected of a copy of a block that was released as this, less those that its space is
  // worth to others; `evicts`: no uncached block is left for it. 1 or more: of what nothing is
  // known.
  virtual double gain_of_copy(const ReleasedAs&, bool /*evicts*/) { return 1; }
  // What was learned of reuse, as numbers for another policy of the same kind; none where nothing
  // is learned. `learn` replaces it: as many numbers, checked by whoever calls.
  virtual std::vector<double> learned() const { return {}; }
  virtual void learn(const std::vector<double>&) {}
  virtual size_t num_bytes() const { return 0; }
};

}  // namespace kvcache
