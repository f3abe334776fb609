// A request's tokens and the packed hashes of its full blocks, used by engines instead of a list of
// objects.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/hashing/token_chain.h"

namespace kvcache {

// Keeps all tokens until the manager's request takes them, and then only the tokens of the partial
// last block. Used by one thread at a time; only `hash_behind` may run concurrently with readers.
class HashedTokens : public GivenHashes {
 public:
  // `parent`: parent hash of the first block.
  HashedTokens(HashAlgorithm algorithm, int64_t block_size, const Hash& parent)
      : algorithm_(algorithm), block_size_(block_size), parent_(parent) {}

  int64_t num_tokens() const { return first_kept_ + static_cast<int64_t>(kept_.size()); }
  const std::vector<Hash>& hashes() const { return hashes_; }
  int64_t num_bytes() const { return digest_bytes(algorithm_); }
  int64_t block_size() const { return block_size_; }
  int64_t num_blocks() const { return static_cast<int64_t>(hashes_.size()); }
  // Number of full blocks after `num_new` more tokens.
  int64_t num_filled_by(int64_t num_new) const {
    return (num_tokens() + num_new) / block_size_ - num_blocks();
  }

  // Returns the hashes of the blocks that `tokens` fill after the known tokens. `extras` is empty,
  // or contains the CBOR of each block's extra keys. Does not change the object.
  std::vector<Hash> hash_behind(const std::vector<int32_t>& tokens,
                                const std::vector<std::string>& extras) const;
  // Appends tokens, with the result of `hash_behind`.
  void append(std::vector<int32_t> tokens, std::vector<Hash> hashes);
  // Removes all blocks after the first `num_blocks`, which must exist, and all later tokens.
  void truncate(int64_t num_blocks);
  // Moves out all tokens without a copy. Returns no tokens if they were already taken.
  std::vector<int32_t> take_tokens();

  void read(int64_t first, int64_t stop, Hash* out) const override;

 private:
  void drop_full_blocks();

  HashAlgorithm algorithm_;
  int64_t block_size_;
  Hash parent_;
  std::vector<int32_t> kept_;  // tokens from the first kept token on
  int64_t first_kept_ = 0;
  std::vector<Hash> hashes_;
};

}  // namespace kvcache
