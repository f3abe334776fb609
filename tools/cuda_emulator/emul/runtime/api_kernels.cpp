// SPDX-License-Identifier: Apache-2.0
// Functions of the runtime's C interface for nvcc's generated code, launches and kernel attributes.
#include <cuda_runtime_api.h>

#include <vector>

#include "emul/runtime/api.h"
#include "emul/runtime/kernels.h"

using namespace kvcache::gpuless;

namespace {

struct LaunchConfiguration {
  dim3 grid, block;
  size_t shared_bytes;
  cudaStream_t stream;
};
thread_local std::vector<LaunchConfiguration> configurations;  // configurations between <<< and >>>

cudaError_t launch_on(const void* stub, dim3 grid, dim3 block, void** arguments,
                      size_t shared_bytes, cudaStream_t handle, unsigned cluster = 1) {
  return call([&] {
    Stream* stream = stream_of(handle);
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    return launch(stub, grid, block, arguments, shared_bytes, cluster, *stream);
  });
}

}  // namespace

KV_GPULESS_API void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
KV_GPULESS_API void __cudaRegisterFatBinaryEnd(void**) {}
KV_GPULESS_API void __cudaUnregisterFatBinary(void**) {}
KV_GPULESS_API char __cudaInitModule(void**) { return 0; }
KV_GPULESS_API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

KV_GPULESS_API void __cudaRegisterFunction(void**, const char* stub, char*, const char* name, int,
                                           uint3*, uint3*, dim3*, dim3*, int*) {
  call([&] {
    register_kernel(stub, name);
    return cudaSuccess;
  });
}

KV_GPULESS_API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes,
                                                    CUstream_st* stream) {
  configurations.push_back({grid, block, shared_bytes, stream});
  return 0;
}

KV_GPULESS_API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes,
                                                      void* stream) {
  const LaunchConfiguration c = configurations.back();
  configurations.pop_back();
  *grid = c.grid;
  *block = c.block;
  *shared_bytes = c.shared_bytes;
  *static_cast<cudaStream_t*>(stream) = c.stream;
  return cudaSuccess;
}

// A kernel's handle is the address of its stub.
KV_GPULESS_API cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* stub) {
  *kernel = static_cast<cudaKernel_t>(const_cast<void*>(stub));
  return cudaSuccess;
}

KV_GPULESS_API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block,
                                              void** arguments, size_t shared_bytes,
                                              cudaStream_t stream) {
  return launch_on(kernel, grid, block, arguments, shared_bytes, stream);
}

KV_GPULESS_API cudaError_t cudaLaunchKernel(const void* stub, dim3 grid, dim3 block,
                                            void** arguments, size_t shared_bytes,
                                            cudaStream_t stream) {
  return launch_on(stub, grid, block, arguments, shared_bytes, stream);
}

KV_GPULESS_API cudaError_t cudaLaunchCooperativeKernel(const void* stub, dim3 grid, dim3 block,
                                                       void** arguments, size_t shared_bytes,
                                                       cudaStream_t stream) {
  return launch_on(stub, grid, block, arguments, shared_bytes, stream);
}

// Simulates the cluster size along x. Kernels run one after another, so programmatic stream
// serialization has no effect.
KV_GPULESS_API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* c, const void* stub,
                                               void** arguments) {
  unsigned cluster = 1;
  for (unsigned i = 0; i < c->numAttrs; ++i) {
    if (c->attrs[i].id == cudaLaunchAttributeProgrammaticStreamSerialization) continue;
    const auto& size = c->attrs[i].val.clusterDim;
    if (c->attrs[i].id != cudaLaunchAttributeClusterDimension || size.y != 1 || size.z != 1) {
      return call([] { return cudaErrorNotSupported; });
    }
    cluster = size.x;
  }
  return launch_on(stub, c->gridDim, c->blockDim, arguments, c->dynamicSmemBytes, c->stream,
                   cluster);
}

KV_GPULESS_API cudaError_t cudaFuncSetAttribute(const void* stub, cudaFuncAttribute attribute,
                                                int value) {
  return call([&] {
    if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize) {
      return allow_shared_bytes(stub, value);
    }
    return is_kernel(stub) ? cudaSuccess : cudaErrorInvalidDeviceFunction;
  });
}

KV_GPULESS_API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* stub) {
  return call([&] { return describe(stub, attributes); });
}

KV_GPULESS_API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int* blocks, const void* stub, int threads, size_t shared_bytes, unsigned) {
  return call([&] { return occupancy(stub, threads, shared_bytes, blocks); });
}

KV_GPULESS_API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks,
                                                                         const void* stub,
                                                                         int threads,
                                                                         size_t shared_bytes) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, stub, threads, shared_bytes,
                                                                0);
}
