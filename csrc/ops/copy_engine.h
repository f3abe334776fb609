// SPDX-License-Identifier: Apache-2.0
// Copies pages between a device and the host with the device's copy engines, one descriptor per
// fragment.
#pragma once

#include <cstdint>

#include "ops/block_copy.h"
#include "ops/device.h"
// Must be included after device.h, which includes the CUDA runtime.
#include "ops/copy_batch.h"

namespace kvcache {

inline void copy_by_engine(const BlockCopy& c, bool from_host, bool to_host,
                           const OnDevice& device) {
  CopyBatch batch(device.stream, c.engine != CopyEngine::kSingle, from_host || to_host,
                  from_host && c.engine == CopyEngine::kBatchOfSettled);
  for (const CopyRun& run : runs_of(c, INT32_MAX, from_host, to_host)) {
    for (int64_t i = 0; i < c.num_regions; ++i) {
      const CopyRegion& r = c.regions[i];
      if (r.num_bytes == 0) continue;
      if (r.is_dense()) {
        batch.add(c.to(r, run.destination), c.from(r, run.source), run.num_pages * r.num_bytes);
        continue;
      }
      for (int64_t page = 0; page < run.num_pages; ++page) {
        batch.add(c.to(r, run.destination + page), c.from(r, run.source + page), r.num_bytes);
      }
    }
  }
  batch.flush();
}

}  // namespace kvcache
