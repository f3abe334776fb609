// SPDX-License-Identifier: Apache-2.0
// Experimental copies between a device and the host, in which one warp per thread block issues bulk
// copies. They leave almost all registers and warps to concurrent kernels. KVCACHE_BULK_COPIES=1
// enables them; by default, they are disabled until `make gpu` has shown that they are faster.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ops/bulk_copy.h"
#include "ops/copy_launch.h"
#include "ops/device.h"
#include "ops/launch_ids.h"

namespace kvcache {

// Bytes per bulk copy, equal to the chunk size of the regular copy kernel.
constexpr int64_t kBulkBytes = copy_chunk_bytes(16);
constexpr uint32_t kBulkStages = 8;  // number of chunks in shared memory; a power of two
constexpr uint32_t kBulkStores = 2;  // number of stages that may be stored concurrently
constexpr unsigned kBulkThreads = 32;

// Returns whether bulk copies can be used. They require chunks of whole 16-byte vectors, pairs that
// were checked on the host, and no cleared pages.
inline bool is_bulk(const BlockCopy& c, bool with_host, const OnDevice& device) {
  if (!with_host || !c.pairs_on_cpu || !switched_on("KVCACHE_BULK_COPIES")) return false;
  int capability = 0;
  KV_CUDA_CHECK(
      cudaDeviceGetAttribute(&capability, cudaDevAttrComputeCapabilityMajor, device.index));
  if (capability < 9) return false;
  for (int64_t i = 0; i < c.num_pairs; ++i) {
    if (c.pairs[2 * i] == kCleared) return false;
  }
  return true;
}

// One thread of each thread block starts all copies. Chunks are loaded into the stages in cyclic
// order and stored in the same order. kBulkStages - kBulkStores loads are in flight.
template <size_t kParameterBytes>
__global__ void __launch_bounds__(kBulkThreads)
    copy_blocks_bulk_kernel(KV_PARAMETER CopyLaunch<kParameterBytes> c) {
  KV_DYN_SHARED(uint4, shared);
  __shared__ BulkBarrier arrived[kBulkStages];
  __shared__ char* to[kBulkStages];
  __shared__ uint32_t num_bytes[kBulkStages];
  const CopyHead& head = c.head;
  if (threadIdx.x != 0 || blockIdx.x >= head.num_tasks) return;
  bulk_barriers_init(arrived, kBulkStages);
  const uint32_t count = (head.num_tasks - blockIdx.x + gridDim.x - 1) / gridDim.x;
  const auto held = [&](uint32_t stage) {
    return reinterpret_cast<char*>(shared) + stage * kBulkBytes;
  };
  const auto load = [&](uint32_t n) {  // loads the thread block's n-th chunk
    const uint32_t task = blockIdx.x + n * gridDim.x, stage = n % kBulkStages;
    const uint32_t page = head.page_chunks.divide(task);
    const uint32_t chunk = task - page * head.page_chunks.divisor;
    const CopyPair pair = c.pair(page);
    const uint32_t index = c.region_of(chunk);
    const CopyRegion r = c.region(index);
    const int64_t at = int64_t{chunk - c.first_chunk(index)} * kBulkBytes;
    to[stage] = head.destination + r.destination + pair.destination * r.destination_stride + at;
    num_bytes[stage] = static_cast<uint32_t>(min(r.num_bytes - at, kBulkBytes));
    bulk_load(held(stage), head.source + r.source + pair.source * r.source_stride + at,
              num_bytes[stage], arrived + stage);
  };
  for (uint32_t n = 0; n < min(count, kBulkStages - kBulkStores); ++n) load(n);
  for (uint32_t n = 0; n < count; ++n) {
    const uint32_t stage = n % kBulkStages, next = n + kBulkStages - kBulkStores;
    bulk_wait(arrived + stage, n / kBulkStages);
    bulk_store(to[stage], held(stage), num_bytes[stage]);
    if (next < count) {
      bulk_stores_have_read<kBulkStores>();  // the stage for `next` is free
      load(next);
    }
  }
  bulk_stores_are_done();
}

}  // namespace kvcache
