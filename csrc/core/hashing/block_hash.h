// Block hashes: SHA-256 chained over canonical CBOR, the interoperable form.
//
//   none_hash  = H(CBOR text string of the seed)
//   hash of a block = H(CBOR of [parent hash, [token ids], extra keys or null])
//
// CBOR is RFC 8949, canonical: every integer in its shortest form. Extra keys come in encoded.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/pool/block_pool.h"

namespace kvcache {

// The parent of a first block.
Hash hash_seed(std::string_view seed);

// Hashes blocks of one chain, one after the other; keeps its buffer between calls.
class BlockHasher {
 public:
  // Token ids are 0 or more. `extra` is the CBOR of the block's extra keys; empty means null.
  Hash hash(const Hash& parent, const int32_t* tokens, int64_t num_tokens, std::string_view extra);

 private:
  std::vector<uint8_t> buffer_;
};

// Hashes of all full blocks; `extras` is empty, or has one entry per full block. Touches nothing
// but its arguments, so that it may run without the interpreter's lock.
std::vector<Hash> hash_blocks(const std::vector<int32_t>& tokens, int64_t block_size,
                              const Hash& parent, const std::vector<std::string>& extras);

}  // namespace kvcache
