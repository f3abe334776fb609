// SPDX-License-Identifier: Apache-2.0
// Folds hashes to 64 bits with a key that only this process knows.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/hash.h"

namespace kvcache {

// Anyone who sends tokens can search for hashes with equal prefixes, but the collisions of folds
// depend on the key. A fold is a sum of products of 32-bit words, each plus a random number
// (multilinear hashing, Lemire and Kaser, "Strongly universal string hashing is fast"). For a
// random key and any two distinct hashes, the upper halves of their sums are equal with probability
// 2**-32.
class SecretKey {
 public:
  static SecretKey drawn();  // a random key; throws std::runtime_error if there are no random bytes
  static const SecretKey& of_process() {
    static const SecretKey key = drawn();
    return key;
  }

  uint64_t fold(const Hash& hash) const {
    uint64_t sum = numbers_[8];
    for (int i = 0; i < 8; i += 2) {
      uint64_t words;
      std::memcpy(&words, hash.bytes + 4 * i, sizeof(words));
      // Keeps the words in a register, because SSE2 multiplies vectors of 64-bit numbers slowly.
      __asm__("" : "+r"(words));
      sum += (numbers_[i] + static_cast<uint32_t>(words)) * (numbers_[i + 1] + (words >> 32));
    }
    // A bijection mixes the bits, because the lower bits of a sum depend only on the lower bits of
    // the words.
    sum ^= sum >> 32;
    sum *= 0x9E3779B97F4A7C15ull;
    return sum ^ sum >> 32;
  }

 private:
  SecretKey() = default;

  uint64_t numbers_[9] = {};
};

// Folds a hash to 64 bits that stay the same for the life of the process. Two distinct hashes that
// were not chosen to collide have equal tags with probability 2**-64, so decisions based on tags do
// not depend on the secret key.
inline uint64_t tag_of(const Hash& hash) { return SecretKey::of_process().fold(hash); }

// Folds a hash to 32 bits, for uses in which a collision only costs time.
inline uint32_t short_tag_of(const Hash& hash) { return static_cast<uint32_t>(tag_of(hash)); }

// A hash function for hash tables.
struct HashOf {
  size_t operator()(const Hash& hash) const { return tag_of(hash); }
};

}  // namespace kvcache
