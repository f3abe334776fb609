// SPDX-License-Identifier: Apache-2.0
// Publishes filled blocks under the hashes of their tokens, and records events.
//
// Invariant: content that may never be computed (lookahead slots, unknown tokens) and content from
// an earlier epoch is not published.
#pragma once

#include <cstdint>

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
  void publish_arrived();
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
                   int64_t n) override;
  void publish_part(int32_t row, const CacheGroup& group, int64_t block, int64_t hash) override;
  void disturb(int32_t row) override { c_.rows->disturb(row); }

  void check_invariants() const;

 private:
  int64_t next_publish(int32_t row) const;
  int64_t num_hashed(int32_t row) const {
    return std::min(num_with_kv(row) / c_.hash_block_size, c_.row(row).chain->num_known_hashes());
  }  // number of hash blocks of the row that have KV
  void publish_filled(int32_t row);
  Content content_of(const TokenChain& chain, const CacheGroup& group, int64_t first_block) const;
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
