// What becomes findable: blocks full of real tokens, neither lookahead slots nor unknown tokens.
#include <algorithm>

#include "core/manager/manager.h"

namespace kvcache {

// Tokens with KV: by sequences those that were said to be.
int64_t Manager::num_with_kv(int32_t row) const {
  const int64_t num_computed = rows_[row].num_computed;
  return options_.publishes_when_marked ? std::min(rows_.info(row).num_marked, num_computed)
                                        : num_computed;
}

int64_t Manager::next_publish(const Row& row, const RowBlocks* held) const {
  if (row.is_stale || !options_.enable_caching || !row.chain->write_cache()) return kUnbounded;
  int64_t next = kUnbounded;
  for (const CacheGroup& group : groups_) {
    const RowBlocks& each = held[group.id];
    if (!group.is_cacheable()) continue;
    next = std::min(next, group.has_partial ? (each.num_partial + 1) * hash_block_size_
                                            : (each.num_published + 1) * group.block_size);
  }
  return next;
}

void Manager::publish(int32_t row) {
  Row& r = rows_[row];
  if (r.num_computed < r.next_publish) return;  // most rows of a step
  const int64_t num_hashed = std::min(num_with_kv(row) / hash_block_size_,
                                      static_cast<int64_t>(r.chain->known_hashes().size()));
  for (const CacheGroup& group : groups_) {
    RowBlocks* each = &rows_.blocks(row)[group.id];
    if (group.has_partial) publish_partial(row, group, each, num_hashed);
    if (group.holds_tokens()) publish_blocks(row, group, each, num_hashed);
    if (group.holds_state()) publish_state(row, group, each, r.num_computed);
  }
  r.next_publish = next_publish(r, rows_.blocks(row));
}

void Manager::publish_blocks(int32_t row, const CacheGroup& group, RowBlocks* held,
                             int64_t num_hashed) {
  const int64_t num_full = num_hashed / group.num_hashes;
  const int64_t first = std::max(held->num_published, held->num_dropped);
  if (num_full > first) publish_run(row, group, *held, first, num_full - first);
  held->num_published = std::max(held->num_published, num_full);
}

void Manager::publish_partial(int32_t row, const CacheGroup& group, RowBlocks* held,
                              int64_t num_hashed) {
  const std::vector<Hash>& hashes = rows_[row].chain->known_hashes();
  for (; held->num_partial < num_hashed; ++held->num_partial) {
    const int64_t block = held->num_partial / group.num_hashes;
    const bool is_whole = (held->num_partial + 1) % group.num_hashes == 0;
    if (is_whole || block < held->num_dropped) continue;
    pool_.publish_partial(held->blocks[static_cast<size_t>(block)],
                          hashes[static_cast<size_t>(held->num_partial)], hashes[0], group.id);
    note_published(row, group, block, (*held)[block]);
  }
}

// A state stays only where a step ended at a block boundary.
void Manager::publish_state(int32_t row, const CacheGroup& group, RowBlocks* held,
                            int64_t num_tokens) {
  if (rows_[row].next_publish == kUnbounded) return;
  const int64_t num_passed = num_tokens / group.block_size;
  if (num_tokens % group.block_size != 0) {
    held->num_published = std::max(held->num_published, num_passed);
    return;
  }
  const auto num_known = static_cast<int64_t>(rows_[row].chain->known_hashes().size());
  if (num_passed <= held->num_published || num_passed * group.num_hashes > num_known) return;
  publish_run(row, group, *held, num_passed - 1, 1);
  held->num_published = num_passed;
}

void Manager::publish_run(int32_t row, const CacheGroup& group, const RowBlocks& held,
                          int64_t first_block, int64_t n) {
  const BlockId* ids = held.blocks.data() + first_block;
  publish_ids(*rows_[row].chain, group, first_block, ids, n);
  for (int64_t i = 0; i < n; ++i) {
    note_published(row, group, first_block + i, ids[i]);
  }
}

// As blocks `first_block` on of what the chain stands for.
void Manager::publish_ids(const TokenChain& chain, const CacheGroup& group, int64_t first_block,
                          const BlockId* ids, int64_t n) {
  const Hash* hashes = chain.known_hashes().data();
  const int64_t first_hash = first_block * group.num_hashes;
  Content content{};
  content.hashes = hashes + first_hash + group.num_hashes - 1;
  content.parent = first_hash == 0 ? &chain.parent() : hashes + first_hash - 1;
  content.stride = group.num_hashes;
  content.root = hashes;
  content.is_chain = group.keeps_all;
  if (options_.record_events) {
    content.tokens = chain.tokens() + first_block * group.block_size;
    content.tokens_per_block = group.block_size;
  }
  pool_.publish(ids, content, n, group.id);
  stats_.add_stored(group.id, n);
  if (host_ != nullptr) host_->on_published(ids, n);
}

void Manager::note_published(int32_t row, const CacheGroup& group, int64_t block, BlockId id) {
  journal_.note_published(row, rows_[row], block * group.block_size, group.id, id,
                          pool_.generation(id));
}

}  // namespace kvcache
