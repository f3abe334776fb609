// SPDX-License-Identifier: Apache-2.0
// The part of the CUDA runtime API that the launch code needs. "Device" memory is ordinary host
// memory.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "emul/shared_limits.h"

using cudaStream_t = void*;

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorMemoryAllocation = 2 };

enum cudaMemcpyKind {
  cudaMemcpyHostToDevice = 1,
  cudaMemcpyDeviceToHost = 2,
  cudaMemcpyDefault = 4,
};

inline const char* cudaGetErrorString(cudaError_t error) {
  if (error == cudaErrorInvalidValue) return "invalid argument";
  return error == cudaSuccess ? "no error" : "out of memory";
}

template <class T>
cudaError_t cudaMalloc(T** out, size_t bytes) {
  // CUDA aligns allocations to 256 bytes. The size is not rounded up, so that AddressSanitizer
  // detects accesses to the first byte past the end.
  void* memory = nullptr;
  if (bytes > 0 && posix_memalign(&memory, 256, bytes) != 0) return cudaErrorMemoryAllocation;
  *out = static_cast<T*>(memory);
  return cudaSuccess;
}

inline cudaError_t cudaFree(void* memory) {
  std::free(memory);
  return cudaSuccess;
}

inline cudaError_t cudaMemcpyAsync(void* dst, const void* src, size_t bytes, cudaMemcpyKind,
                                   cudaStream_t = nullptr) {
  if (bytes > 0) std::memcpy(dst, src, bytes);
  return cudaSuccess;
}

inline cudaError_t cudaMemsetAsync(void* dst, int value, size_t bytes, cudaStream_t = nullptr) {
  if (bytes > 0) std::memset(dst, value, bytes);
  return cudaSuccess;
}

inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }

inline cudaError_t cudaGetLastError() { return cudaSuccess; }

// All memory counts as pinned, and kernels access it at its host address. A test may assign a
// different device address to a range.
namespace emul {
struct HostMapping {
  const char* host;
  size_t num_bytes;
  char* device;
};
inline std::vector<HostMapping>& host_mappings() {
  static std::vector<HostMapping> mappings;
  return mappings;
}
}  // namespace emul

enum cudaMemoryType { cudaMemoryTypeHost = 1 };
struct cudaPointerAttributes {
  cudaMemoryType type;
  void* devicePointer;
};
inline cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* p) {
  const auto* at = static_cast<const char*>(p);
  *attributes = {cudaMemoryTypeHost, const_cast<void*>(p)};
  for (const emul::HostMapping& m : emul::host_mappings()) {
    if (at >= m.host && at < m.host + m.num_bytes)
      attributes->devicePointer = m.device + (at - m.host);
  }
  return cudaSuccess;
}

enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrMaxSharedMemoryPerMultiprocessor = 81,
  cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
  cudaDevAttrClusterLaunch = 120,
};

// Sets the attribute for later launches of the kernel.
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel* kernel, cudaFuncAttribute, int bytes) {
  const bool ok = emul::SharedLimits::instance().set(reinterpret_cast<const void*>(kernel), bytes);
  return ok ? cudaSuccess : cudaErrorInvalidValue;
}

// Returns the attributes of an H100.
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int /*device*/) {
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = 132;
      break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = 228 * 1024;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = int(emul::kMaxSharedBytes);
      break;
    case cudaDevAttrClusterLaunch:
      *value = 1;
      break;
  }
  return cudaSuccess;
}

// Only the number of threads limits the occupancy.
template <class Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel*, int threads,
                                                          size_t /*shared_bytes*/) {
  if (threads < 1 || threads > 1024) return cudaErrorInvalidValue;
  *blocks = 2048 / threads;
  return cudaSuccess;
}

namespace emul {

inline void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

}  // namespace emul
