// SHA-256: libcrypto's, found at run time, or whatever the caller supplies. Never our own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace kvcache {

// Writes the 32-byte digest of `size` bytes at `data` to `out`.
using Sha256Function = std::function<void(const uint8_t* data, size_t size, uint8_t* out)>;

// Name of the libcrypto in use ("libcrypto.so.3"), or nullptr when none was found.
const char* libcrypto_name();

// The digest in use: libcrypto's where there is one, else the fallback that was set.
void sha256(const uint8_t* data, size_t size, uint8_t* out);

// The digest to use without libcrypto. With `force`, it is used in any case (for tests).
void set_sha256_fallback(Sha256Function function, bool force);

}  // namespace kvcache
