// SPDX-License-Identifier: Apache-2.0
// The device's memory. Each allocation is mapped twice.
//
// At its device address, which callers use, the memory is PROT_NONE except while a kernel runs, so
// host code that touches the memory crashes with a message. The runtime's own copies use an alias
// at a constant distance, which is always accessible. Addresses are never reused, so an access
// after free also crashes, as does an access past the end of an allocation (rounded up to pages).
//
// Callers hold the runtime's lock.
#pragma once

#include <cstddef>

namespace kvcache::gpuless {

// Returns nullptr if the device memory is full.
void* allocate_device(size_t bytes);
void free_device(void* memory);  // frees memory from allocate_device
bool in_device_arena(const void* p);
size_t device_bytes_in_use();

// Returns the host address of the memory at device address p.
void* device_alias(const void* p);

// Maps host memory a second time, so that device pointers differ from host pointers. Replaces the
// pages of [begin, begin + bytes) with shared pages that have the same content. Returns nullptr on
// failure.
void* alias_host_pages(void* begin, size_t bytes);
void drop_host_alias(void* host_begin);

// Makes device memory accessible while this object exists. `kernel` is the name of the running
// kernel for messages. Host memory that has an alias is not accessible at its host address, because
// a kernel must use the device pointer.
class OpenDevice {
 public:
  explicit OpenDevice(const char* kernel);
  ~OpenDevice();
  OpenDevice(const OpenDevice&) = delete;
};

}  // namespace kvcache::gpuless
