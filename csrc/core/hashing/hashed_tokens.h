// SPDX-License-Identifier: Apache-2.0
// A request's tokens and the packed hashes of its full blocks, used by engines instead of a list of
// objects.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "core/hashing/token_chain.h"

namespace kvcache {

// Keeps all tokens until the manager's request takes them, and then only the tokens of blocks that
// are not hashed yet. Used by one thread at a time; only `hash_behind` may run concurrently with
// readers.
class HashedTokens : public GivenHashes {
 public:
  // `parent`: parent hash of the first block. `num_lookahead`: tokens after a block that its hash
  // also covers, as extra keys [keys of the block, token, ...].
  HashedTokens(HashAlgorithm algorithm, int64_t block_size, const Hash& parent,
               int64_t num_lookahead = 0)
      : algorithm_(algorithm),
        block_size_(block_size),
        parent_(parent),
        num_lookahead_(num_lookahead) {}

  int64_t num_tokens() const { return first_kept_ + static_cast<int64_t>(kept_.size()); }
  const std::vector<Hash>& hashes() const { return hashes_; }
  int64_t num_bytes() const { return digest_bytes(algorithm_); }
  int64_t block_size() const { return block_size_; }
  int64_t num_blocks() const { return static_cast<int64_t>(hashes_.size()); }
  int64_t num_lookahead() const { return num_lookahead_; }
  // Number of blocks that can be hashed after `num_new` more tokens and are not hashed yet.
  int64_t num_filled_by(int64_t num_new) const {
    const int64_t covered = std::max(num_tokens() + num_new - num_lookahead_, int64_t{0});
    return covered / block_size_ - num_blocks();
  }

  // Returns the hashes of the `num_filled_by` blocks that can be hashed once `tokens` are appended
  // to the known tokens. `extras` is empty, or contains the CBOR of each block's extra keys. Does
  // not change the object.
  std::vector<Hash> hash_behind(const std::vector<int32_t>& tokens,
                                const std::vector<std::string>& extras) const;
  // Appends tokens, with the result of `hash_behind`.
  void append(std::vector<int32_t> tokens, std::vector<Hash> hashes);
  // Removes everything after the first `num_blocks` blocks, which must exist.
  void truncate(int64_t num_blocks);
  // Moves out all tokens without a copy. Returns no tokens if they were already taken.
  std::vector<int32_t> take_tokens();

  void read(int64_t first, int64_t stop, Hash* out) const override;

 private:
  void drop_full_blocks();
  // Returns the CBOR of [keys of the block, token, ...] of each block. `tokens` must contain
  // num_lookahead tokens after the last block.
  std::vector<std::string> extras_with_lookahead(const int32_t* tokens, int64_t num_blocks,
                                                 const std::vector<std::string>& extras) const;

  HashAlgorithm algorithm_;
  int64_t block_size_;
  Hash parent_;
  int64_t num_lookahead_;
  std::vector<int32_t> kept_;  // known tokens, starting with the first kept token
  int64_t first_kept_ = 0;
  std::vector<Hash> hashes_;
};

}  // namespace kvcache
