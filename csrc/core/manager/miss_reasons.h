// SPDX-License-Identifier: Apache-2.0
// Determines why tokens of a request were not found in the cache (`CacheOptions.explain_misses`).
//
// The tokens after a request's hit are divided into ranges with one reason each, so the counts
// always add up to the missed tokens.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/groups/cache_group.h"
#include "core/groups/find_block.h"
#include "core/groups/hit_ends.h"
#include "core/hashing/token_chain.h"
#include "core/listeners/lost_blocks.h"
#include "core/manager/options.h"
#include "core/manager/row_context.h"
#include "core/manager/step_request.h"
#include "core/pool/block_pool.h"

namespace kvcache {

// Except for kNotRead, the reasons are listed in the order of their ranges in a request.
enum class MissReason : uint8_t {
  kNotRead,    // the request is a fork, or the request or the manager does not use the cache
  kExternal,   // the KV came from another source (`NewRow::external`)
  kNotTaken,   // cached, but the request took a shorter hit, because the longer one did not fit
  kNotLoaded,  // on the host, but not loaded
  kBoundary,   // cached, but another block, window or state that the hit needs is not
  kEvicted,    // evicted to make room
  kRemoved,    // removed by a reset, an invalidation or a call to `evict`
  kInFlight,   // a running request has not computed the block yet
  kOtherKeys,  // a recent request had the same tokens with another salt, adapter or item
  kNew,        // never seen, or forgotten
  kTail,       // after the last position at which a hit can end
};
inline constexpr size_t kNumMissReasons = 11;

struct MissReport {
  using Counts = std::array<int64_t, kNumMissReasons>;

  int64_t num_tokens = 0;  // known tokens at admission
  int64_t num_hit = 0;
  Counts missed{};  // tokens by reason
  // How the first block that is no longer cached left the cache, if this is known.
  std::optional<LostBlocks::Loss> lost;
  // The length of the longest prefix that the request shares with a recent request, whose generated
  // tokens count too; -1 if there is none.
  int64_t num_alike = -1;
  std::string alike;            // name of that request
  const char* differs_in = "";  // the first extra key that differs; empty: none
};

class MissReasons {
 public:
  // Records one in `explain_misses` of the blocks that leave the cache.
  MissReasons(const RowContext& context, const HitEnds* ends, const ManagerOptions& options)
      : c_(context),
        ends_(ends),
        group_(options.enable_caching ? group_of(*c_.groups) : nullptr),
        lost_(options.num_blocks + options.num_host_blocks, options.explain_misses,
              group_ == nullptr ? uint8_t{0} : group_->id, &c_.pool->view()),
        signs_(kMostRecent),
        recent_(kMostRecent) {}

  // The record to which both pools must report the blocks that leave the cache.
  LostBlocks* lost() { return &lost_; }

  // The lengths of the hits that a lookup found, and of the hit that the request took.
  struct Found {
    int64_t num_tokens = 0;         // hit length on the tiers that the request reads
    int64_t num_with_host = 0;      // hit length on both tiers
    int64_t num_shared_tokens = 0;  // see PrefixHit
    int64_t num_taken = 0;
  };

  // Releases requests that are no longer recent. This may run Python code, so it must be called
  // before a call changes anything.
  void release_dropped() { dropped_.clear(); }
  // Records that the request is admitted as this row. Called before blocks are evicted for it.
  void note(int32_t row, const NewRow& asked, const Found& found, bool counts) {
    MissReport& report = report_of(row);
    report = of(asked, found);
    for (size_t i = 0; counts && i < kNumMissReasons; ++i) total_[i] += report.missed[i];
    add_recent(asked, report, row);
    c_.pool->set_taker(report.num_hit > 0 ? Taker::kContinued : Taker::kNew);
  }
  // Records that the row is a fork. It shares the computed tokens of its parent and looks up
  // nothing.
  void note_fork(int32_t row, int64_t num_tokens, int64_t num_computed) {
    MissReport& report = report_of(row);
    report = {};
    report.num_tokens = num_tokens;
    report.num_hit = std::min(num_computed, num_tokens);
    report.missed[static_cast<size_t>(MissReason::kNotRead)] = num_tokens - report.num_hit;
  }

  // Returns the report for the admission of this row.
  MissReport of_row(int32_t row) const {
    MissReport report = reports_[static_cast<size_t>(row)];
    compare_with_recent(*c_.row(row).chain, &report);
    return report;
  }
  // Returns the report that the request would get if it were admitted now.
  MissReport of_new(const NewRow& asked, const Found& found) const {
    MissReport report = of(asked, found);
    compare_with_recent(*asked.chain, &report);
    return report;
  }

  const MissReport::Counts& total() const { return total_; }
  void clear() { total_ = {}; }

 private:
  // A summary of a request. Summaries are compared before the chains of recent requests are read.
  struct Sign {
    uint64_t fingerprint = 0;  // fingerprint of the first tokens
    uint64_t keys = 0;         // digest of the extra keys
    int64_t first_missed = 0;  // index of the first missed block
    uint64_t missed_word = 0;  // part of the hash of that block; 0: none
  };
  // One of the most recently admitted requests.
  struct Recent {
    int64_t admission = 0;
    int32_t row = -1;
    std::shared_ptr<TokenChain> chain;  // null: unused
    std::string name;
    int64_t num_tokens = 0;  // number of tokens at its admission
  };
  static constexpr size_t kMostRecent = 64;
  static constexpr int64_t kMostRecentTokens = int64_t{1} << 22;
  static constexpr int64_t kFingerprintTokens = 16;  // or one hash block if that is shorter
  static constexpr size_t kMostNameBytes = 256;
  // The search for lost blocks ends after this number of sampled blocks that were never seen.
  static constexpr int kMostUnknown = 3;

  // Divides the missed tokens of a report into ranges.
  struct Ranges {
    void add_until(int64_t stop, MissReason reason) {
      stop = std::min(stop, report->num_tokens);
      if (stop <= position) return;
      report->missed[static_cast<size_t>(reason)] += stop - position;
      position = stop;
    }

    MissReport* report;
    int64_t position;  // end of the last range
  };

  // Whether both chains have this hash, and the prefixes that end with it have the same content.
  static bool have_same_content(const TokenChain& one, const TokenChain& other, int64_t i) {
    return i < std::min(one.num_known_hashes(), other.num_known_hashes()) &&
           one.known_hash(i) == other.known_hash(i) && one.variant(i) == other.variant(i);
  }
  static uint64_t word_of(const Hash& hash) {
    uint64_t word;
    std::memcpy(&word, hash.bytes, sizeof(word));
    return std::max<uint64_t>(word, 1);
  }
  MissReport of(const NewRow& asked, const Found& found) const {
    const TokenChain& chain = *asked.chain;
    MissReport report;
    report.num_tokens = chain.num_tokens();
    report.num_hit = found.num_taken;
    Ranges ranges{&report, report.num_hit};
    ranges.add_until(report.num_hit + asked.external.num_tokens, MissReason::kExternal);
    if (!asked.reads() || group_ == nullptr) {
      ranges.add_until(report.num_tokens, MissReason::kNotRead);
      return report;
    }
    ranges.add_until(found.num_tokens, MissReason::kNotTaken);
    ranges.add_until(found.num_with_host, MissReason::kNotLoaded);
    const int64_t last =
        ends_->longest(chain.num_tokens(), num_hashed(chain), /*with_partial=*/true);
    ranges.add_until(std::min(found.num_shared_tokens, last), MissReason::kBoundary);
    if (ranges.position < last && group_->keeps_all) {
      ranges.add_until(std::min(find_cached(chain, ranges.position, last), last),
                       MissReason::kBoundary);
    }
    if (ranges.position < last) add_missing(chain, last, &ranges);
    ranges.add_until(report.num_tokens, MissReason::kTail);
    return report;
  }
  // Adds the ranges up to token `last` whose blocks are not cached.
  void add_missing(const TokenChain& chain, int64_t last, Ranges* ranges) const {
    MissReport* const report = ranges->report;
    const int64_t lost = find_lost(chain, ranges->position, last, report);
    // A group that keeps all tokens can hit every cached block whose predecessors are cached.
    MissReason reason = group_->keeps_all ? MissReason::kEvicted : MissReason::kBoundary;
    if (report->lost) {
      reason = report->lost->is_evicted ? MissReason::kEvicted : MissReason::kRemoved;
    }
    ranges->add_until(std::min(lost, last), reason);
    const Sign sign = sign_of(chain, ranges->position);
    const auto add_recent = [&](bool is_in_flight, MissReason why) {
      if (ranges->position >= last) return;
      ranges->add_until(find_recent(chain, sign, ranges->position, last, is_in_flight), why);
    };
    add_recent(/*is_in_flight=*/true, MissReason::kInFlight);
    if (!group_->keeps_all) add_recent(/*is_in_flight=*/false, MissReason::kBoundary);
    if (ranges->position < last) {
      ranges->add_until(find_other_keys(chain, sign, ranges->position, last),
                        MissReason::kOtherKeys);
    }
    ranges->add_until(last, MissReason::kNew);
  }
  // The place for the report of this row.
  MissReport& report_of(int32_t row) {
    const auto i = static_cast<size_t>(row);
    if (i >= reports_.size()) reports_.resize(i + 1);
    return reports_[i];
  }
  int64_t num_hashed(const TokenChain& chain) const {
    return chain.num_known_hashes() * c_.hash_block_size;
  }
  bool is_cached(const TokenChain& chain, int64_t block) const {
    return find_block(*c_.pool, chain, *group_, block) != kNullBlock ||
           (c_.host != nullptr &&
            find_block(c_.host->pages(), chain, *group_, block) != kNullBlock);
  }
  // These functions return the end of the range that begins at token `first`, or `first` if the
  // range is empty.
  int64_t find_lost(const TokenChain& chain, int64_t first, int64_t stop,
                    MissReport* report) const {
    const int64_t bs = group_->block_size;
    const int64_t num_blocks = std::min((stop + bs - 1) / bs, num_hashed(chain) / bs);
    int64_t end = first;
    int num_unknown = 0;
    for (int64_t block = first / bs; block < num_blocks; ++block) {
      const Hash& hash = chain.known_hash(group_->hash_index(block));
      if (!lost_.is_sampled(hash)) continue;
      const std::optional<LostBlocks::Loss> loss = lost_.find(hash);
      const bool is_cached = this->is_cached(chain, block);
      if (!loss && !is_cached) {
        if (group_->keeps_all && ++num_unknown == kMostUnknown) break;
        continue;
      }
      num_unknown = 0;
      end = (block + 1) * bs;
      if (!is_cached && !report->lost) report->lost = loss;
    }
    return end;
  }
  // Cached blocks may lie beyond the end of the hit, either because another group lacks blocks or
  // because a drafting group must find one more block.
  int64_t find_cached(const TokenChain& chain, int64_t first, int64_t stop) const {
    const int64_t bs = group_->block_size, num_blocks = num_hashed(chain) / bs;
    int64_t block = first / bs;
    while (block * bs < stop && block < num_blocks && is_cached(chain, block)) ++block;
    return std::max(first, block * bs);
  }
  // Compares with running requests that have not computed the block at `first`, or with all recent
  // requests.
  int64_t find_recent(const TokenChain& chain, const Sign& sign, int64_t first, int64_t stop,
                      bool is_in_flight) const {
    const int64_t bs = group_->block_size;
    int64_t end = first;
    for (size_t i = 0; i < kMostRecent && sign.missed_word != 0; ++i) {
      if (!may_have_missed(signs_[i], sign, is_in_flight)) continue;
      const Recent& each = recent_[i];
      if (each.chain == nullptr || !each.chain->write_cache()) continue;
      if (is_in_flight && !will_publish(each, first)) continue;
      for (int64_t block = sign.first_missed; block * bs < stop; ++block) {
        if (!have_same_content(chain, *each.chain, group_->hash_index(block))) break;
        end = std::max(end, (block + 1) * bs);
      }
    }
    return std::min(end, stop);
  }
  // Whether a request with the sign `other` may contain the block that `sign` missed. With
  // `is_in_flight`, it must have missed the block too, so that it computes it.
  static bool may_have_missed(const Sign& other, const Sign& sign, bool is_in_flight) {
    if (other.fingerprint != sign.fingerprint) return false;
    if (other.first_missed == sign.first_missed) return other.missed_word == sign.missed_word;
    return !is_in_flight || other.first_missed < sign.first_missed;
  }
  // Whether the request still runs and may publish the block at token `first`.
  bool will_publish(const Recent& each, int64_t first) const {
    if (!c_.rows->is_still(each.row, each.admission) || c_.row(each.row).is_stale) return false;
    return group_->keeps_all || c_.row(each.row).num_computed <= first;
  }
  int64_t find_other_keys(const TokenChain& chain, const Sign& sign, int64_t first,
                          int64_t stop) const {
    int64_t end = first;
    const int64_t at = group_->hash_index(first / group_->block_size);
    if (at >= chain.num_known_hashes()) return first;
    for (size_t i = 0; i < kMostRecent; ++i) {
      if (signs_[i].fingerprint != sign.fingerprint || signs_[i].keys == sign.keys) continue;
      const Recent& each = recent_[i];
      if (each.chain == nullptr || at >= each.chain->num_known_hashes()) continue;
      // With the same content, the keys differ only in items later in the prompt.
      if (have_same_content(chain, *each.chain, at)) continue;
      end = std::max(end, num_equal(chain, *each.chain, std::min(each.num_tokens, stop)));
    }
    return end - end % ends_->unit(/*with_partial=*/true);
  }
  void compare_with_recent(const TokenChain& chain, MissReport* report) const {
    const Sign sign = sign_of(chain, report->num_hit);
    for (size_t i = 0; i < kMostRecent; ++i) {
      const Recent& each = recent_[i];
      if (signs_[i].fingerprint != sign.fingerprint || each.chain == nullptr) continue;
      if (each.chain.get() == &chain) continue;
      const int64_t num_alike = num_equal(chain, *each.chain, report->num_tokens);
      if (num_alike <= report->num_alike) continue;
      report->num_alike = num_alike;
      report->alike = each.name;
      report->differs_in = chain.extra_keys().first_difference(each.chain->extra_keys());
    }
  }
  // `position`: the token at which the misses of the request begin.
  Sign sign_of(const TokenChain& chain, int64_t position) const {
    Sign sign;
    const int64_t n = std::min({chain.num_tokens(), kFingerprintTokens, c_.hash_block_size});
    for (int64_t i = 0; i < n; ++i) {
      sign.fingerprint += static_cast<uint32_t>(chain.tokens()[i]);
      sign.fingerprint *= 0x9E3779B97F4A7C15;
      sign.fingerprint ^= sign.fingerprint >> 32;
    }
    sign.keys = chain.extra_keys().digest();
    if (group_ == nullptr) return sign;
    sign.first_missed = position / group_->block_size;
    const int64_t at = group_->hash_index(sign.first_missed);
    if (at < chain.num_known_hashes()) sign.missed_word = word_of(chain.known_hash(at));
    return sign;
  }
  static int64_t num_equal(const TokenChain& one, const TokenChain& other, int64_t most) {
    const int64_t n = std::min({one.num_tokens(), other.num_tokens(), most});
    return std::mismatch(one.tokens(), one.tokens() + n, other.tokens()).first - one.tokens();
  }
  void add_recent(const NewRow& asked, const MissReport& report, int32_t row) {
    const int64_t num_tokens = asked.chain->num_tokens();
    if (num_tokens > kMostRecentTokens) return;
    while (num_recent_ == kMostRecent ||
           (num_recent_ > 0 && num_recent_tokens_ + num_tokens > kMostRecentTokens)) {
      drop_oldest();
    }
    const size_t i = (oldest_ + num_recent_++) % kMostRecent;
    signs_[i] = sign_of(*asked.chain, report.num_hit);
    Recent& recent = recent_[i];
    recent.admission = c_.row(row).admission;
    recent.row = row;
    recent.chain = asked.chain;
    recent.name = asked.name.substr(0, kMostNameBytes);
    recent.num_tokens = num_tokens;
    num_recent_tokens_ += num_tokens;
  }
  void drop_oldest() {
    Recent& recent = recent_[oldest_];
    dropped_.push_back(std::move(recent.chain));
    recent.chain = nullptr;
    num_recent_tokens_ -= recent.num_tokens;
    oldest_ = (oldest_ + 1) % kMostRecent;
    --num_recent_;
  }

  // Prefers groups that keep all tokens and, among them, the group with the smallest blocks,
  // because small blocks show most precisely which tokens were seen.
  static const CacheGroup* group_of(const std::vector<CacheGroup>& groups) {
    const CacheGroup* best = nullptr;
    for (const CacheGroup& group : groups) {
      if (!group.is_cached) continue;
      const bool is_better =
          best == nullptr || group.keeps_all > best->keeps_all ||
          (group.keeps_all == best->keeps_all && group.block_size < best->block_size);
      if (is_better) best = &group;
    }
    return best;
  }

  RowContext c_;
  const HitEnds* ends_;
  const CacheGroup* group_;  // whose blocks are searched; null: no group is cached
  LostBlocks lost_;
  MissReport::Counts total_{};
  std::vector<MissReport> reports_;  // by row
  // Ring buffers.
  std::vector<Sign> signs_;
  std::vector<Recent> recent_;
  size_t oldest_ = 0, num_recent_ = 0;
  int64_t num_recent_tokens_ = 0;
  std::vector<std::shared_ptr<TokenChain>> dropped_;
};

}  // namespace kvcache
