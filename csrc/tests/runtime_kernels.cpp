// SPDX-License-Identifier: Apache-2.0
// Kernels for test_runtime_kernels, registered like kernels in the library of emulated kernels.
#include <cstdint>

#include "emul/cuda_emul.h"
#include "emul/runtime/bind.h"

namespace kvcache {

// A kernel argument that is passed by value, because a launch copies its arguments.
struct Numbers {
  int* out;
  int value;
};

__global__ void write_kernel(Numbers n) { n.out[blockIdx.x * blockDim.x + threadIdx.x] = n.value; }

template <class T>
__global__ void shared_kernel(T* out) {
  KV_DYN_SHARED(T, shared);
  shared[threadIdx.x] = T(threadIdx.x);
  __syncthreads();
  out[threadIdx.x] = shared[blockDim.x - 1 - threadIdx.x];
}

__global__ void trap_kernel() { __trap(); }

[[maybe_unused]] const bool registered = gpuless::Registered<write_kernel>::done &&
                                         gpuless::Registered<shared_kernel<int>>::done &&
                                         gpuless::Registered<trap_kernel>::done;

}  // namespace kvcache

extern "C" __attribute__((visibility("default"))) const kvcache::gpuless::Bound*
kvcache_gpuless_bound_kernels(size_t* count) {
  *count = kvcache::gpuless::bound_kernels().size();
  return kvcache::gpuless::bound_kernels().data();
}
