// SPDX-License-Identifier: Apache-2.0
// A vector for values that accumulate while a request runs, such as its tokens.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <new>
#include <type_traits>
#include <vector>

namespace kvcache {

// Growth never copies more than kMostCopied bytes, so that no append to a long context takes much
// longer than other appends. A larger array is stored in dedicated memory pages. The kernel moves
// these pages by changing page tables, and commits them on first access, so unused capacity takes
// no memory.
template <class T>
class GrowingArray {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  static constexpr size_t kMostCopied = size_t{1} << 20;

  GrowingArray() = default;
  ~GrowingArray() { free_memory(); }
  GrowingArray(const GrowingArray&) = delete;
  GrowingArray& operator=(const GrowingArray&) = delete;

  size_t size() const { return size_; }
  size_t capacity() const { return capacity_; }
  bool empty() const { return size_ == 0; }
  T* data() { return data_; }
  const T* data() const { return data_; }
  T* begin() { return data_; }
  T* end() { return data_ + size_; }
  const T* begin() const { return data_; }
  const T* end() const { return data_ + size_; }
  T& operator[](size_t i) { return data_[i]; }
  const T& operator[](size_t i) const { return data_[i]; }
  const T& back() const { return data_[size_ - 1]; }

  // The arguments must not refer to elements of this array.
  void push_back(const T& value) {
    if (size_ == capacity_) grow(size_ + 1);
    data_[size_++] = value;
  }
  void append(const T* values, size_t n) {
    if (size_ + n > capacity_) grow(size_ + n);
    if (n > 0) std::memcpy(data_ + size_, values, n * sizeof(T));
    size_ += n;
  }
  void assign(const T* values, size_t n) {
    size_ = 0;
    append(values, n);
  }
  // New values are zero.
  void resize(size_t size) {
    if (size > capacity_) grow(size);
    if (size > size_) std::memset(static_cast<void*>(data_ + size_), 0, (size - size_) * sizeof(T));
    size_ = size;
  }
  // Provides capacity for at least this number of values. A large array reserves twice as much,
  // because unused capacity takes no memory there.
  void reserve(size_t capacity) {
    if (capacity <= capacity_) return;
    move_to(capacity * sizeof(T) > kMostCopied ? 2 * capacity : capacity);
  }

 private:
  void grow(size_t least) { move_to(std::max(least, 2 * capacity_)); }

  void move_to(size_t capacity) {
    const size_t num_bytes = capacity * sizeof(T);
    if (num_bytes <= kMostCopied) {
      T* data = static_cast<T*>(::operator new(num_bytes));
      copy_to(data);
    } else if (is_mapped_) {
      void* data = mremap(data_, capacity_ * sizeof(T), num_bytes, MREMAP_MAYMOVE);
      if (data == MAP_FAILED) throw std::bad_alloc();
      data_ = static_cast<T*>(data);
    } else {
      void* data = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (data == MAP_FAILED) throw std::bad_alloc();
      copy_to(static_cast<T*>(data));
      is_mapped_ = true;
    }
    capacity_ = capacity;
  }
  void copy_to(T* data) {
    if (size_ > 0) std::memcpy(static_cast<void*>(data), data_, size_ * sizeof(T));
    free_memory();
    data_ = data;
  }
  void free_memory() {
    if (is_mapped_) {
      munmap(data_, capacity_ * sizeof(T));
    } else {
      ::operator delete(data_);
    }
  }

  T* data_ = nullptr;
  size_t size_ = 0, capacity_ = 0;
  bool is_mapped_ = false;
};

template <class T>
bool operator==(const GrowingArray<T>& one, const std::vector<T>& other) {
  return std::equal(one.begin(), one.end(), other.begin(), other.end());
}

}  // namespace kvcache
