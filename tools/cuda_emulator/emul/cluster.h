// SPDX-License-Identifier: Apache-2.0
// Clusters: thread blocks that run concurrently and read each other's dynamic shared memory.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>

#include "emul/scheduler.h"
#include "emul/thread.h"

namespace emul {

// Waits for all of the cluster's threads that have not exited.
inline void cluster_sync(Site site = Site::here()) {
  emulator().sync_block(Wait::kSyncCluster, false, site);
}

// Returns the address, in the dynamic shared memory of the cluster's thread block `rank`, that
// corresponds to `shared` in the running thread's block.
template <class T>
const T* shared_of_block(const T* shared, unsigned rank) {
  Emulator& e = emulator();
  const char* const own = e.dynamic_shared();
  const auto* const at = reinterpret_cast<const char*>(shared);
  if (at < own || at + sizeof(T) > own + e.dynamic_shared_bytes()) {
    throw std::logic_error("shared_of_block: expected an address in dynamic shared memory");
  }
  if (rank >= e.cluster_blocks()) {
    throw std::logic_error("shared_of_block: block " + std::to_string(rank) + " of a cluster of " +
                           std::to_string(e.cluster_blocks()));
  }
  if (!e.is_block_live(rank)) {
    throw std::logic_error("shared_of_block: block " + std::to_string(rank) + " has exited");
  }
  return reinterpret_cast<const T*>(e.dynamic_shared(rank) + (at - own));
}

}  // namespace emul
