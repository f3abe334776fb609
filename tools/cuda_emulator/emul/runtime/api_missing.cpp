// SPDX-License-Identifier: Apache-2.0
// Functions that torch links against but that are not simulated. Each of them prints a line and
// returns an error.
#include "emul/runtime/api.h"

using namespace kvcache::gpuless;

namespace {

cudaError_t missing(const char* name) {
  return call([&] {
    say("%s is not simulated", name);
    return cudaErrorNotSupported;
  });
}

// A substitute for driver functions that are looked up by name.
int missing_in_driver() {
  say("a function of the driver, asked for by name, is not simulated");
  return cudaErrorNotSupported;
}

}  // namespace

#define KV_MISSING(name, parameters) \
  KV_GPULESS_API cudaError_t name parameters { return missing(#name); }

KV_MISSING(cudaMallocAsync, (void**, size_t, cudaStream_t))
KV_MISSING(cudaFreeAsync, (void*, cudaStream_t))
KV_MISSING(cudaDeviceGetDefaultMemPool, (cudaMemPool_t*, int))
KV_MISSING(cudaMemPoolTrimTo, (cudaMemPool_t, size_t))
KV_MISSING(cudaMemPoolSetAttribute, (cudaMemPool_t, cudaMemPoolAttr, void*))
KV_MISSING(cudaMemPoolGetAttribute, (cudaMemPool_t, cudaMemPoolAttr, void*))
KV_MISSING(cudaMemPoolSetAccess, (cudaMemPool_t, const cudaMemAccessDesc*, size_t))
KV_MISSING(cudaIpcGetMemHandle, (cudaIpcMemHandle_t*, void*))
KV_MISSING(cudaIpcOpenMemHandle, (void**, cudaIpcMemHandle_t, unsigned))
KV_MISSING(cudaIpcCloseMemHandle, (void*))
KV_MISSING(cudaIpcGetEventHandle, (cudaIpcEventHandle_t*, cudaEvent_t))
KV_MISSING(cudaIpcOpenEventHandle, (cudaEvent_t*, cudaIpcEventHandle_t))
KV_MISSING(cudaMemcpyToSymbol, (const void*, const void*, size_t, size_t, cudaMemcpyKind))
KV_MISSING(cudaGetSymbolAddress, (void**, const void*))
KV_MISSING(cudaGraphDebugDotPrint, (cudaGraph_t, const char*, unsigned))
KV_MISSING(cudaGraphNodeGetDependencies,
           (cudaGraphNode_t, cudaGraphNode_t*, cudaGraphEdgeData*, size_t*))
KV_MISSING(cudaProfilerStart, ())
KV_MISSING(cudaProfilerStop, ())

KV_GPULESS_API cudaError_t
cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned, unsigned long long,
                                 cudaDriverEntryPointQueryResult* result) {
  *function = reinterpret_cast<void*>(&missing_in_driver);
  if (result != nullptr) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

KV_GPULESS_API cudaError_t cudaGetDriverEntryPoint(const char* name, void** function,
                                                   unsigned long long,
                                                   cudaDriverEntryPointQueryResult* result) {
  return cudaGetDriverEntryPointByVersion(name, function, 0, 0, result);
}
