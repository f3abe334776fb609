// SPDX-License-Identifier: Apache-2.0
// The options of a manager.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/groups/cache_group.h"
#include "core/groups/hit_ends.h"
#include "core/pool/eviction_order.h"

namespace kvcache {

// Which cached blocks are written to the host.
struct HostWrites {
  bool is_through = false;         // by the step after the step that filled them
  std::optional<double> min_gain;  // only with as many expected hits (LearnedCopies::gain_of_copy)
};

struct GroupOptions {
  std::shared_ptr<const AttentionKind> kind;
  int64_t block_size;     // tokens, over all context-parallel ranks
  bool drafts = false;    // the layers are a drafter's, so the last block of a hit is recomputed
  bool is_cached = true;  // whether its blocks can be hits
  bool is_transferred = true;  // false: no connector reads or writes its blocks
};

struct Eviction {  // the eviction policy of one pool
  std::string policy = "lru";
  std::map<std::string, double> options;
  // Creates a user-defined policy for a pool with this number of blocks. Overrides `policy`.
  std::function<std::unique_ptr<EvictionOrder>(int64_t)> make;
};

// For the meaning of each option, see `CacheOptions` (kvcache/allocator/options.py). All sizes are
// at most 2**31 - 1.
struct ManagerOptions {
  std::vector<GroupOptions> groups;
  int64_t num_blocks = 0;       // including the null block
  int64_t max_model_len = 0;    // tokens
  int64_t hash_block_size = 0;  // tokens; 0: the greatest common divisor of the block sizes
  int64_t hash_bytes = 32;      // 1 to 32
  bool enable_caching = true;
  int64_t retention_interval = -1;  // tokens; 0: only prompts and shared prefixes; negative: all
  int64_t num_preallocate_tokens = 0;
  int64_t max_num_reqs = 0;      // rows; 0: unlimited
  int64_t watermark_blocks = 0;  // that admission and preallocation leave free
  bool fence_frees = false;
  bool record_events = false;
  bool prefault = true;        // commit the memory of the pools at construction (prefault.h)
  int64_t explain_misses = 0;  // records one of this many blocks that leave the cache; 0: none
  Eviction eviction, host_eviction;
  int64_t num_host_blocks = 0;  // including the null block; 0: no host tier
  HostWrites host_writes;
  // Allows groups of recurrent states in calls outside of steps. The engine copies a state from the
  // row's old page, which is kept until the last issued step is done, to the new page.
  bool engine_copies_states = false;
};

// Throws std::invalid_argument, naming the option, if an option is out of range. Does not check the
// groups or the sizes without a default.
void check_optional(const ManagerOptions& options);

// The functions below throw std::invalid_argument, naming the option, if one is out of range.
ManagerOptions checked(const ManagerOptions& options);

// Returns the number of tokens per hash, which must divide every block size.
int64_t hash_block_size_of(const ManagerOptions& options);
std::vector<CacheGroup> groups_of(const ManagerOptions& options, int64_t hash_block_size);

// The checked options of a manager, and values derived from them.
struct ManagerSetup {
  explicit ManagerSetup(const ManagerOptions& asked)
      : options(checked(asked)),
        hash_block_size(hash_block_size_of(options)),
        groups(groups_of(options, hash_block_size)),
        ends(groups) {}

  const ManagerOptions options;
  const int64_t hash_block_size;  // tokens
  const std::vector<CacheGroup> groups;
  const HitEnds ends;
};

}  // namespace kvcache
