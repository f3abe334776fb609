// SPDX-License-Identifier: Apache-2.0
// Releases all blocks of rows that are freed, or the blocks after a row's valid tokens.
//
// Invariant: before blocks are released, the eviction policy is notified, and the journal records
// the blocks that cannot be found otherwise.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "core/groups/cache_group.h"
#include "core/groups/find_block.h"
#include "core/groups/rules/page_rules.h"
#include "core/manager/clock.h"
#include "core/manager/row_context.h"
#include "core/pool/block_listener.h"

namespace kvcache {

// The names under which the blocks of freed rows are kept, one per row, or none.
using KeptNames = std::vector<std::string>;

class RowRelease {
 public:
  RowRelease(const RowContext& context, const Clock* clock) : c_(context), clock_(clock) {}

  // Releases the blocks of the row and frees the row. If plans contain the row, the next plan
  // clears it. `keep_as`: keeps the blocks under this name; null: does not.
  void leave(int32_t row, const ReleaseFeatures& features, const std::string* keep_as) {
    const Row& r = c_.row(row);
    if (!r.is_on_host()) {
      note_left(row);
      notify_release(row, features);
    }
    release_row(row, /*with_all=*/true, keep_as);
    if (r.by_step()) c_.plan->clear_later(row);
    c_.plan->forget_resend(row);
    c_.rows->give_up(row);
  }

  // Called when hashes of held blocks are removed. From then on, lookups may fail to find a
  // published block.
  void note_forgotten() { has_forgotten_ = true; }

  // Notifies the eviction policy. Called before the blocks of the row are released.
  void notify_release(int32_t row, ReleaseFeatures features) {
    if (!c_.pool->has_listeners()) return;
    const AdmissionInfo& info = c_.rows->info(row);
    features.num_prefix_tokens = info.num_hit;
    if (features.num_output_tokens < 0) {
      features.num_output_tokens =
          std::max<int64_t>(c_.row(row).chain->num_tokens() - info.num_prompt, 0);
    }
    features.logical_time = ++num_releases_;
    features.wall_ms = clock_->now_ms();
    for (const CacheGroup& group : *c_.groups) {
      if (!group.is_cached) continue;
      const int64_t num_written = c_.rows->num_written(row, group);
      features.num_new_blocks += std::max<int64_t>(num_written - c_.held(row, group).num_hits, 0);
    }
    const bool has_chain = has_chains(*c_.groups);
    if (has_chain) notify_release_ends(row);
    for (const bool is_chain : {false, true}) {
      features.is_chain = is_chain;
      for (const CacheGroup& group : *c_.groups) {
        const bool is_in_chain = group.keeps_all || !has_chain;
        if (group.is_cached && is_in_chain == is_chain) notify_release_of(row, group, &features);
      }
    }
  }

  // Releases the blocks of the row, tail first. `with_all`: includes blocks that do not follow the
  // sequence.
  void release_row(int32_t row, bool with_all, const std::string* keep_as = nullptr) {
    std::vector<BlockId> ids = c_.rows->tail_first(row, with_all);
    if (c_.row(row).is_on_host()) {
      c_.host->pages().release(ids.data(), static_cast<int64_t>(ids.size()));
    } else if (keep_as != nullptr) {
      keep(row, *keep_as, std::move(ids));
    } else {
      c_.release(row, ids);
    }
    c_.rows->info(row).access = {};
    for (const CacheGroup& group : *c_.groups) {
      if (with_all || group.rules->traits.follows_sequence) c_.held(row, group).clear();
    }
  }

  // Restarts the row by releasing its blocks that follow the sequence.
  void let_go(int32_t row) {
    if (!c_.row(row).is_on_host()) note_left(row);
    release_row(row, /*with_all=*/false);
  }

  // Whether the row holds all blocks that the token at `num_tokens` reads, and the block to which
  // its KV is written.
  bool can_resume(int32_t row, int64_t num_tokens) const {
    const RowBlocks* held_by_group = c_.rows->blocks(row);
    const AdmissionInfo& info = c_.rows->info(row);
    if (num_tokens == 0) return false;  // the row may still hit the cache
    return std::all_of(c_.groups->begin(), c_.groups->end(), [&](const CacheGroup& group) {
      return group.rules->can_resume(group, held_by_group[group.id], info, num_tokens);
    });
  }
  // Truncates the row to num_tokens computed tokens, from which it must be able to resume.
  void truncate(int32_t row, int64_t num_tokens) {
    for (const CacheGroup& group : *c_.groups) {
      if (!group.rules->traits.follows_sequence) continue;
      RowBlocks& held = c_.held(row, group);
      const int64_t kept = ceil_div(num_tokens, group.block_size);
      c_.release_tail(row, group, kept);
      held.num_dropped = std::min(held.num_dropped, kept);
      held.num_published = std::min(held.num_published, num_tokens / group.block_size);
      held.num_partial = static_cast<int32_t>(
          std::min<int64_t>(held.num_partial, num_tokens / c_.hash_block_size));
    }
    Row& r = c_.row(row);
    c_.rows->disturb(row);
    r.num_computed = num_tokens;
    r.start = static_cast<int32_t>(num_tokens);
    r.num_drafts = r.num_undecided_before = 0;
    int64_t& hit_end = c_.rows->info(row).hit_end;
    hit_end = std::min(hit_end, num_tokens);
    r.expect_shared();
  }

 private:
  // Records in the journal the onboards of a released row, and those of its computed blocks that
  // lookups cannot find.
  void note_left(int32_t row) const {
    if (!c_.journal->notes(c_.row(row))) return;
    c_.journal->note_left(row, c_.row(row));
    if (c_.host != nullptr) note_onboards(row);
    for (const CacheGroup& group : *c_.groups) {
      const RowBlocks& held = c_.held(row, group);
      if (!group.rules->traits.follows_sequence) continue;
      const int64_t size = std::min(c_.rows->computed(row, group).stop, held.size());
      // A published block normally stays in the cache index. Exceptions are blocks that no hit can
      // read, and the following cases.
      const bool may_be_lost =
          !group.keeps_all || has_forgotten_ || c_.host != nullptr || c_.row(row).has_forked();
      const int64_t first =
          may_be_lost ? held.num_dropped : std::max(held.num_dropped, held.num_published);
      for (int64_t b = first; b < size; ++b) {
        const BlockId id = held[b];
        // The hash of a state does not identify the earlier blocks that its step has computed.
        const bool is_found =
            c_.pool->hash_of(id) != nullptr && !group.rules->traits.updates_in_place;
        if (!is_found) c_.note_dropped(row, group, b, id);
      }
    }
  }
  void notify_release_of(int32_t row, const CacheGroup& group, ReleaseFeatures* features) const {
    const RowBlocks& held = c_.held(row, group);
    const std::vector<BlockId> ids(held.blocks.rbegin(), held.blocks.rend() - held.num_dropped);
    std::vector<int64_t> ends;
    for (auto end = held.size(); end > held.num_dropped; --end) {
      ends.push_back(end * group.block_size);
    }
    features->tokens_per_block = group.block_size;
    c_.pool->notify(Released{ids, /*access=*/{}, ends.data(), features});
  }
  // The likely hits end where the request's own hit ended, at the retained ends, and at the end of
  // the request's tokens.
  void notify_release_ends(int32_t row) const {
    const AdmissionInfo& info = c_.rows->info(row);
    const Row& r = c_.row(row);
    const int64_t num_hashed =
        std::min(r.num_computed / c_.hash_block_size, r.chain->num_known_hashes()) *
        c_.hash_block_size;
    const int64_t unit = c_.groups->front().hit_unit;
    std::vector<int64_t> hits(info.retained.begin(), info.retained.end());
    for (const int64_t hit : {info.num_hit, num_hashed}) {
      hits.push_back(hit / unit * unit);
    }
    std::sort(hits.begin(), hits.end());
    hits.erase(std::unique(hits.begin(), hits.end()), hits.end());
    std::vector<BlockId> ids;
    std::vector<int64_t> ends;
    for (const CacheGroup& group : *c_.groups) {
      if (!group.is_cached || group.keeps_all || !group.rules->traits.has_hits) continue;
      for (const int64_t hit : hits) {
        if (hit > 0 && hit <= num_hashed) add_read_at(hit, *r.chain, group, &ids);
        ends.resize(ids.size(), hit);  // for the blocks that this hit reads
      }
    }
    Released released{ids};
    released.hit_ends = ends.data();
    c_.pool->notify(released);
  }
  // Appends the cached blocks of the group that a hit of this many tokens reads.
  void add_read_at(int64_t hit, const TokenChain& chain, const CacheGroup& group,
                   std::vector<BlockId>* ids) const {
    const auto add = [&](BlockId id) {
      if (id != kNullBlock) ids->push_back(id);
    };
    for (int64_t block = group.first_hit_block(hit); block < hit / group.block_size; ++block) {
      add(find_block(*c_.pool, chain, group, block));
    }
    if (hit % group.block_size == 0) return;
    const int64_t hash = hit / c_.hash_block_size - 1;
    add(c_.pool->find_partial(chain.known_hash(hash), group.id, chain.variant(hash)));
  }
  // Keeps the blocks of the row for a connector, except blocks of groups that are not transferred.
  void keep(int32_t row, const std::string& name, std::vector<BlockId> ids) {
    std::unordered_set<BlockId> own;
    for (const CacheGroup& group : *c_.groups) {
      const std::vector<BlockId>& blocks = c_.held(row, group).blocks;
      if (!group.is_transferred) own.insert(blocks.begin(), blocks.end());
    }
    const auto first_own = std::stable_partition(ids.begin(), ids.end(),
                                                 [&](BlockId id) { return own.count(id) == 0; });
    const std::vector<BlockId> released(first_own, ids.end());
    ids.erase(first_own, ids.end());
    c_.release(row, released);
    c_.frees->keep(name, std::move(ids));
  }
  void note_onboards(int32_t row) const {
    for (const HostTier::Onboard& onboard : c_.host->onboards()) {
      const RowBlocks& held = c_.rows->blocks(row)[onboard.group];
      if (onboard.column < held.size() && held[onboard.column] == onboard.block) {
        c_.note_dropped(row, (*c_.groups)[onboard.group], onboard.column, onboard.block);
      }
    }
  }

  RowContext c_;
  const Clock* clock_;
  int64_t num_releases_ = 0;
  bool has_forgotten_ = false;
};

}  // namespace kvcache
