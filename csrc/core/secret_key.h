// Folds hashes to 64 bits with a key that only this process knows.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/hash.h"

namespace kvcache {

// Anyone who sends tokens can search for hashes with equal prefixes, but which of them collide here
// depends on the key. A fold is a sum of products of 32-bit words, each plus a random number
// (multilinear hashing, Lemire and Kaser, "Strongly universal string hashing is fast"): over all
// keys, the upper halves of the sums of any two hashes agree with a probability of 2**-32.
class SecretKey {
 public:
  SecretKey() = default;     // zeros: equal folds in every process, for tests
  static SecretKey drawn();  // a random key; std::runtime_error without random bytes
  static const SecretKey& of_process();

  uint64_t fold(const Hash& hash, uint8_t group = 0) const {
    uint64_t sum = numbers_[8] + numbers_[9] * group;
    for (int i = 0; i < 8; i += 2) {
      uint64_t words;
      std::memcpy(&words, hash.bytes + 4 * i, sizeof(words));
      __asm__("" : "+r"(words));  // kept in a register: SSE2 is slow at vectors of 64-bit products
      sum += (numbers_[i] + static_cast<uint32_t>(words)) * (numbers_[i + 1] + (words >> 32));
    }
    // A bijection: the lower bits of a sum depend only on the lower bits of the words.
    sum ^= sum >> 32;
    sum *= 0x9E3779B97F4A7C15ull;
    return sum ^ sum >> 32;
  }

 private:
  uint64_t numbers_[10] = {};
};

// 64 bits of a hash, constant during the process. Two hashes that nobody has searched for collide
// with a probability of 2**-64, so decisions by tag depend on no secret.
inline uint64_t tag_of(const Hash& hash) { return SecretKey::of_process().fold(hash); }

// 32 bits, where a collision only costs time.
inline uint32_t short_tag_of(const Hash& hash) { return static_cast<uint32_t>(tag_of(hash)); }

// The same for hash tables.
struct HashOf {
  size_t operator()(const Hash& hash) const { return tag_of(hash); }
};

}  // namespace kvcache
