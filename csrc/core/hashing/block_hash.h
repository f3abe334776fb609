// Block hashes: a digest chained over canonical CBOR, the interoperable form.
//
//   none_hash  = H(CBOR text string of the seed)
//   hash of a block = H(CBOR of [parent hash, [token ids], extra keys or null])
//
// CBOR is RFC 8949, canonical: every integer in its shortest form. Extra keys come in encoded. H is
// SHA-256 (32 bytes), or XXH3 with 128 bits (16 bytes) for those who choose speed.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/pool/block_pool.h"

namespace kvcache {

enum class HashAlgorithm : uint8_t { kSha256Cbor, kXxh3Cbor };

// Throws std::invalid_argument that lists the algorithms.
HashAlgorithm hash_algorithm_of(std::string_view name);
std::vector<std::string> hash_algorithm_names();
inline int64_t digest_bytes(HashAlgorithm algorithm) {
  return algorithm == HashAlgorithm::kSha256Cbor ? 32 : 16;
}

// The parent of a first block.
Hash hash_seed(std::string_view seed, HashAlgorithm algorithm);

// Hashes blocks of one chain, one after the other; keeps its buffer between calls.
class BlockHasher {
 public:
  // `extra` is the CBOR of the block's extra keys; empty means null.
  Hash hash(HashAlgorithm algorithm, const Hash& parent, const int32_t* tokens, int64_t num_tokens,
            std::string_view extra);

 private:
  std::vector<uint8_t> buffer_;
};

// Hashes of all full blocks; `extras` is empty, or has one entry per full block. Touches nothing
// but its arguments, so that it may run without the interpreter's lock.
std::vector<Hash> hash_blocks(HashAlgorithm algorithm, const std::vector<int32_t>& tokens,
                              int64_t block_size, const Hash& parent,
                              const std::vector<std::string>& extras);

}  // namespace kvcache
