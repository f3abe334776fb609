// SPDX-License-Identifier: Apache-2.0
// Copies with a device's copy engines, with many copies per call if the driver supports batches and
// one copy per call otherwise.
//
// Requires only the CUDA runtime API, which must be included before this header. ops/device.h
// includes it; a test substitutes a scripted API.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>

#include "ops/switches.h"

namespace kvcache {

// The maximum number of copies per call, far below the tens of thousands at which drivers have
// failed (vllm-project/vllm#49276).
constexpr size_t kMaxDescriptors = 4096;

// KVCACHE_BATCH_COPIES=0 disables batched copies, for drivers that hang or fail in them.
inline bool batches_switched_on() { return switched_on("KVCACHE_BATCH_COPIES", true); }

// Whether the driver has rejected a batch as unsupported. If so, later calls do not submit batches.
inline std::atomic<bool>& driver_has_no_batches() {
  static std::atomic<bool> has_none{false};
  return has_none;
}

class CopyBatch {
 public:
  // `batched`: whether the caller allows batches. `with_host`: whether one side is host memory.
  // `settled`: whether the sources are host memory to which no work in flight writes.
  CopyBatch(cudaStream_t stream, bool batched, bool with_host, bool settled = false)
      : stream_(stream),
        with_host_(with_host),
        settled_(settled),
        batched_(batched && batches_switched_on() && batches_possible()),
        copies_(pooled()) {
    copies_.clear();  // an earlier failure may have left copies behind
  }
  CopyBatch(const CopyBatch&) = delete;
  CopyBatch& operator=(const CopyBatch&) = delete;

  void add(void* to, const void* from, int64_t num_bytes) {
    copies_.destinations.push_back(to);
    copies_.sources.push_back(from);
    copies_.sizes.push_back(static_cast<size_t>(num_bytes));
    if (copies_.sizes.size() == kMaxDescriptors) flush();
  }

  // Throws std::runtime_error, whose message identifies the copy that the runtime rejected. The
  // copies before it have been launched.
  void flush() {
    if (!flush_batched()) {
      for (size_t i = 0; i < copies_.sizes.size(); ++i) copy_one(i);
    }
    num_flushed_ += copies_.sizes.size();
    copies_.clear();
  }

 private:
  // Copy descriptors in CUDA's format. CUDA has read the descriptors when its call returns.
  struct Descriptors {
    std::vector<void*> destinations;
    std::vector<const void*> sources;
    std::vector<size_t> sizes;

    void clear() {
      destinations.clear();
      sources.clear();
      sizes.clear();
    }
  };

  // One object per thread, so that memory is allocated only once. A thread uses only one batch at a
  // time.
  static Descriptors& pooled() {
    static thread_local Descriptors descriptors;
    return descriptors;
  }

  bool batches_possible() const {
#if CUDART_VERSION >= 12080
    if (driver_has_no_batches()) return false;
    if (stream_ == nullptr) return false;  // the legacy default stream rejects batches
    // A batch would invalidate a graph capture, but single copies become graph nodes.
    cudaStreamCaptureStatus capture{};
    if (cudaStreamIsCapturing(stream_, &capture) != cudaSuccess) {
      (void)cudaGetLastError();
      return false;
    }
    if (capture != cudaStreamCaptureStatusNone) return false;
    // On systems with different device addresses for registered memory (WSL), a batch does not
    // translate addresses, but a single copy does (sgl-project/sglang#40232).
    int device = 0, same_address = 1;
    if (with_host_ &&
        (cudaGetDevice(&device) != cudaSuccess ||
         cudaDeviceGetAttribute(&same_address, cudaDevAttrCanUseHostPointerForRegisteredMem,
                                device) != cudaSuccess)) {
      (void)cudaGetLastError();
      return false;
    }
    return same_address != 0;
#else
    return false;
#endif
  }

  // Submits all copies in one call. Returns false if the driver does not support this call, or if
  // it rejects copies that single calls may accept.
  bool flush_batched() {
#if CUDART_VERSION >= 12080
    auto& [destinations, sources, sizes] = copies_;
    if (!batched_ || sizes.size() < 2) return false;
    cudaMemcpyAttributes attributes{};
    attributes.srcAccessOrder =
        settled_ ? cudaMemcpySrcAccessOrderAny : cudaMemcpySrcAccessOrderStream;
    // This hint is available since CUDA 12.8. Without it, drivers for CUDA 13.1 and later may copy
    // with kernels, which occupy multiprocessors that attention needs.
    if (with_host_) attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
    size_t from_first = 0;
#if CUDART_VERSION >= 13000
    const cudaError_t error =
        cudaMemcpyBatchAsync(destinations.data(), sources.data(), sizes.data(), sizes.size(),
                             &attributes, &from_first, 1, stream_);
#else
    size_t failed = 0;
    const cudaError_t error =
        cudaMemcpyBatchAsync(destinations.data(), const_cast<void**>(sources.data()), sizes.data(),
                             sizes.size(), &attributes, &from_first, 1, &failed, stream_);
#endif
    if (error == cudaSuccess) return true;
    (void)cudaGetLastError();  // clear the error, so that a later launch does not report it
    const bool has_none =
        error == cudaErrorNotSupported || error == cudaErrorCallRequiresNewerDriver;
    if (has_none) driver_has_no_batches() = true;
    // These errors may be specific to batches. For InvalidValue, repeating the copies one by one
    // identifies the rejected copy. Copying twice is harmless.
    if (!has_none && error != cudaErrorStreamCaptureUnsupported && error != cudaErrorInvalidValue) {
      throw std::runtime_error("a batch of " + std::to_string(sizes.size()) +
                               " copies failed: " + cudaGetErrorString(error));
    }
    batched_ = false;
#endif
    return false;
  }

  void copy_one(size_t i) const {
    const auto& [destinations, sources, sizes] = copies_;
    const cudaError_t error =
        cudaMemcpyAsync(destinations[i], sources[i], sizes[i], cudaMemcpyDefault, stream_);
    if (error == cudaSuccess) return;
    (void)cudaGetLastError();
    char text[160];
    std::snprintf(text, sizeof(text),
                  "copy %zu (%zu bytes from %p to %p) failed: ", num_flushed_ + i, sizes[i],
                  sources[i], destinations[i]);
    throw std::runtime_error(std::string(text) + cudaGetErrorString(error) +
                             "; expected each side within one allocation or one pinned piece");
  }

  cudaStream_t stream_;
  bool with_host_, settled_, batched_;
  size_t num_flushed_ = 0;
  Descriptors& copies_;
};

}  // namespace kvcache
