// SPDX-License-Identifier: Apache-2.0
// SHA-256 (FIPS 180-4). Uses the CPU's SHA instructions if available, and plain C++ otherwise.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvcache {

inline constexpr size_t kSha256Bytes = 32;  // size of a digest

// A padded message, which consists of chunks of 64 bytes.
//
// A linked message contains a digest that may have been computed just before. If it were copied
// into the message, the computation would have to wait until the copied bytes can be read from
// memory.
struct Sha256Message {
  static constexpr size_t kLinkAt = 3;  // position of the digest in a linked message

  const uint8_t* chunks;
  uint8_t* out;                   // where to write the digest
  const uint8_t* link = nullptr;  // replaces the bytes at kLinkAt; null: not linked
};

struct Sha256Implementation {
  const char* name;  // "sha_ni", "armv8" or "portable"
  void (*digest)(const Sha256Message& message, size_t num_chunks);
  // Computes the digests of two messages of num_chunks chunks each. Null if this is not faster than
  // two calls of `digest`.
  void (*digest_two)(const Sha256Message* messages, size_t num_chunks);
};

// Returns the implementations that this CPU supports, fastest first. The last one is "portable".
const std::vector<Sha256Implementation>& sha256_implementations();

// Writes the 32-byte digest of `size` bytes at `data` to `out`.
void sha256(const uint8_t* data, size_t size, uint8_t* out,
            const Sha256Implementation& implementation = sha256_implementations().front());

// Pads data in place, and returns its number of chunks. Overwrites kSha256Padding bytes after the
// end of the data.
size_t sha256_pad(uint8_t* data, size_t size);
inline constexpr size_t kSha256Padding = 72;

}  // namespace kvcache
