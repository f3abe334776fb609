// How a manager is set up.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/eviction/eviction_policy.h"
#include "core/groups/cache_group.h"

namespace kvcache {

// When a cached block is written to the host.
enum class HostWrite : uint8_t {
  kBack,       // when it is evicted from the device
  kThrough,    // by the step after the one that filled it
  kSelective,  // by the step after the one in which it was hit for the n-th time
  kLearned,    // when it is evicted, if enough hits are expected of it there
};

struct GroupOptions {
  std::shared_ptr<const AttentionKind> kind;
  int64_t block_size;          // tokens, over all context-parallel ranks
  bool drafts = false;         // has layers of a drafter: the last block of a hit is computed anew
  bool is_cached = true;       // its blocks may be hits
  bool is_transferred = true;  // else no connector reads or writes its blocks
};

struct Eviction {  // of a pool
  std::string policy = "lru";
  std::map<std::string, double> options;
  // A policy of the caller's instead, for a pool of so many blocks.
  std::function<std::unique_ptr<EvictionPolicy>(int64_t)> make;
};

struct ManagerOptions {  // sizes are each at most 2**31 - 1
  std::vector<GroupOptions> groups;
  int64_t num_blocks = 0;     // the null block counted
  int64_t max_model_len = 0;  // tokens
  // Tokens per hash; divides every block size. Where it is given and finer than a block of tokens,
  // hits end inside blocks too. 0: the largest that divides, and hits are whole blocks.
  int64_t hash_block_size = 0;
  int64_t hash_bytes = 32;  // of every hash: 1 to 32
  bool enable_caching = true;
  int64_t num_preallocate_tokens = 0;
  int64_t max_num_reqs = 0;      // rows; 0: as many as needed
  int64_t watermark_blocks = 0;  // that admissions and preallocation leave free
  bool fence_frees = false;      // released blocks wait for the report on the last step
  bool record_events = false;
  bool announce_reused = false;  // events also of the blocks that a request hits
  bool track_residency = false;
  int64_t stats_window = 1000;  // requests
  Eviction eviction, host_eviction;
  int64_t num_host_blocks = 0;  // the null block counted; 0: no host tier
  HostWrite host_write = HostWrite::kBack;
  int64_t num_hits_to_write = 2;    // kSelective
  double min_gain_to_write = 0.05;  // kLearned: hits
  // The whole prompt is computed at once, from its own K and V: what a window has left behind at
  // the prompt's end is never held.
  bool computes_whole_prompt = false;
  // Blocks are published when `mark_computed` says that their tokens have KV, not when they fill.
  bool publishes_when_marked = false;
  // Calls outside of steps take groups of recurrent states: the engine copies a state itself, from
  // the page that the row had to the new one. A page that is left so is kept until the step that
  // was issued last is reported.
  bool engine_copies_states = false;
  // Cached blocks of a row that is swapped out are found on the host, too.
  bool caches_swapped_rows = true;
};

// Throws std::invalid_argument that names the option that is out of range. Leaves out the groups
// and the sizes that have no default.
void check_optional(const ManagerOptions& options);

// The options, or std::invalid_argument that names the one that is out of range.
ManagerOptions checked(const ManagerOptions& options);

// Tokens per hash. Throws std::invalid_argument where the given one does not divide.
int64_t hash_block_size_of(const ManagerOptions& options);

std::vector<CacheGroup> groups_of(const ManagerOptions& options, int64_t hash_block_size);

// Tokens per block, by group; 0 where the group is not cached.
std::vector<int64_t> cached_block_sizes(const std::vector<CacheGroup>& groups);

// The options of a manager, checked, and what follows from them. Throws std::invalid_argument that
// names the option that is out of range.
struct ManagerSetup {
  explicit ManagerSetup(const ManagerOptions& asked)
      : options(checked(asked)),
        hash_block_size(hash_block_size_of(options)),
        groups(groups_of(options, hash_block_size)) {}

  const ManagerOptions options;
  const int64_t hash_block_size;  // tokens
  const std::vector<CacheGroup> groups;
};

// Null for the pool's own least-recently-released order.
std::unique_ptr<EvictionPolicy> policy_of(const Eviction& eviction, int64_t num_blocks);

}  // namespace kvcache
