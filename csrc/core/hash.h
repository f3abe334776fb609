// Block ids and block hashes: what the control plane deals in.
#pragma once

#include <cstdint>
#include <cstring>

namespace kvcache {

using BlockId = int32_t;

// Block 0 of every pool: never handed out, never cached, safe to read. As no list ever holds it, 0
// also means "none" in every link of the pool, so that zeroed memory is a valid pool of fresh
// blocks.
inline constexpr BlockId kNullBlock = 0;

struct Hash {
  uint8_t bytes[32];
  bool operator==(const Hash& other) const { return std::memcmp(bytes, other.bytes, 32) == 0; }

  // 32 of its bits: equal for equal hashes, and by accident for one pair in 2**32.
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
