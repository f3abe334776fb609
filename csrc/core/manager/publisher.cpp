#include "core/manager/publisher.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace kvcache {

Publisher::Publisher(const Context& context, const ManagerOptions& options)
    : c_(context),
      is_enabled_(options.enable_caching),
      waits_for_marks_(options.publishes_when_marked),
      records_events_(options.record_events),
      announces_reused_(options.announce_reused) {}

int64_t Publisher::num_with_kv(int32_t row) const {
  const int64_t num_computed = (*c_.rows)[row].num_computed;
  return waits_for_marks_ ? std::min(c_.rows->info(row).num_marked, num_computed) : num_computed;
}

int64_t Publisher::next_publish(int32_t row) const {
  const Row& r = (*c_.rows)[row];
  if (r.is_stale || r.is_receiving || !is_enabled_ || !r.chain->write_cache()) return kUnbounded;
  int64_t next = kUnbounded;
  const RowBlocks* blocks = c_.rows->blocks(row);
  for (const CacheGroup& group : *c_.groups) {
    const RowBlocks& each = blocks[group.id];
    if (!group.is_cached) continue;
    const int64_t partial = (int64_t{each.num_partial} + 1) * c_.hash_block_size;
    const bool has_partial =
        group.has_partial && (!group.holds_state() || partial <= c_.rows->info(row).num_prompt);
    next = std::min(next, has_partial ? partial : (each.num_published + 1) * group.block_size);
  }
  return next;
}

int64_t Publisher::num_hashed(int32_t row) const {
  return std::min(num_with_kv(row) / c_.hash_block_size,
                  static_cast<int64_t>((*c_.rows)[row].chain->known_hashes().size()));
}

void Publisher::publish_filled(int32_t row) {
  Row& r = (*c_.rows)[row];
  const int64_t num_hashed = this->num_hashed(row);
  for (const CacheGroup& group : *c_.groups) {
    if (!group.is_cached) continue;
    if (group.holds_state()) {
      publish_states(row, group);
      if (group.has_partial) keep_state(row, group);
    } else {
      if (group.has_partial) publish_partial(row, group, num_hashed);
      publish_whole(row, group, num_hashed);
    }
  }
  r.next_publish = next_publish(row);
}

void Publisher::publish_blocks(int32_t row) {
  if (!may_publish(row)) return;
  const int64_t num_hashed = this->num_hashed(row);
  for (const CacheGroup& group : *c_.groups) {
    if (group.holds_tokens() && group.is_cached) publish_whole(row, group, num_hashed);
  }
}

// What no hit can read is not published: its blocks go before all that is cached.
void Publisher::publish_whole(int32_t row, const CacheGroup& group, int64_t num_hashed) {
  RowBlocks& each = c_.rows->blocks(row)[group.id];
  const int64_t num_full = num_hashed / group.num_hashes;
  const int64_t first = std::max(each.num_published, each.num_dropped);
  for (int64_t b = first; b < num_full; ++b) {
    const int64_t run = b;
    b = group.keeps_all ? num_full : b;
    while (b < num_full && group.may_be_hit(b)) ++b;
    if (b > run) publish_run(row, group, run, each.blocks.data() + run, b - run);
  }
  each.num_published = std::max(each.num_published, num_full);
}

void Publisher::publish_partial(int32_t row, const CacheGroup& group, int64_t num_hashed) {
  RowBlocks& each = c_.rows->blocks(row)[group.id];
  const std::vector<Hash>& hashes = (*c_.rows)[row].chain->known_hashes();
  for (; each.num_partial < num_hashed; ++each.num_partial) {
    const int64_t block = each.num_partial / group.num_hashes;
    const bool is_whole = (int64_t{each.num_partial} + 1) % group.num_hashes == 0;
    if (is_whole || block < each.num_dropped) continue;
    c_.pool->publish_partial(each[block], hashes[static_cast<size_t>(each.num_partial)], hashes[0],
                             group.id, (*c_.rows)[row].chain->variant(each.num_partial));
    note(row, group, block, each[block]);
  }
}

// The state after the tokens that are no drafts, and those after drafts, as far as these are known.
void Publisher::publish_states(int32_t row, const CacheGroup& group) {
  const Row& r = (*c_.rows)[row];
  const RowBlocks& each = c_.rows->blocks(row)[group.id];
  if (each.num_alive() == 0) return;
  const int64_t first = r.num_computed - r.num_drafts;
  publish_state(row, group, first, each[each.num_dropped]);
  for (int64_t n = (first / group.block_size + 1) * group.block_size; n <= r.num_computed;
       n += group.block_size) {
    publish_state(row, group, n, each[each.num_dropped + n - first]);
  }
}

// A state at a block boundary stays where a step ended there, or a draft that was accepted.
void Publisher::publish_state(int32_t row, const CacheGroup& group, int64_t num_tokens,
                              BlockId page) {
  const Row& r = (*c_.rows)[row];
  RowBlocks& each = c_.rows->blocks(row)[group.id];
  if (r.next_publish == kUnbounded) return;
  const int64_t num_passed = num_tokens / group.block_size;
  if (num_tokens % group.block_size != 0) {
    each.num_published = std::max(each.num_published, num_passed);
    return;
  }
  const auto num_known = static_cast<int64_t>(r.chain->known_hashes().size());
  if (num_passed <= each.num_published || num_passed * group.num_hashes > num_known) return;
  if (group.may_be_hit(num_passed - 1)) publish_run(row, group, num_passed - 1, &page, 1);
  each.num_published = num_passed;
}

// A state inside a block stays where a step of the prompt ended at a hash boundary, unless the
// cache has it: the row's next step leaves the page to it.
void Publisher::keep_state(int32_t row, const CacheGroup& group) {
  const Row& r = (*c_.rows)[row];
  RowBlocks& each = c_.rows->blocks(row)[group.id];
  const int64_t num_hashed = r.num_computed / c_.hash_block_size;
  if (r.num_drafts > 0) return;  // none of a prompt
  if (r.next_publish == kUnbounded || num_hashed <= each.num_partial) return;
  each.num_partial = static_cast<int32_t>(num_hashed);
  if (r.num_computed % c_.hash_block_size != 0 || r.num_computed % group.block_size == 0 ||
      r.num_computed > c_.rows->info(row).num_prompt) {
    return;
  }
  const std::vector<Hash>& hashes = r.chain->known_hashes();
  const Hash& hash = hashes[static_cast<size_t>(num_hashed - 1)];
  if (c_.pool->find_partial(hash, group.id) != kNullBlock) return;
  const BlockId page = each[each.num_dropped];
  c_.pool->publish_partial(page, hash, hashes[0], group.id, r.chain->variant(num_hashed - 1));
  note(row, group, each.num_dropped, page);
  each.keeps_state = true;
}

void Publisher::publish_run(int32_t row, const CacheGroup& group, int64_t first_block,
                            const BlockId* ids, int64_t n) {
  const Row& r = (*c_.rows)[row];
  Content content = content_of(*r.chain, group, first_block);
  const RowBlocks& each = c_.rows->blocks(row)[group.id];
  if (group.keeps_all && first_block > each.num_dropped) content.before = each[first_block - 1];
  publish_ids(content, group, ids, n);
  if (!c_.journal->notes(r)) return;
  for (int64_t i = 0; i < n; ++i) note(row, group, first_block + i, ids[i]);
}

void Publisher::publish_offloaded() {
  if (c_.host == nullptr) return;
  const std::vector<BlockId> written = c_.host->publish_offloaded();
  c_.journal->note_written(written);
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

// Blocks `first_block` on of the chain's tokens.
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
  content.root = hashes;
  content.is_chain = group.keeps_all;
  content.begins_chain = first_block == 0;
  if (records_events_) {
    content.first_token = first_block * group.block_size;
    content.tokens = chain.tokens() + content.first_token;
    content.tokens_per_block = group.block_size;
    content.labels = &chain.labels();
  }
  return content;
}

// The blocks that the row has taken: external tokens may read less than the hit.
void Publisher::announce(int32_t row, const PrefixHit& hit) const {
  const TokenChain& chain = *(*c_.rows)[row].chain;
  for (const CacheGroup& group : *c_.groups) {
    const std::vector<BlockId>& blocks = hit.blocks[group.id];
    const auto size = static_cast<int64_t>(blocks.size());
    const int64_t taken = c_.rows->blocks(row)[group.id].num_dropped;
    for (int64_t first = taken, stop = taken; first < size; first = stop + 1) {
      // Null ones are not read any more, or on the host.
      for (stop = first; stop < size && blocks[static_cast<size_t>(stop)] != kNullBlock;) ++stop;
      if (stop > first) {
        c_.pool->announce(content_of(chain, group, first), stop - first, group.id);
      }
    }
  }
}

void Publisher::publish_ids(const Content& content, const CacheGroup& group, const BlockId* ids,
                            int64_t n) {
  c_.pool->publish(ids, content, n, group.id);
  c_.stats->add_stored(group.id, n);
  if (c_.host != nullptr) c_.host->on_published(ids, n);
}

// An abort asks for what steps made findable, also of rows that have left.
void Publisher::note(int32_t row, const CacheGroup& group, int64_t block, BlockId id) {
  c_.journal->note_published(row, (*c_.rows)[row], block * group.block_size, group.id, id,
                             c_.pool->generation(id));
}

void Publisher::check_invariants() const {
  for (int32_t row = 0; row < c_.rows->size(); ++row) {
    if (!c_.rows->is_in_use(row)) continue;
    const Row& r = (*c_.rows)[row];
    const auto fail = [&](const char* what) {
      throw std::logic_error("row " + std::to_string(row) + " " + what);
    };
    if (r.is_stale && r.next_publish != kUnbounded) fail("would publish KV of an earlier epoch");
    if (r.next_publish > next_publish(row)) fail("waits too long to publish");
    for (const CacheGroup& group : *c_.groups) {
      const RowBlocks& each = c_.rows->blocks(row)[group.id];
      if (group.is_cached && each.num_published * group.block_size > r.num_computed) {
        fail("has published blocks that are not full");
      }
      if (each.keeps_state && !(group.holds_state() && r.num_computed % c_.hash_block_size == 0)) {
        fail("keeps a state that is not at a hash boundary");
      }
    }
  }
}

}  // namespace kvcache
