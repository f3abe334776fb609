// SPDX-License-Identifier: Apache-2.0
// Functions of the runtime's C interface for allocation, pinned and registered memory, and
// pointers.
#include "emul/runtime/api.h"
#include "emul/runtime/capture.h"
#include "emul/runtime/counters.h"
#include "emul/runtime/device_memory.h"
#include "emul/runtime/ranges.h"
#include "emul/runtime/settings.h"

using namespace kvcache::gpuless;

namespace {

// Like the driver, first waits for all work, because work in flight may use the memory.
cudaError_t remove(void* memory, RangeKind kind) {
  return call([&] {
    if (memory == nullptr && kind != RangeKind::kRegistered) return cudaSuccess;
    if (const cudaError_t error = refuse_while_capturing()) return error;
    drain_all();
    return remove_range(memory, kind);
  });
}

}  // namespace

KV_GPULESS_API cudaError_t cudaMalloc(void** memory, size_t bytes) {
  return call([&] {
    if (const cudaError_t error = refuse_while_capturing()) return error;
    count(Counter::kAllocations);
    return add_device(memory, bytes);
  });
}

KV_GPULESS_API cudaError_t cudaFree(void* memory) { return remove(memory, RangeKind::kDevice); }

KV_GPULESS_API cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned flags) {
  return call([&] {
    if (const cudaError_t error = refuse_while_capturing()) return error;
    count(Counter::kAllocations);
    return add_pinned(memory, bytes, flags);
  });
}

KV_GPULESS_API cudaError_t cudaMallocHost(void** memory, size_t bytes) {
  return cudaHostAlloc(memory, bytes, cudaHostAllocDefault);
}

KV_GPULESS_API cudaError_t cudaFreeHost(void* memory) { return remove(memory, RangeKind::kPinned); }

KV_GPULESS_API cudaError_t cudaHostRegister(void* memory, size_t bytes, unsigned flags) {
  return call([&] {
    if (const cudaError_t error = refuse_while_capturing()) return error;
    count(Counter::kAllocations);
    return add_registered(memory, bytes, flags);
  });
}

KV_GPULESS_API cudaError_t cudaHostUnregister(void* memory) {
  return remove(memory, RangeKind::kRegistered);
}

KV_GPULESS_API cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned flags) {
  return call([&] {
    count(Counter::kPointerQueries);
    *device = nullptr;
    const Range* r = range_of(host);
    if (flags != 0 || r == nullptr || r->kind == RangeKind::kDevice) return cudaErrorInvalidValue;
    *device = r->device_begin + (static_cast<char*>(host) - r->begin);
    return cudaSuccess;
  });
}

KV_GPULESS_API cudaError_t cudaHostGetFlags(unsigned* flags, void* host) {
  return call([&] {
    count(Counter::kPointerQueries);
    const Range* r = range_of(host);
    if (r == nullptr || r->kind == RangeKind::kDevice) return cudaErrorInvalidValue;
    *flags = r->flags;
    return cudaSuccess;
  });
}

KV_GPULESS_API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes,
                                                    const void* p) {
  return call([&] {
    count(Counter::kPointerQueries);
    *attributes = {};
    const Range* r = range_of(p);
    attributes->type = cudaMemoryTypeUnregistered;
    attributes->device = cudaInvalidDeviceId;
    if (r == nullptr) return cudaSuccess;
    attributes->device = 0;
    attributes->devicePointer = r->device_begin + (static_cast<const char*>(p) - r->begin);
    const bool on_device = r->kind == RangeKind::kDevice;
    attributes->type = on_device ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
    attributes->hostPointer = on_device ? nullptr : const_cast<void*>(p);
    return cudaSuccess;
  });
}

KV_GPULESS_API cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  return call([&] {
    count(Counter::kDeviceQueries);
    *total_bytes = settings().device_bytes;
    *free_bytes = *total_bytes - device_bytes_in_use();
    return cudaSuccess;
  });
}
