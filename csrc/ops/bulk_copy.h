// SPDX-License-Identifier: Apache-2.0
// Bulk copies between global and shared memory. A single instruction, executed by one thread,
// copies many bytes without using registers. Hardware support starts with sm_90; these copies are
// not used on older devices. Addresses and sizes must be multiples of 16 bytes.
//
// All calls must come from the same thread. A copy into shared memory has arrived when a phase of
// its barrier ends. Copies out of shared memory complete in order.
#pragma once

#include <cstdint>

#ifndef __CUDACC__
#include "emul/cuda_emul.h"
#elif !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define KV_HAS_BULK_COPY
#endif

namespace kvcache {

// A barrier in shared memory. Each copy that uses the barrier ends one of the barrier's phases,
// which are numbered from 0.
struct alignas(8) BulkBarrier {
  uint64_t state;
};

#ifdef __CUDACC__
__device__ __forceinline__ uint32_t shared_address(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}
#endif

// Initializes barriers. Must be called before the first copy that uses them.
__device__ __forceinline__ void bulk_barriers_init(BulkBarrier* barriers, int count) {
  for (int i = 0; i < count; ++i) {
#ifdef KV_HAS_BULK_COPY
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barriers + i))
                 : "memory");
#elif !defined(__CUDACC__)
    barriers[i].state = 0;
#endif
  }
#ifdef KV_HAS_BULK_COPY
  // Barriers are initialized through the generic proxy, and bulk copies access them through the
  // async proxy.
  asm volatile(
      "fence.mbarrier_init.release.cluster;\n\t"
      "fence.proxy.async.shared::cta;" ::
          : "memory");
#endif
}

// Starts a copy into shared memory. The barrier's phase ends when all bytes have arrived.
__device__ __forceinline__ void bulk_load(void* shared, const void* global, uint32_t num_bytes,
                                          BulkBarrier* barrier) {
#ifdef KV_HAS_BULK_COPY
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(num_bytes)
      : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(shared)),
      "l"(__cvta_generic_to_global(global)), "r"(num_bytes), "r"(shared_address(barrier))
      : "memory");
#elif !defined(__CUDACC__)
  emul::bulk_load(shared, global, num_bytes, &barrier->state);
#endif
}

// Waits for the end of the phase with this number. Only the lowest bit of the number is used.
__device__ __forceinline__ void bulk_wait(BulkBarrier* barrier, uint32_t phase) {
#ifdef KV_HAS_BULK_COPY
  asm volatile(
      "{\n\t"
      ".reg .pred done;\n\t"
      "again:\n\t"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t"
      "@!done bra again;\n\t"
      "}" ::"r"(shared_address(barrier)),
      "r"(phase & 1)
      : "memory");
#elif !defined(__CUDACC__)
  emul::bulk_wait(&barrier->state, phase);
#endif
}

// Starts a copy out of shared memory.
__device__ __forceinline__ void bulk_store(void* global, const void* shared, uint32_t num_bytes) {
#ifdef KV_HAS_BULK_COPY
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(
                   __cvta_generic_to_global(global)),
               "r"(shared_address(shared)), "r"(num_bytes)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#elif !defined(__CUDACC__)
  emul::bulk_store(global, shared, num_bytes);
#endif
}

// Waits until all stores except the last kCopies have read shared memory.
template <int kCopies>
__device__ __forceinline__ void bulk_stores_have_read() {
#ifdef KV_HAS_BULK_COPY
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kCopies) : "memory");
#elif !defined(__CUDACC__)
  emul::wait_bulk_stores(kCopies);
#endif
}

// Waits until all copies out of shared memory have completed.
__device__ __forceinline__ void bulk_stores_are_done() {
#ifdef KV_HAS_BULK_COPY
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
#elif !defined(__CUDACC__)
  emul::wait_bulk_stores(0);
#endif
}

}  // namespace kvcache
