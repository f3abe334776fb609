// SPDX-License-Identifier: Apache-2.0
// Selects the widest type with which a kernel can copy data, given the data's addresses and sizes.
#pragma once

#include <cstdint>

#ifndef __CUDACC__
#include "emul/cuda_emul.h"
#endif

namespace kvcache {

// Returns the largest of 16, 8, 4, 2 and 1 that divides all values. Pass the bitwise OR of the
// values.
inline int64_t common_vector_bytes(uint64_t all) {
  all |= 16;
  return static_cast<int64_t>(all & (~all + 1));
}

// Calls f with a value of the vector type that has this size in bytes.
template <class F>
void with_vector(int64_t bytes, F&& f) {
  switch (bytes) {
    case 16:
      return f(uint4{});
    case 8:
      return f(uint2{});
    case 4:
      return f(uint32_t{});
    case 2:
      return f(uint16_t{});
    default:
      return f(uint8_t{});
  }
}

}  // namespace kvcache
