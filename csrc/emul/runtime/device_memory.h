// The device's memory: each allocation is mapped twice.
//
// At its device address, which callers see, it is PROT_NONE except while a kernel runs, so host
// code that touches it dies with a message. At its alias, a constant distance away, the runtime's
// own copies reach it at any time. Addresses are never used again: an access after free dies too,
// and so does one past the end of an allocation, rounded up to pages.
//
// Callers hold the runtime's lock.
#pragma once

#include <cstddef>

namespace kvcache::gpuless {

// nullptr where the device's memory is full.
void* allocate_device(size_t bytes);
void free_device(void* memory);  // of allocate_device
bool in_device_arena(const void* p);
size_t device_bytes_in_use();

// Where the host reaches what lies at device address p.
void* device_alias(const void* p);

// A second mapping of host memory, for device pointers that differ from host pointers. Replaces the
// pages of [begin, begin + bytes) by shared ones with the same contents; nullptr where that fails.
void* alias_host_pages(void* begin, size_t bytes);
void drop_host_alias(void* host_begin);

// Device memory is accessible while one of these lives; `kernel` names who runs, for messages. Host
// memory with an alias is not: a kernel must go by the device pointer.
class OpenDevice {
 public:
  explicit OpenDevice(const char* kernel);
  ~OpenDevice();
  OpenDevice(const OpenDevice&) = delete;
};

}  // namespace kvcache::gpuless
