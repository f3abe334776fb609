// How much dynamic shared memory a kernel may have: 48 KiB, or what cudaFuncSetAttribute allowed
// this kernel, up to the 227 KiB of compute capability 9.0.
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

  // False where no device can give so much; the limit stays as it was then.
  bool set(const void* kernel, int bytes) {
    if (bytes < 0 || size_t(bytes) > kMaxSharedBytes) return false;
    const std::lock_guard<std::mutex> lock(mutex_);
    by_kernel_[kernel] = size_t(bytes);
    return true;
  }

  // Throws std::invalid_argument where a launch of the kernel may not have so much.
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
