// XXH3 with 128 bits, seed 0 and the default secret, by its public specification. Not
// cryptographic: who can choose tokens can make two blocks of one hash.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvcache {

// Writes the 16-byte digest of `size` bytes at `data` to `out`, in its canonical form (big-endian).
void xxh3_128(const uint8_t* data, size_t size, uint8_t* out);

}  // namespace kvcache
