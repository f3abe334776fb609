// SPDX-License-Identifier: Apache-2.0
// The tokens of one request, and the hashes of its full blocks. Both belong to the request, so
// computed hashes survive preemption.
//
// Used by one thread at a time. Signal handlers and other threads may run while many tokens are
// hashed (long_work.h). Calls that are not allowed during that time are rejected.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "core/growing_array.h"
#include "core/hashing/block_hash.h"
#include "core/hashing/extra_keys.h"

namespace kvcache {

class TokenChain;

using HashList = GrowingArray<Hash>;

// What the statistics of a manager have counted of a request (core/manager/cache_stats.h). Kept
// with the tokens, because neither preemption nor a forgotten adapter, after which the request has
// other hashes, may change it.
struct CountedTokens {
  uint64_t by = 0;      // the statistics, or 0
  uint64_t number = 0;  // number of requests counted before it
  bool is_counted = false;
  int64_t num_query = 0;  // tokens when the request was counted
  int64_t num_hits = 0;   // tokens counted as hits
  int64_t num_had = 0;    // leading tokens that were hit, received or computed so far
};

// The known token ids, shared by the chains of a request.
class TokenIds {
 public:
  // Ids are at least 0. With `takes_placeholders`, negative ids are also allowed. They stand for
  // content that other data identifies.
  explicit TokenIds(bool takes_placeholders = false) : takes_placeholders_(takes_placeholders) {}
  TokenIds(const std::vector<int32_t>& ids, bool takes_placeholders)
      : takes_placeholders_(takes_placeholders) {
    reserve(ids.size());
    ids_.append(ids.data(), ids.size());
  }
  TokenIds(const TokenIds&) = delete;

  // Appends tokens; null means zeros. Throws std::invalid_argument on a negative id,
  // std::runtime_error while a chain hashes these tokens, and the errors of a chain's given hashes.
  // If it throws, nothing is appended.
  void append(const int32_t* tokens, int64_t n) {
    // Fast path for a single sampled token, which is the most common call.
    if (n == 1 && tokens != nullptr && (*tokens >= 0 || takes_placeholders_) && num_hashing_ == 0 &&
        readers_.empty() && ids_.size() < ids_.capacity()) {
      ids_.push_back(*tokens);
    } else {
      append_any(tokens, n);
    }
  }
  // Removes the last n tokens, which the caller has just appended.
  void take_back(int64_t n);

  bool takes_placeholders() const { return takes_placeholders_; }
  // Throws std::invalid_argument for the i-th id, which is negative.
  [[noreturn]] static void fail_negative(int64_t i, int32_t id);

  int64_t size() const { return static_cast<int64_t>(ids_.size()); }
  const int32_t* data() const { return ids_.data(); }
  int64_t capacity() const { return static_cast<int64_t>(ids_.capacity()); }

 private:
  friend class TokenChain;
  void append_any(const int32_t* tokens, int64_t n);
  void reserve(size_t num_prompt_tokens);

  bool takes_placeholders_;
  CountedTokens counted_;
  GrowingArray<int32_t> ids_;
  int num_hashing_ = 0;               // number of chains that are currently hashing
  std::vector<TokenChain*> readers_;  // chains that read given hashes when tokens arrive
};

// Block hashes of a request that the engine computes.
class GivenHashes {
 public:
  virtual ~GivenHashes() = default;
  // Writes the hashes of blocks [first, stop). Throws if they are missing or have the wrong length.
  virtual void read(int64_t first, int64_t stop, Hash* out) const = 0;
};

// The source of a chain's hashes.
struct HashScheme {
  HashAlgorithm algorithm = HashAlgorithm::kSha256Cbor;
  std::shared_ptr<const GivenHashes> given;  // null: the chain computes its hashes
  // The number of tokens after a block that its hash also covers. A block is hashed once these
  // tokens are known.
  int64_t num_lookahead = 0;
};

// Labels from the caller for readers of events. The manager does not interpret them. Null: no
// labels.
using EventLabels = std::shared_ptr<const void>;

// A request's block hashes for one block size and one root. Given hashes are read when the chain is
// created and when tokens arrive, so they are available to all later calls.
class TokenChain {
 public:
  // `read_cache`: whether the request may hit cached blocks. `write_cache`: whether its blocks are
  // cached. `num_encoder_tokens`: tokens in groups that hold an encoder's KV. Throws the errors of
  // the given hashes.
  TokenChain(std::shared_ptr<TokenIds> tokens, int64_t block_size, const Hash& parent,
             ExtraKeys extra_keys, bool read_cache, bool write_cache,
             int64_t num_encoder_tokens = 0, HashScheme scheme = {}, EventLabels labels = nullptr);
  ~TokenChain();
  TokenChain(const TokenChain&) = delete;

  int64_t block_size() const { return block_size_; }
  bool read_cache() const { return read_cache_; }
  // Whether a call reads the cache. `read_cache`, if set, is the call's own setting and overrides
  // that of the chain. Requests with encoder tokens never read the cache.
  bool reads(std::optional<bool> read_cache) const {
    return read_cache.value_or(read_cache_) && num_encoder_tokens_ == 0;
  }
  bool write_cache() const { return write_cache_; }
  int64_t num_encoder_tokens() const { return num_encoder_tokens_; }
  int64_t num_tokens() const { return tokens_->size(); }
  bool takes_placeholders() const { return tokens_->takes_placeholders(); }
  const int32_t* tokens() const { return tokens_->data(); }
  const Hash& parent() const { return parent_; }         // parent hash of the first block
  const EventLabels& labels() const { return labels_; }  // labels of the events of its blocks
  const ExtraKeys& extra_keys() const { return extra_keys_; }
  bool is_given() const { return scheme_.given != nullptr; }  // hashes are given by the engine
  int64_t num_lookahead() const { return scheme_.num_lookahead; }
  // Number of blocks whose hashes cover only the first num_tokens tokens.
  int64_t num_hashable(int64_t num_tokens) const {
    return std::max(num_tokens - scheme_.num_lookahead, int64_t{0}) / block_size_;
  }
  CountedTokens& counted() { return tokens_->counted_; }
  bool has_unhashed_blocks() const { return num_known_hashes() < num_hashable(); }

  // Returns the hashes of the full blocks, computing missing ones. Throws std::runtime_error while
  // an earlier call computes them, and rethrows the error of an interruption. Already computed
  // hashes are kept.
  const HashList& hashes();

  // Computes the missing hashes of several chains. Hashing two chains at a time is faster than
  // hashing them one by one. Throws the errors of `hashes`; hashes that are already computed are
  // kept.
  static void hash_all(TokenChain* const* chains, size_t n);

  // Returns the hashes computed so far, without computing more.
  const HashList& known_hashes() const { return hashes_; }
  int64_t num_known_hashes() const { return static_cast<int64_t>(hashes_.size()); }
  const Hash& known_hash(int64_t i) const { return hashes_[static_cast<size_t>(i)]; }
  // The variant (core/pool/variants.h) of each hash. Null: all are 0.
  const uint64_t* variants() const { return variants_.empty() ? nullptr : variants_.data(); }
  uint64_t variant(int64_t i) const {
    return variants_.empty() ? 0 : variants_[static_cast<size_t>(i)];
  }

  void append(const int32_t* tokens, int64_t n) { tokens_->append(tokens, n); }
  // Whether both chains have equal KV for their first num_tokens tokens, if it was computed with
  // equal weights. Hashes known to both chains must be equal, unless the parents of the first
  // blocks differ.
  bool begins_like(const TokenChain& other, int64_t num_tokens) const;
  // Copies another chain's hashes for the blocks within the first num_tokens tokens, unless the
  // parents of the first blocks differ. Both chains must have the same first num_tokens tokens.
  void adopt_hashes(const TokenChain& other, int64_t num_tokens);
  // Returns a chain of the same tokens, with the same hashes, that neither reads nor writes the
  // cache. The hashes must not be given.
  std::shared_ptr<TokenChain> uncached() const;

  // Removes the last n tokens, which only the caller has used, and the hashes of their blocks.
  void take_back(int64_t n) {
    tokens_->take_back(n);
    forget_removed();
  }

 private:
  friend class TokenIds;
  int64_t num_hashable() const { return num_hashable(num_tokens()); }
  class Hashing;
  class HashingPair;
  void read_given();
  void forget_removed();  // removes hashes that cover tokens that are no longer known

  std::shared_ptr<TokenIds> tokens_;
  int64_t block_size_;
  Hash parent_;
  ExtraKeys extra_keys_;
  bool read_cache_, write_cache_;
  int64_t num_encoder_tokens_;
  HashScheme scheme_;
  EventLabels labels_;
  bool is_hashing_ = false;
  HashList hashes_;
  GrowingArray<uint64_t> variants_;  // one per hash if the request has items, otherwise empty
};

}  // namespace kvcache
