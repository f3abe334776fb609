// SPDX-License-Identifier: Apache-2.0
// The memory ranges known to the runtime: device allocations, and pinned and registered host
// memory.
//
// Invariant: ranges do not overlap, and registered ranges do not share pages. All other memory is
// pageable host memory. Callers hold the runtime's lock.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace kvcache::gpuless {

enum class RangeKind { kDevice, kPinned, kRegistered };

struct Range {
  char* begin;
  size_t bytes;
  RangeKind kind;
  // Address for kernels; equal to `begin` unless KVCACHE_GPULESS_DEVICE_POINTERS is set.
  char* device_begin;
  unsigned flags;
};

const Range* range_of(const void* p);  // nullptr: pageable, or freed device memory
bool is_pageable(const void* p);

cudaError_t add_device(void** memory, size_t bytes);
cudaError_t add_pinned(void** memory, size_t bytes, unsigned flags);
cudaError_t add_registered(void* memory, size_t bytes, unsigned flags);
// Returns an error unless `memory` is the start of a range of this kind.
cudaError_t remove_range(void* memory, RangeKind kind);

// Whether an operand of a copy lies within one range, or entirely in pageable memory.
bool is_operand(const void* p, size_t bytes);
// Returns the address at which the runtime accesses p, which is the alias of device memory, or p.
char* reachable(const void* p);

}  // namespace kvcache::gpuless
