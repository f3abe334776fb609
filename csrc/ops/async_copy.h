// SPDX-License-Identifier: Apache-2.0
// Asynchronous copies from global to shared memory. They use no registers, so a thread can have any
// number in flight. Hardware support starts with sm_80. On older devices, a copy is an ordinary
// load and store, and waiting is a no-op.
#pragma once

#include <cstdint>

#ifndef __CUDACC__
#include "emul/cuda_emul.h"
#elif !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
#define KV_HAS_CP_ASYNC
#endif

namespace kvcache {

template <class Vector>
constexpr bool has_async_copy = sizeof(Vector) == 4 || sizeof(Vector) == 8 || sizeof(Vector) == 16;

// Starts the copy of one vector. Both addresses must be aligned to the vector size. The bytes have
// arrived only after `wait`.
template <class Vector>
__device__ __forceinline__ void async_copy(Vector* shared, const Vector* global) {
  static_assert(has_async_copy<Vector>, "asynchronous copies have 4, 8 or 16 bytes");
#ifdef KV_HAS_CP_ASYNC
  const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  if constexpr (sizeof(Vector) == 16) {  // only 16-byte copies can bypass the L1 cache
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(global),
                 "n"(sizeof(Vector))
                 : "memory");
  }
#else
  *shared = *global;
#endif
}

// Commits the copies that this thread has started since its last commit, as one group.
__device__ __forceinline__ void async_copy_commit() {
#ifdef KV_HAS_CP_ASYNC
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits for all of this thread's groups except the last kGroups. Other threads see the bytes only
// after a barrier.
template <int kGroups>
__device__ __forceinline__ void async_copy_wait() {
#ifdef KV_HAS_CP_ASYNC
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
#endif
}

}  // namespace kvcache
