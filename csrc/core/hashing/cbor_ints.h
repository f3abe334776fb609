// SPDX-License-Identifier: Apache-2.0
// CBOR of the token ids of a block.
#pragma once

#include <cstdint>

namespace kvcache {

// `write_ints` may overwrite this many bytes after the end of the items.
inline constexpr int64_t kIntsOverwritten = 64;

// Writes `n` integers, each in its shortest form, and returns their end.
uint8_t* write_ints(uint8_t* p, const int32_t* values, int64_t n);

}  // namespace kvcache
