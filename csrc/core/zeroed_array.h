// SPDX-License-Identifier: Apache-2.0
// An array of zero bytes that costs neither time nor memory until it is accessed.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstring>
#include <new>
#include <type_traits>

#include "core/prefault.h"

namespace kvcache {

// The memory consists of anonymous pages, which are page-aligned, zero, and committed by the kernel
// on first access. A pool of ten million blocks is therefore constructed in microseconds, and only
// blocks that were used take up memory. A Prefault commits the pages at construction. Large arrays
// use huge pages, because TLB misses dominate random access over many megabytes.
template <class T>
class ZeroedArray {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  explicit ZeroedArray(size_t size) : num_bytes_(size * sizeof(T)) {
    void* p = mmap(nullptr, num_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    data_ = static_cast<T*>(p);
#ifdef MADV_HUGEPAGE
    // If the request fails, the array still works but is slower.
    if (num_bytes_ >= (size_t{4} << 20)) (void)madvise(p, num_bytes_, MADV_HUGEPAGE);
#endif
    Prefault::note(p, num_bytes_);
  }
  ~ZeroedArray() {
    Prefault::remove(data_);
    munmap(data_, num_bytes_);
  }
  ZeroedArray(const ZeroedArray&) = delete;
  ZeroedArray& operator=(const ZeroedArray&) = delete;

  T* data() { return data_; }
  const T* data() const { return data_; }
  T& operator[](size_t i) { return data_[i]; }
  const T& operator[](size_t i) const { return data_[i]; }
  size_t num_bytes() const { return num_bytes_; }

  // Sets all bytes to zero; the kernel reclaims the pages.
  void zero() {
    if (madvise(data_, num_bytes_, MADV_DONTNEED) != 0) std::memset(data_, 0, num_bytes_);
  }

 private:
  size_t num_bytes_;
  T* data_;
};

}  // namespace kvcache
