// SPDX-License-Identifier: Apache-2.0
// The memory ranges known to the runtime: device allocations, and pinned and registered host
// memory.
//
// Invariant: ranges do not overlap, and registered ranges do not share pages. Memory outside all
// ranges is pageable host memory. Callers hold the runtime's lock.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace kvcache::gpuless {

enum class RangeKind { kDevice, kPinned, kRegistered };

struct Range {
  char* begin;
  size_t bytes;
  RangeKind kind;
  // The address that kernels use. It equals `begin` unless KVCACHE_GPULESS_DEVICE_POINTERS is set.
  char* device_begin;
  unsigned flags;
};

const Range* range_of(const void* p);  // nullptr for pageable memory and freed device memory
bool is_pageable(const void* p);

cudaError_t add_device(void** memory, size_t bytes);
cudaError_t add_pinned(void** memory, size_t bytes, unsigned flags);
cudaError_t add_registered(void* memory, size_t bytes, unsigned flags);
// Returns an error unless a range of this kind starts at `memory`.
cudaError_t remove_range(void* memory, RangeKind kind);

// Returns whether a copy's operand lies within one range, or entirely in pageable memory.
bool is_operand(const void* p, size_t bytes);
// Returns the address at which the runtime accesses p: the alias for device memory, or p itself.
char* reachable(const void* p);

}  // namespace kvcache::gpuless
