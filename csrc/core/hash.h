// Block ids and block hashes.
#pragma once

#include <cstdint>
#include <cstring>

namespace kvcache {

using BlockId = int32_t;

// Block 0 of every pool: never allocated, never cached, safe to read. No list holds it, so 0 also
// means "none" in every link of the pool, and zeroed memory is a valid pool of fresh blocks.
inline constexpr BlockId kNullBlock = 0;

// All hashes of a pool have one length, at most 32 bytes; shorter ones are followed by zeros.
struct Hash {
  uint8_t bytes[32];
  bool operator==(const Hash& other) const { return std::memcmp(bytes, other.bytes, 32) == 0; }

  // All its bytes, folded: hashes that an engine gives may differ in any of them.
  uint64_t word() const {
    uint64_t words[4];
    std::memcpy(words, bytes, sizeof(words));
    return words[0] ^ rotated(words[1], 19) ^ rotated(words[2], 37) ^ rotated(words[3], 53);
  }
  // 32 bits; different digests collide with a probability of 2**-32.
  uint32_t tag() const {
    const uint64_t all = word();
    return static_cast<uint32_t>(all ^ (all >> 32));
  }

 private:
  static uint64_t rotated(uint64_t word, int bits) { return word << bits | word >> (64 - bits); }
};

struct HashOf {
  size_t operator()(const Hash& hash) const { return hash.word(); }
};

}  // namespace kvcache
