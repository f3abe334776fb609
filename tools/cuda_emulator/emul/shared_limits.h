// SPDX-License-Identifier: Apache-2.0
// The maximum dynamic shared memory of a kernel: 48 KiB, or the limit that cudaFuncSetAttribute has
// set for the kernel, up to 227 KiB (compute capability 9.0).
#pragma once

#include <cstddef>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>

namespace emul {

inline constexpr size_t kPlainSharedBytes = 48 * 1024;
inline constexpr size_t kMaxSharedBytes = 227 * 1024;

class SharedLimits {
 public:
  static SharedLimits& instance() {
    static SharedLimits limits;
    return limits;
  }

  // Sets the limit. If the new limit exceeds the maximum of all devices, returns false and changes
  // nothing.
  bool set(const void* kernel, int bytes) {
    if (bytes < 0 || size_t(bytes) > kMaxSharedBytes) return false;
    const std::lock_guard<std::mutex> lock(mutex_);
    by_kernel_[kernel] = size_t(bytes);
    return true;
  }

  // Throws std::invalid_argument if a launch of the kernel exceeds its limit.
  void check(const void* kernel, size_t bytes) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = by_kernel_.find(kernel);
    const size_t most = found == by_kernel_.end() ? kPlainSharedBytes : found->second;
    if (bytes <= most || bytes <= kPlainSharedBytes) return;
    throw std::invalid_argument("emul::launch: " + std::to_string(bytes) +
                                " bytes of dynamic shared memory: this kernel may have " +
                                std::to_string(most) +
                                ", see cudaFuncAttributeMaxDynamicSharedMemorySize");
  }

 private:
  mutable std::mutex mutex_;
  std::map<const void*, size_t> by_kernel_;
};

}  // namespace emul
