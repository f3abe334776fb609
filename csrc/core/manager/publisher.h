// SPDX-License-Identifier: Apache-2.0
// Publishes filled blocks under the hashes of their tokens, and records events.
//
// Invariant: content that may never be computed (lookahead slots, unknown tokens) and content from
// an earlier epoch is not published.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/errors.h"
#include "core/groups/cache_group.h"
#include "core/groups/rules/effects.h"
#include "core/hashing/token_chain.h"
#include "core/manager/cache_stats.h"
#include "core/manager/options.h"
#include "core/manager/row_context.h"
#include "core/pool/block_pool.h"

namespace kvcache {

class Publisher final : public Publishing {
 public:
  Publisher(const RowContext& context, CacheStats* stats, const ManagerOptions& options)
      : c_(context),
        stats_(stats),
        is_enabled_(options.enable_caching),
        records_events_(options.record_events) {}

  // Whether blocks are published at all.
  bool is_enabled() const { return is_enabled_; }
  // Whether blocks of the row may have filled since it was last published.
  bool may_publish(int32_t row) const {
    return c_.row(row).num_computed >= c_.row(row).next_publish;
  }
  // Publishes the blocks filled since the last call. Their hashes must have been computed.
  void publish(int32_t row) {
    if (may_publish(row)) publish_filled(row);  // true for few rows in a step
  }
  // Publishes the host pages that the current plan writes.
  void publish_offloaded() {
    if (c_.host == nullptr) return;
    const std::vector<BlockId> written = c_.host->publish_offloaded();
    c_.journal->note_written(written);
  }
  // Publishes the device blocks of host hits whose steps are done, unless the content of their
  // pages was reported invalid in the meantime.
  void publish_arrived() {
    if (c_.host == nullptr) return;
    const std::vector<HostTier::Onboard> arrived =
        c_.host->take_arrived(c_.journal->numbers().num_completed);
    for (const HostTier::Onboard& each : arrived) {
      if (!c_.host->may_publish(each)) continue;
      const CacheGroup& group = (*c_.groups)[each.group];
      publish_ids(content_of(*each.chain, group, each.column), group, &each.block, 1);
      c_.host->note_loaded(each);
    }
    c_.host->finish(arrived);
  }
  // Must be called after other classes have added, removed, published or unpublished blocks of the
  // row.
  void refresh(int32_t row) { c_.row(row).next_publish = next_publish(row); }

  // The number of tokens of the row that are known to have KV.
  int64_t num_with_kv(int32_t row) const {
    const Row& r = c_.row(row);
    return r.waits_for_marks() ? std::min(c_.rows->info(row).num_marked, r.num_computed)
                               : r.num_computed;
  }

  const Row& row(int32_t row) const override { return c_.row(row); }
  const AdmissionInfo& info(int32_t row) const override { return c_.rows->info(row); }
  RowBlocks& held(int32_t row, const CacheGroup& group) const override {
    return c_.held(row, group);
  }
  bool has_part(const Hash& hash, const CacheGroup& group) const override {
    return c_.pool->find_partial(hash, group.id) != kNullBlock;
  }
  void publish_run(int32_t row, const CacheGroup& group, int64_t first_block, const BlockId* ids,
                   int64_t n) override {
    const Row& r = c_.row(row);
    publish_ids(content_of(*r.chain, group, first_block), group, ids, n);
    const bool notifies = serves_chains(group);
    for (int64_t i = 0; notifies && i < n; ++i) {
      if (group.is_read_at(first_block + i, c_.rows->info(row).retained)) {
        c_.pool->notify(Hit{{ids + i, 1}, Hit::By::kExpected});
      }
    }
    if (!c_.journal->notes(r)) return;
    for (int64_t i = 0; i < n; ++i) note(row, group, first_block + i, ids[i]);
  }
  void publish_part(int32_t row, const CacheGroup& group, int64_t block, int64_t hash) override {
    const TokenChain& chain = *c_.row(row).chain;
    const BlockId id = c_.held(row, group)[block];
    c_.pool->publish_partial(id, chain.known_hash(hash), chain.known_hash(0), group.id,
                             chain.variant(hash));
    const int64_t end = (hash + 1) * c_.hash_block_size;
    const RetainedEnds& retained = c_.rows->info(row).retained;
    if (serves_chains(group) && CacheGroup::first_retained(end, retained, 0) == end) {
      c_.pool->notify(Hit{{&id, 1}, Hit::By::kExpected});
    }
    note(row, group, block, id);
  }
  void disturb(int32_t row) override { c_.rows->disturb(row); }

  void check_invariants() const {
    for (int32_t row = 0; row < c_.rows->size(); ++row) {
      if (!c_.rows->is_in_use(row)) continue;
      const Row& r = c_.row(row);
      require(!r.is_stale || r.next_publish == kUnbounded, "row ", row,
              " would publish KV of an earlier epoch");
      require(r.next_publish <= next_publish(row), "row ", row, " waits too long to publish");
      for (const CacheGroup& group : *c_.groups) {
        const RowBlocks& held = c_.held(row, group);
        require(!group.is_cached || held.num_published * group.block_size <= r.num_computed, "row ",
                row, " has published blocks that are not full");
        require(!held.keeps_state || (group.rules->traits.updates_in_place &&
                                      r.num_computed % c_.hash_block_size == 0),
                "row ", row, " keeps a state that is not at a hash boundary");
      }
    }
  }

 private:
  // Whether a hit on the group's blocks always requires the chain of a group that keeps all tokens.
  bool serves_chains(const CacheGroup& group) const {
    return !group.keeps_all && has_chains(*c_.groups);
  }
  int64_t next_publish(int32_t row) const {
    const Row& r = c_.row(row);
    if (r.is_stale || r.is_receiving() || !is_enabled_ || !r.chain->write_cache())
      return kUnbounded;
    int64_t next = kUnbounded;
    const RowBlocks* held_by_group = c_.rows->blocks(row);
    for (const CacheGroup& group : *c_.groups) {
      const RowBlocks& held = held_by_group[group.id];
      if (!group.is_cached) continue;
      const int64_t partial = (int64_t{held.num_partial} + 1) * c_.hash_block_size;
      const bool has_partial =
          group.has_partial && group.rules->publishes_part(c_.rows->info(row), partial);
      next = std::min(next, has_partial ? partial : (held.num_published + 1) * group.block_size);
    }
    return next;
  }
  // Number of hash blocks of the row that have KV.
  int64_t num_hashed(int32_t row) const {
    return std::min(num_with_kv(row) / c_.hash_block_size, c_.row(row).chain->num_known_hashes());
  }
  void publish_filled(int32_t row) {
    Row& r = c_.row(row);
    const int64_t num_hashed = this->num_hashed(row);
    for (const CacheGroup& group : *c_.groups) {
      if (group.is_cached) group.rules->publish(this, row, group, num_hashed);
    }
    r.next_publish = next_publish(row);
  }
  // Returns the content of the chain's blocks, starting with `first_block`.
  Content content_of(const TokenChain& chain, const CacheGroup& group, int64_t first_block) const {
    const Hash* hashes = chain.known_hashes().data();
    const int64_t first_hash = first_block * group.num_hashes;
    Content content{};
    content.hashes = hashes + first_hash + group.num_hashes - 1;
    content.parent = first_hash == 0 ? &chain.parent() : hashes + first_hash - 1;
    content.stride = group.num_hashes;
    if (const uint64_t* variants = chain.variants(); variants != nullptr) {
      content.variants = variants + first_hash + group.num_hashes - 1;
    }
    content.adapter = chain.extra_keys().adapter();
    content.root = hashes;
    content.is_chain = group.keeps_all;
    content.begins_chain = first_block == 0;
    if (records_events_) {
      content.first_token = first_block * group.block_size;
      content.tokens = chain.tokens() + content.first_token;
      content.tokens_per_block = group.block_size;
      content.num_lookahead = chain.num_lookahead();
      content.labels = &chain.labels();
    }
    return content;
  }
  void publish_ids(const Content& content, const CacheGroup& group, const BlockId* ids, int64_t n) {
    c_.pool->publish(ids, content, n, group.id);
    stats_->add_stored(group.id, n);
  }
  // Records published blocks, because an aborted step must find all blocks that it published,
  // including blocks of freed rows.
  void note(int32_t row, const CacheGroup& group, int64_t block, BlockId id) {
    c_.journal->note_published(row, c_.row(row), block * group.block_size, group.id, id,
                               c_.pool->generation(id));
  }

  RowContext c_;
  CacheStats* stats_;
  bool is_enabled_, records_events_;
};

}  // namespace kvcache
