// SPDX-License-Identifier: Apache-2.0
// Access to the bits of float32 numbers.
#pragma once

#include <cstdint>
#include <cstring>

#include "worker/host_device.h"

namespace kvcache {

KV_HOST_DEVICE uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

KV_HOST_DEVICE float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

}  // namespace kvcache
