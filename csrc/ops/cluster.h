// SPDX-License-Identifier: Apache-2.0
// Clusters of thread blocks that run concurrently and read each other's shared memory. Hardware
// support starts with sm_90; clusters are not launched on older devices.
#pragma once

#include <cstdint>

#ifndef __CUDACC__
#include "emul/cuda_emul.h"
#elif !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define KV_HAS_CLUSTERS
#endif

namespace kvcache {

// Every device with clusters supports this size.
constexpr int kMostClusterBlocks = 8;

// Waits for all threads in the cluster. Their earlier writes to shared memory are visible
// afterwards.
__device__ __forceinline__ void cluster_sync() {
#ifdef KV_HAS_CLUSTERS
  __syncwarp();
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n\t"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
#elif !defined(__CUDACC__)
  emul::cluster_sync();
#endif
}

// Like cluster_sync, but does not order writes. Use it before a thread block exits, because other
// thread blocks may still read its shared memory.
__device__ __forceinline__ void cluster_sync_before_end() {
#ifdef KV_HAS_CLUSTERS
  __syncwarp();
  asm volatile(
      "barrier.cluster.arrive.relaxed.aligned;\n\t"
      "barrier.cluster.wait.aligned;" ::
          : "memory");
#elif !defined(__CUDACC__)
  emul::cluster_sync();
#endif
}

// Reads from the shared memory of the cluster's thread block `rank`, at the offset that `shared`
// has in this thread block's memory.
__device__ __forceinline__ uint4 load_of_cluster(const uint4* shared, uint32_t rank) {
#ifdef KV_HAS_CLUSTERS
  const auto own = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  uint32_t of_rank;
  uint4 v;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(of_rank) : "r"(own), "r"(rank));
  asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(of_rank)
               : "memory");
  return v;
#elif !defined(__CUDACC__)
  return *emul::shared_of_block(shared, rank);
#else
  return *shared;
#endif
}

}  // namespace kvcache
