// Pages between a device and the host by the device's copy engines: fragments as descriptors, many
// per call.
#pragma once

#include <cstdint>
#include <vector>

#include "ops/block_copy.h"
#include "ops/device.h"

namespace kvcache {

constexpr size_t kMaxDescriptors = 4096;  // of one call of the copy engine

// Fragments for the copy engine, handed over so many at a time.
class Batch {
 public:
  explicit Batch(cudaStream_t stream) : stream_(stream) {}

  void add(void* to, const void* from, int64_t num_bytes) {
    destinations_.push_back(to);
    sources_.push_back(from);
    sizes_.push_back(static_cast<size_t>(num_bytes));
    if (sizes_.size() == kMaxDescriptors) flush();
  }

  void flush() {
    if (!sizes_.empty() && !flush_at_once()) {
      for (size_t i = 0; i < sizes_.size(); ++i) {
        KV_CUDA_CHECK(
            cudaMemcpyAsync(destinations_[i], sources_[i], sizes_[i], cudaMemcpyDefault, stream_));
      }
    }
    destinations_.clear();
    sources_.clear();
    sizes_.clear();
  }

 private:
  // By one call; false where there is none: an older CUDA or driver, or the default stream.
  bool flush_at_once() {
#if CUDART_VERSION >= 12080
    if (stream_ == nullptr || sizes_.size() == 1 || !batches_) return false;
    cudaMemcpyAttributes attributes{};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    size_t from_first = 0;
#if CUDART_VERSION >= 13000
    const cudaError_t error =
        cudaMemcpyBatchAsync(destinations_.data(), sources_.data(), sizes_.data(), sizes_.size(),
                             &attributes, &from_first, 1, stream_);
#else
    size_t failed = 0;
    const cudaError_t error = cudaMemcpyBatchAsync(
        destinations_.data(), const_cast<void**>(sources_.data()), sizes_.data(), sizes_.size(),
        &attributes, &from_first, 1, &failed, stream_);
#endif
    if (error == cudaSuccess) return true;
    if (error != cudaErrorNotSupported && error != cudaErrorCallRequiresNewerDriver &&
        error != cudaErrorStreamCaptureUnsupported) {
      KV_CUDA_CHECK(error);
    }
    (void)cudaGetLastError();  // it is one that was expected
    batches_ = false;
#endif
    return false;
  }

  cudaStream_t stream_;
  bool batches_ = true;
  std::vector<void*> destinations_;
  std::vector<const void*> sources_;
  std::vector<size_t> sizes_;
};

inline void copy_by_engine(const BlockCopy& c, bool from_host, bool to_host, const OnDevice& device) {
  Batch batch(device.stream);
  for (const CopyRun& run : runs_of(c, INT32_MAX, from_host, to_host)) {
    for (int64_t i = 0; i < c.num_regions; ++i) {
      const CopyRegion& r = c.regions[i];
      if (r.num_bytes == 0) continue;
      if (r.is_dense()) {
        batch.add(c.to(r, run.destination), c.from(r, run.source), run.num_pages * r.num_bytes);
        continue;
      }
      for (int64_t page = 0; page < run.num_pages; ++page) {
        batch.add(c.to(r, run.destination + page), c.from(r, run.source + page), r.num_bytes);
      }
    }
  }
  batch.flush();
}

}  // namespace kvcache
