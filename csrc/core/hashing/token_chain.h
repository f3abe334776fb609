// The tokens of one request, and the hashes of its full blocks. Both belong to the request, so that
// hashes computed once survive preemption.
//
// Used by one thread at a time. A digest in Python may call back, or let other threads run, while a
// block is hashed; calls that must not happen then are refused.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "core/hashing/block_hash.h"
#include "core/hashing/extra_keys.h"

namespace kvcache {

class TokenChain;

// Known token ids; shared by the chains of a request.
class TokenIds {
 public:
  // Ids are 0 or more; with `takes_placeholders` also below, where something else says what they
  // stand for.
  explicit TokenIds(bool takes_placeholders = false) : takes_placeholders_(takes_placeholders) {}
  TokenIds(std::vector<int32_t> ids, bool takes_placeholders)
      : takes_placeholders_(takes_placeholders), ids_(std::move(ids)) {}
  TokenIds(const TokenIds&) = delete;

  // Null stands for zeros. Throws std::invalid_argument on a negative id, std::runtime_error while
  // a chain hashes these tokens, and whatever the given hashes of a chain throw, with nothing
  // appended.
  void append(const int32_t* tokens, int64_t n);
  // Removes the last n tokens, which the caller has just appended.
  void take_back(int64_t n);

  bool takes_placeholders() const { return takes_placeholders_; }
  // Throws std::invalid_argument that names the i-th id, which is negative.
  [[noreturn]] static void fail_negative(int64_t i, int32_t id);

  int64_t size() const { return static_cast<int64_t>(ids_.size()); }
  const std::vector<int32_t>& ids() const { return ids_; }

 private:
  friend class TokenChain;
  bool takes_placeholders_;
  std::vector<int32_t> ids_;
  int num_hashing_ = 0;               // chains that are hashing now
  std::vector<TokenChain*> readers_;  // chains that read given hashes as tokens come
};

// Hashes of a request's blocks that its engine has computed, and goes on computing.
class GivenHashes {
 public:
  virtual ~GivenHashes() = default;
  // Writes those of blocks `first` to `stop - 1`. Throws where they are not there, or of another
  // length.
  virtual void read(int64_t first, int64_t stop, Hash* out) const = 0;
};

// How a chain gets its hashes.
struct HashScheme {
  HashAlgorithm algorithm = HashAlgorithm::kSha256Cbor;
  std::shared_ptr<const GivenHashes> given;  // null: they are computed here
};

// The caller's, for those who read events; nothing is known of it here. Null: there is none.
using EventLabels = std::shared_ptr<const void>;

// A request's block hashes for one block size and one first parent. Given ones are read when the
// chain is made and when tokens come, so that no later call lacks any.
class TokenChain {
 public:
  // `read_cache`, `write_cache`: whether the request may take hits, and whether its blocks are
  // cached. `num_encoder_tokens`: tokens that it needs in groups that hold an encoder's KV.
  // Throws whatever the given hashes throw.
  TokenChain(std::shared_ptr<TokenIds> tokens, int64_t block_size, const Hash& parent,
             ExtraKeys extra_keys, bool read_cache, bool write_cache,
             int64_t num_encoder_tokens = 0, HashScheme scheme = {}, EventLabels labels = nullptr);
  ~TokenChain();
  TokenChain(const TokenChain&) = delete;

  int64_t block_size() const { return block_size_; }
  bool read_cache() const { return read_cache_; }
  // Where a call says whether it reads; with encoder tokens it never does.
  bool reads(std::optional<bool> read_cache) const {
    return read_cache.value_or(read_cache_) && num_encoder_tokens_ == 0;
  }
  bool write_cache() const { return write_cache_; }
  int64_t num_encoder_tokens() const { return num_encoder_tokens_; }
  int64_t num_tokens() const { return tokens_->size(); }
  bool takes_placeholders() const { return tokens_->takes_placeholders(); }
  const int32_t* tokens() const { return tokens_->ids().data(); }
  const Hash& parent() const { return parent_; }         // of the first block
  const EventLabels& labels() const { return labels_; }  // of events of its blocks
  uint32_t tenant() const { return extra_keys_.tenant(); }
  bool is_given() const { return scheme_.given != nullptr; }  // its hashes, by the engine
  bool has_unhashed_blocks() const {
    return (static_cast<int64_t>(hashes_.size()) + 1) * block_size_ <= num_tokens();
  }

  // Hashes of the full blocks; missing ones are computed now. Throws std::runtime_error while an
  // earlier call computes them, and whatever the digest throws; blocks before keep their hashes
  // then.
  const std::vector<Hash>& hashes();

  // Hashes computed so far; computes none.
  const std::vector<Hash>& known_hashes() const { return hashes_; }
  // Beside the known hashes: variants (core/pool/variants.h). Null: all are 0.
  const uint64_t* variants() const { return variants_.empty() ? nullptr : variants_.data(); }
  uint64_t variant(int64_t i) const {
    return variants_.empty() ? 0 : variants_[static_cast<size_t>(i)];
  }

  void append(const int32_t* tokens, int64_t n) { tokens_->append(tokens, n); }
  // Whether both have the same KV for their first num_tokens tokens. Hashes that both know must
  // agree.
  bool begins_like(const TokenChain& other, int64_t num_tokens) const;
  // Copies the hashes of another chain's blocks within its first num_tokens tokens, which are
  // equal.
  void adopt_hashes(const TokenChain& other, int64_t num_tokens);

  // Removes the last n tokens, which only the caller has seen, and the hashes of their blocks.
  void take_back(int64_t n) {
    tokens_->take_back(n);
    forget_removed();
  }

 private:
  friend class TokenIds;
  void read_given();
  void forget_removed();  // hashes of blocks that are not full any more

  std::shared_ptr<TokenIds> tokens_;
  int64_t block_size_;
  Hash parent_;
  ExtraKeys extra_keys_;
  bool read_cache_, write_cache_;
  int64_t num_encoder_tokens_;
  HashScheme scheme_;
  EventLabels labels_;
  bool is_hashing_ = false;
  std::vector<Hash> hashes_;
  std::vector<uint64_t> variants_;  // as many as hashes, where the request has items; else none
};

}  // namespace kvcache
