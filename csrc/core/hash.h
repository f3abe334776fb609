// Block ids and block hashes.
#pragma once

#include <cstdint>
#include <cstring>

namespace kvcache {

using BlockId = int32_t;

// Block 0 of every pool: never allocated, never cached, safe to read. No list holds it, so 0 also
// means "none" in every link of the pool, and zeroed memory is a valid pool of fresh blocks.
inline constexpr BlockId kNullBlock = 0;

struct Hash {
  uint8_t bytes[32];
  bool operator==(const Hash& other) const { return std::memcmp(bytes, other.bytes, 32) == 0; }

  // 32 of its bits; different hashes collide with a probability of 2**-32.
  uint32_t tag() const {
    uint32_t word;
    std::memcpy(&word, bytes, sizeof(word));
    return word;
  }
};

struct HashOf {
  size_t operator()(const Hash& hash) const {
    uint64_t word;
    std::memcpy(&word, hash.bytes, sizeof(word));
    return word;
  }
};

}  // namespace kvcache
