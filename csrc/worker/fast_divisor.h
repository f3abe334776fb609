// SPDX-License-Identifier: Apache-2.0
// Division by a number known in advance.
#pragma once

#include <cstdint>

#include "worker/host_device.h"

namespace kvcache {

// Divides numbers in [0, 2^31) by a fixed divisor with one multiplication.
struct FastDivisor {
  uint32_t divisor, magic, shift;

  KV_HOST_DEVICE uint32_t divide(uint32_t n) const {
    return static_cast<uint32_t>((uint64_t{n} * magic) >> shift);
  }
};

// With 2^s >= d, magic = ceil(2^(31 + s) / d) fits into 32 bits. magic / 2^(31 + s) exceeds 1 / d
// by less than 2^-(31 + s). Even after multiplication by a dividend below 2^31, this error is too
// small for the quotient to reach the next integer.
inline FastDivisor fast_divisor(int64_t divisor) {
  uint32_t bits = 0;
  while ((int64_t{1} << bits) < divisor) ++bits;
  const auto d = static_cast<uint64_t>(divisor);
  const uint64_t magic = ((uint64_t{1} << (31 + bits)) + d - 1) / d;
  return {static_cast<uint32_t>(divisor), static_cast<uint32_t>(magic), 31 + bits};
}

}  // namespace kvcache
