// SPDX-License-Identifier: Apache-2.0
// A cache that an eviction policy simulates, in which the manager looks up requests.
#pragma once

#include <cstdint>

#include "core/hash.h"

namespace kvcache {

class SimulatedCache {
 public:
  virtual bool has(const Hash& hash, uint8_t group) const = 0;
  // The request that is being admitted would read this window block or state at the end of its hit
  // in the simulated cache.
  virtual void use_end(const Hash& hash, uint8_t group) = 0;

 protected:
  ~SimulatedCache() = default;
};

}  // namespace kvcache
