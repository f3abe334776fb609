// SPDX-License-Identifier: Apache-2.0
// Functions of the runtime's C interface for the device. A single device is emulated, which reports
// the properties of an H200, as far as callers query them.
#include <cstdio>
#include <cstring>

#include "emul/runtime/api.h"
#include "emul/runtime/counters.h"
#include "emul/runtime/settings.h"

using namespace kvcache::gpuless;

namespace {

constexpr int kVersion = 13000;
constexpr int kMultiprocessors = 132;
constexpr int kSharedOptIn = 227 * 1024;
constexpr int kSharedPerMultiprocessor = 228 * 1024;

}  // namespace

KV_GPULESS_API cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}

KV_GPULESS_API cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

KV_GPULESS_API cudaError_t cudaSetDevice(int device) {
  return call([&] { return device == 0 ? cudaSuccess : cudaErrorInvalidDevice; });
}

KV_GPULESS_API cudaError_t cudaDriverGetVersion(int* version) {
  *version = kVersion;
  return cudaSuccess;
}

KV_GPULESS_API cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = kVersion;
  return cudaSuccess;
}

KV_GPULESS_API cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int) {
  std::snprintf(text, size_t(size), "0000:00:00.0");
  return cudaSuccess;
}

KV_GPULESS_API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}

KV_GPULESS_API cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) {
  return call([] { return cudaErrorPeerAccessUnsupported; });
}

KV_GPULESS_API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  count(Counter::kDeviceQueries);
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
      *value = 1024;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *value = 48 * 1024;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = kSharedOptIn;
      break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = kSharedPerMultiprocessor;
      break;
    case cudaDevAttrClusterLaunch:
      *value = 1;
      break;
    case cudaDevAttrWarpSize:
      *value = 32;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = kMultiprocessors;
      break;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      *value = 2048;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = 9;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = 0;
      break;
    case cudaDevAttrUnifiedAddressing:
      *value = 1;
      break;
    case cudaDevAttrCanMapHostMemory:
      *value = 1;
      break;
    case cudaDevAttrHostRegisterSupported:
      *value = 1;
      break;
    case cudaDevAttrAsyncEngineCount:
      *value = 3;
      break;
    case cudaDevAttrCanUseHostPointerForRegisteredMem:
      *value = settings().other_pointers ? 0 : 1;
      break;
    default:
      *value = 0;  // no memory pools, peers or managed memory
  }
  return cudaSuccess;
}

KV_GPULESS_API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
  count(Counter::kDeviceQueries);
  std::memset(p, 0, sizeof *p);
  std::strcpy(p->name, "CUDA runtime without a GPU");
  p->major = 9;
  p->totalGlobalMem = settings().device_bytes;
  p->sharedMemPerBlock = 48 * 1024;
  p->sharedMemPerBlockOptin = kSharedOptIn;
  p->sharedMemPerMultiprocessor = kSharedPerMultiprocessor;
  p->reservedSharedMemPerBlock = 1024;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->warpSize = 32;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->multiProcessorCount = kMultiprocessors;
  p->maxThreadsPerMultiProcessor = 2048;
  p->maxBlocksPerMultiProcessor = 32;
  p->l2CacheSize = 50 << 20;
  p->textureAlignment = 512;
  p->unifiedAddressing = 1;
  p->canMapHostMemory = 1;
  p->asyncEngineCount = 3;
  return cudaSuccess;
}
