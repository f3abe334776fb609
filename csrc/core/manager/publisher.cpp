// SPDX-License-Identifier: Apache-2.0
#include "core/manager/publisher.h"

#include <algorithm>

#include "core/errors.h"

namespace kvcache {

namespace {

// Whether a hit on the group's blocks always requires the chain of a group that keeps all tokens.
bool serves_chains(const std::vector<CacheGroup>& groups, const CacheGroup& group) {
  return !group.keeps_all && has_chains(groups);
}

}  // namespace

int64_t Publisher::next_publish(int32_t row) const {
  const Row& r = c_.row(row);
  if (r.is_stale || r.is_receiving() || !is_enabled_ || !r.chain->write_cache()) return kUnbounded;
  int64_t next = kUnbounded;
  const RowBlocks* blocks = c_.rows->blocks(row);
  for (const CacheGroup& group : *c_.groups) {
    const RowBlocks& each = blocks[group.id];
    if (!group.is_cached) continue;
    const int64_t partial = (int64_t{each.num_partial} + 1) * c_.hash_block_size;
    const bool has_partial =
        group.has_partial && group.rules->publishes_part(c_.rows->info(row), partial);
    next = std::min(next, has_partial ? partial : (each.num_published + 1) * group.block_size);
  }
  return next;
}

void Publisher::publish_filled(int32_t row) {
  Row& r = c_.row(row);
  const int64_t num_hashed = this->num_hashed(row);
  for (const CacheGroup& group : *c_.groups) {
    if (group.is_cached) group.rules->publish(this, row, group, num_hashed);
  }
  r.next_publish = next_publish(row);
}

void Publisher::publish_part(int32_t row, const CacheGroup& group, int64_t block, int64_t hash) {
  const TokenChain& chain = *c_.row(row).chain;
  const BlockId id = c_.held(row, group)[block];
  c_.pool->publish_partial(id, chain.known_hash(hash), chain.known_hash(0), group.id,
                           chain.variant(hash));
  const int64_t end = (hash + 1) * c_.hash_block_size;
  const RetainedEnds& retained = c_.rows->info(row).retained;
  if (serves_chains(*c_.groups, group) && CacheGroup::first_retained(end, retained, 0) == end) {
    c_.pool->notify(Hit{{&id, 1}, Hit::By::kExpected});
  }
  note(row, group, block, id);
}

void Publisher::publish_run(int32_t row, const CacheGroup& group, int64_t first_block,
                            const BlockId* ids, int64_t n) {
  const Row& r = c_.row(row);
  Content content = content_of(*r.chain, group, first_block);
  const RowBlocks& each = c_.held(row, group);
  if (group.keeps_all && first_block > each.num_dropped) content.before = each[first_block - 1];
  publish_ids(content, group, ids, n);
  const bool notifies = serves_chains(*c_.groups, group);
  for (int64_t i = 0; notifies && i < n; ++i) {
    if (group.is_read_at(first_block + i, c_.rows->info(row).retained)) {
      c_.pool->notify(Hit{{ids + i, 1}, Hit::By::kExpected});
    }
  }
  if (!c_.journal->notes(r)) return;
  for (int64_t i = 0; i < n; ++i) note(row, group, first_block + i, ids[i]);
}

void Publisher::publish_arrived() {
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

// Returns the content of the chain's blocks, starting with `first_block`.
Content Publisher::content_of(const TokenChain& chain, const CacheGroup& group,
                              int64_t first_block) const {
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

void Publisher::check_invariants() const {
  for (int32_t row = 0; row < c_.rows->size(); ++row) {
    if (!c_.rows->is_in_use(row)) continue;
    const Row& r = c_.row(row);
    require(!r.is_stale || r.next_publish == kUnbounded, "row ", row,
            " would publish KV of an earlier epoch");
    require(r.next_publish <= next_publish(row), "row ", row, " waits too long to publish");
    for (const CacheGroup& group : *c_.groups) {
      const RowBlocks& each = c_.held(row, group);
      require(!group.is_cached || each.num_published * group.block_size <= r.num_computed, "row ",
              row, " has published blocks that are not full");
      require(!each.keeps_state || (group.rules->traits.updates_in_place &&
                                    r.num_computed % c_.hash_block_size == 0),
              "row ", row, " keeps a state that is not at a hash boundary");
    }
  }
}

}  // namespace kvcache
