// SPDX-License-Identifier: Apache-2.0
// Block ids and block hashes.
#pragma once

#include <cstdint>
#include <cstring>

namespace kvcache {

using BlockId = int32_t;

// Block 0 of every pool. It is never allocated or cached, and it is safe to read. No list contains
// it, so a link of 0 means "none", and zeroed memory is a valid pool of unused blocks.
inline constexpr BlockId kNullBlock = 0;

// All hashes of a pool have the same length of at most 32 bytes. Shorter hashes are padded with
// zeros.
struct Hash {
  uint8_t bytes[32];
  bool operator==(const Hash& other) const { return std::memcmp(bytes, other.bytes, 32) == 0; }
};

}  // namespace kvcache
