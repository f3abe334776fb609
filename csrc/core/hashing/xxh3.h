// SPDX-License-Identifier: Apache-2.0
// 128-bit XXH3 with seed 0 and the default secret, implemented from the public specification. It is
// not cryptographic, so anyone who can choose tokens can construct two blocks with the same hash.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvcache {

// Writes the 16-byte digest of `size` bytes at `data` to `out`, in its canonical form (big-endian).
void xxh3_128(const uint8_t* data, size_t size, uint8_t* out);

}  // namespace kvcache
