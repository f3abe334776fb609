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

#include "core/pool/block_pool.h"

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

// The content of a block.
struct BlockContent {
  HashAlgorithm algorithm;
  const Hash& parent;
  const int32_t* tokens;
  int64_t num_tokens;
  std::string_view extra;  // the CBOR of the block's extra keys; empty means null
};

// Hashes blocks. Reuses its buffers between calls.
class BlockHasher {
 public:
  void hash(const BlockContent& block, Hash* out);
  // Writes the hashes of two blocks to out[0] and out[1]. This is faster than hashing the blocks
  // one by one. Neither block may be the parent of the other.
  void hash_two(const BlockContent& first, const BlockContent& second, Hash* out);

 private:
  using Buffer = std::vector<uint8_t>;
  static size_t encode(const BlockContent& block, Buffer* buffer);  // returns the size

  std::array<Buffer, 2> buffers_;
};

// Returns the hashes of all full blocks. `extras` is empty, or has one entry per full block.
// Accesses only its arguments, so it may run without the GIL.
std::vector<Hash> hash_blocks(HashAlgorithm algorithm, const int32_t* tokens, size_t num_tokens,
                              int64_t block_size, const Hash& parent,
                              const std::vector<std::string>& extras);

}  // namespace kvcache
