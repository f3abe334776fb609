// SPDX-License-Identifier: Apache-2.0
// Block hashes in the format of other engines: chained digests over canonical CBOR.
//
//   none_hash  = H(CBOR text string of the seed)
//   hash of a block = H(CBOR of [parent hash, [token ids], extra keys or null])
//
// Canonical CBOR (RFC 8949) writes every integer in its shortest form. Extra keys are passed
// already encoded. H is SHA-256 (32 bytes), or 128-bit XXH3 (16 bytes) if speed matters more than
// collision resistance.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/hash.h"

namespace kvcache {

enum class HashAlgorithm : uint8_t { kSha256Cbor, kXxh3Cbor };

// Throws std::invalid_argument with a list of the supported algorithms.
HashAlgorithm hash_algorithm_of(std::string_view name);
std::vector<std::string> hash_algorithm_names();
inline int64_t digest_bytes(HashAlgorithm algorithm) {
  return algorithm == HashAlgorithm::kSha256Cbor ? 32 : 16;
}

// Returns the parent hash of the first block of a chain.
Hash hash_seed(std::string_view seed, HashAlgorithm algorithm);

// The content of a block, except for the hash of its parent.
struct BlockContent {
  HashAlgorithm algorithm;
  const int32_t* tokens;
  int64_t num_tokens;
  std::string_view extra;  // the CBOR of the block's extra keys; empty means null
};

// Hashes blocks. Reuses its buffers between calls.
class BlockHasher {
 public:
  // Writes the hashes of n consecutive blocks to `out`. `content_of(i)` returns the content of the
  // i-th block, and `parent` is the hash of the block before the first one. With n > 1,
  // `content_of` must not use this hasher, in which the previous block is already encoded.
  template <class ContentOf>
  void hash_run(const Hash& parent, size_t n, const ContentOf& content_of, Hash* out) {
    // The next block is encoded before the hash of the current block is needed, so that the CPU
    // does both at the same time.
    if (n > 0) encoded_[0].encode(content_of(0));
    for (size_t i = 0; i < n; ++i) {
      if (i + 1 < n) encoded_[(i + 1) % 2].encode(content_of(i + 1));
      encoded_[i % 2].hash(i == 0 ? parent : out[i - 1], &out[i]);
    }
  }
  // Writes the hashes of two blocks to out[0] and out[1]. This is faster than hashing the blocks
  // one by one. Neither block may be the parent of the other.
  void hash_two(const std::array<BlockContent, 2>& blocks,
                const std::array<const Hash*, 2>& parents, Hash* out);

 private:
  // An encoded block, with space for the hash of its parent.
  class Encoded {
   public:
    void encode(const BlockContent& block);
    void reserve(const BlockContent& block);
    void hash(const Hash& parent, Hash* out);

    HashAlgorithm algorithm = HashAlgorithm::kSha256Cbor;
    size_t size = 0;        // without padding
    size_t parent_at = 0;   // position of the parent hash; Sha256Message::kLinkAt for SHA-256
    size_t num_chunks = 0;  // of the padded message; 0 for XXH3
    std::vector<uint8_t> bytes;
  };

  std::array<Encoded, 2> encoded_;
};

// Returns the hashes of all full blocks. `extras` is empty, or has one entry per full block.
// Accesses only its arguments, so it may run without the GIL.
std::vector<Hash> hash_blocks(HashAlgorithm algorithm, const int32_t* tokens, size_t num_tokens,
                              int64_t block_size, const Hash& parent,
                              const std::vector<std::string>& extras);

}  // namespace kvcache
