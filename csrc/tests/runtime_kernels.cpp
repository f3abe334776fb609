// Kernels for test_runtime_kernels, as the library of emulated kernels would have them.
#include <cstdint>

#include "emul/cuda_emul.h"
#include "emul/runtime/bind.h"

namespace kvcache {

// By value: a launch keeps what it was given.
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
