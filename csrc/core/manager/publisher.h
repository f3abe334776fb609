// Filled blocks become findable: under the hashes of the tokens that they hold, and in events.
//
// Invariant: nothing is published that may not be computed: neither lookahead slots nor tokens that
// are not known, nor what a row holds from an earlier epoch.
#pragma once

#include <cstdint>
#include <vector>

#include "core/groups/cache_group.h"
#include "core/hashing/token_chain.h"
#include "core/manager/cache_stats.h"
#include "core/manager/host_tier.h"
#include "core/manager/options.h"
#include "core/manager/prefix_finder.h"
#include "core/manager/row_table.h"
#include "core/manager/step_journal.h"
#include "core/pool/block_pool.h"

namespace kvcache {

class Publisher {
 public:
  // Everything that publishing touches; `host` is null where there is none.
  struct Context {
    const std::vector<CacheGroup>* groups;
    int64_t hash_block_size;
    RowTable* rows;
    BlockPool* pool;
    HostTier* host;
    StepJournal* journal;
    CacheStats* stats;
  };
  Publisher(const Context& context, const ManagerOptions& options);

  // Whether blocks are found under hashes at all.
  bool is_enabled() const { return is_enabled_; }
  // Whether blocks of the row may have filled since it was published last.
  bool may_publish(int32_t row) const {
    return (*c_.rows)[row].num_computed >= (*c_.rows)[row].next_publish;
  }
  // Publishes what has filled since. What it publishes must have been hashed.
  void publish(int32_t row) {
    if (may_publish(row)) publish_filled(row);  // few rows of a step
  }
  // The same of whole blocks of tokens alone, for later rows of the step that fills them.
  void publish_blocks(int32_t row);
  // The state after num_tokens tokens, which this page holds, if that is a block boundary.
  void publish_state(int32_t row, const CacheGroup& group, int64_t num_tokens, BlockId page);
  // Pages of the host that the plan at hand writes.
  void publish_offloaded();
  // Blocks of hits on the host whose steps are done, unless what their pages hold was reported
  // invalid since.
  void publish_arrived();
  // Says in events that a row has taken these blocks of the device, where that is wanted.
  void announce_hit(int32_t row, const PrefixHit& hit) const {
    if (announces_reused_) announce(row, hit);
  }
  // To be called when the row's blocks, or what is published of them, have changed otherwise.
  void refresh(int32_t row) { (*c_.rows)[row].next_publish = next_publish(row); }

  // Tokens of the row that have KV, as far as that is known.
  int64_t num_with_kv(int32_t row) const;

  void check_invariants() const;

 private:
  int64_t next_publish(int32_t row) const;
  int64_t num_hashed(int32_t row) const;  // hash blocks of the row with KV
  void publish_filled(int32_t row);
  void publish_whole(int32_t row, const CacheGroup& group, int64_t num_hashed);
  void publish_partial(int32_t row, const CacheGroup& group, int64_t num_hashed);
  void publish_states(int32_t row, const CacheGroup& group);
  void keep_state(int32_t row, const CacheGroup& group);
  void publish_run(int32_t row, const CacheGroup& group, int64_t first_block, const BlockId* ids,
                   int64_t n);
  Content content_of(const TokenChain& chain, const CacheGroup& group, int64_t first_block) const;
  void announce(int32_t row, const PrefixHit& hit) const;
  void publish_ids(const Content& content, const CacheGroup& group, const BlockId* ids, int64_t n);
  void note(int32_t row, const CacheGroup& group, int64_t block, BlockId id);

  Context c_;
  bool is_enabled_, waits_for_marks_, records_events_, announces_reused_;
};

}  // namespace kvcache
