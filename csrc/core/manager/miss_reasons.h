// SPDX-License-Identifier: Apache-2.0
// Determines why tokens of a request were not found in the cache (`CacheOptions.explain_misses`).
//
// The tokens after a request's hit are divided into ranges with one reason each, so the counts
// always add up to the missed tokens.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
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
  MissReasons(const RowContext& context, const HitEnds* ends, const ManagerOptions& options);

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
  void note(int32_t row, const NewRow& asked, const Found& found, bool counts);
  // Records that the row is a fork. It shares the computed tokens of its parent and looks up
  // nothing.
  void note_fork(int32_t row, int64_t num_tokens, int64_t num_computed);

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
    void add_until(int64_t stop, MissReason reason);

    MissReport* report;
    int64_t position;  // end of the last range
  };

  MissReport of(const NewRow& asked, const Found& found) const;
  void add_missing(const TokenChain& chain, int64_t last, Ranges* ranges) const;
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
  int64_t find_lost(const TokenChain& chain, int64_t first, int64_t stop, MissReport* report) const;
  int64_t find_cached(const TokenChain& chain, int64_t first, int64_t stop) const;
  int64_t find_recent(const TokenChain& chain, const Sign& sign, int64_t first, int64_t stop,
                      bool is_in_flight) const;
  int64_t find_other_keys(const TokenChain& chain, const Sign& sign, int64_t first,
                          int64_t stop) const;
  void compare_with_recent(const TokenChain& chain, MissReport* report) const;
  // `position`: the token at which the misses of the request begin.
  Sign sign_of(const TokenChain& chain, int64_t position) const;
  static int64_t num_equal(const TokenChain& one, const TokenChain& other, int64_t most) {
    const int64_t n = std::min({one.num_tokens(), other.num_tokens(), most});
    return std::mismatch(one.tokens(), one.tokens() + n, other.tokens()).first - one.tokens();
  }
  void add_recent(const NewRow& asked, const MissReport& report, int32_t row);
  void drop_oldest();

  static const CacheGroup* group_of(const std::vector<CacheGroup>& groups);

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
