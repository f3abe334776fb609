// SPDX-License-Identifier: Apache-2.0
// A thread's bulk copies between global and shared memory (cp.async.bulk). A load reads its source
// immediately, and its bytes arrive when the kernel waits for the load's barrier. A store reads and
// writes as late as possible, when the kernel waits for the copy. This exposes kernels that do not
// wait or that overwrite bytes in flight. An error is reported if a thread exits with copies in
// flight.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

#include "emul/scheduler.h"
#include "emul/thread.h"

namespace emul {

inline void check_bulk(const void* shared, const void* global, size_t num_bytes) {
  if (num_bytes == 0 || num_bytes % 16 != 0 || reinterpret_cast<uintptr_t>(shared) % 16 != 0 ||
      reinterpret_cast<uintptr_t>(global) % 16 != 0) {
    throw std::runtime_error("misaligned bulk copy of " + std::to_string(num_bytes) +
                             " bytes: expected a multiple of 16, between multiples of 16");
  }
}

// `barrier` stores the number of completed phases.
inline void bulk_load(void* shared, const void* global, size_t num_bytes, uint64_t* barrier) {
  check_bulk(shared, global, num_bytes);
  auto& loads = emulator().current().bulk_copies.loads;
  if (std::any_of(loads.begin(), loads.end(),
                  [&](const BulkLoad& l) { return l.barrier == barrier; })) {
    throw std::logic_error("bulk copy: another one has this barrier");
  }
  const auto* bytes = static_cast<const char*>(global);
  loads.push_back({shared, barrier, std::vector<char>(bytes, bytes + num_bytes)});
}

inline void bulk_wait(uint64_t* barrier, uint32_t phase) {
  if (*barrier % 2 != phase % 2) return;  // the phase has already ended
  auto& loads = emulator().current().bulk_copies.loads;
  const auto load = std::find_if(loads.begin(), loads.end(),
                                 [&](const BulkLoad& l) { return l.barrier == barrier; });
  if (load == loads.end()) {
    throw std::logic_error("barrier deadlock: a wait for a bulk copy that was not begun");
  }
  std::memcpy(load->shared, load->bytes.data(), load->bytes.size());
  loads.erase(load);
  ++*barrier;
}

inline void bulk_store(void* global, const void* shared, size_t num_bytes) {
  check_bulk(shared, global, num_bytes);
  emulator().current().bulk_copies.stores.push_back({global, shared, num_bytes});
}

// Waits for all but the last `num_left` stores.
inline void wait_bulk_stores(size_t num_left) {
  auto& stores = emulator().current().bulk_copies.stores;
  while (stores.size() > num_left) {
    std::memcpy(stores.front().global, stores.front().shared, stores.front().num_bytes);
    stores.erase(stores.begin());
  }
}

}  // namespace emul
