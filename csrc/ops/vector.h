// The widest type that addresses and sizes allow a kernel to move at once.
#pragma once

#include <cstdint>

#ifndef __CUDACC__
#include "emul/cuda_emul.h"
#endif

namespace kvcache {

// Of values that are all multiples of it (given or-ed together): 16, 8, 4, 2 or 1.
inline int64_t common_vector_bytes(uint64_t all) {
  all |= 16;
  return static_cast<int64_t>(all & (~all + 1));
}

// Calls f with a value of the type of so many bytes.
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
