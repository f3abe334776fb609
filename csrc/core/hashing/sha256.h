// SHA-256 (FIPS 180-4). Uses the CPU's SHA instructions if available, and plain C++ otherwise.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvcache {

// An implementation of the compression function.
struct Sha256Implementation {
  const char* name;  // "sha_ni", "armv8" or "portable"
  // Folds `num_chunks` chunks of 64 bytes into the eight words of `state`.
  void (*compress)(uint32_t* state, const uint8_t* chunks, size_t num_chunks);
};

// Returns the implementations that this CPU supports, fastest first. The last one is "portable".
const std::vector<Sha256Implementation>& sha256_implementations();

// Writes the 32-byte digest of `size` bytes at `data` to `out`.
void sha256(const uint8_t* data, size_t size, uint8_t* out,
            const Sha256Implementation& implementation = sha256_implementations().front());

}  // namespace kvcache
