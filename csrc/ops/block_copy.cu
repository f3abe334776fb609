#include "ops/block_copy.h"

#include "ops/copy_launch.h"
#include "ops/device.h"
#include "ops/launch_ids.h"

namespace kvcache {
namespace {

constexpr int kWarps = 16;  // per thread block
// Thread blocks where the host is one side: a bus is full long before the device is, and attention
// runs beside. Where both sides are the device's, as many as it holds.
constexpr int64_t kHostThreadBlocks = 8;
constexpr int64_t kDeviceThreadBlocks = 4 * 132;
constexpr size_t kMaxDescriptors = 4096;  // of one call of the copy engine

// One chunk: kCopyUnroll vectors of each lane, or fewer where the region ends before. All are read
// before the first is written.
template <class Vector>
__device__ __forceinline__ void copy_chunk(const Vector* from, Vector* to, int64_t num_vectors,
                                           bool cleared) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  // Lane's vectors are those at 0, 32, ... below `left`.
  const int left = static_cast<int>(min(num_vectors, int64_t{32 * kCopyUnroll})) - lane;
  from += lane;
  to += lane;
  Vector moved[kCopyUnroll];
#pragma unroll
  for (int i = 0; i < kCopyUnroll; ++i) {
    moved[i] = Vector{};
    if (!cleared && 32 * i < left) moved[i] = __ldcs(from + 32 * i);
  }
#pragma unroll
  for (int i = 0; i < kCopyUnroll; ++i) {
    if (32 * i < left) __stcs(to + 32 * i, moved[i]);
  }
}

// kWide: all regions have vectors of 16 bytes. Otherwise each warp goes by its region's.
template <size_t kParameterBytes, bool kWide>
__global__ void __launch_bounds__(kWarps * 32, kWide ? 1 : 2)
    copy_blocks_kernel(KV_PARAMETER CopyLaunch<kParameterBytes> c) {
  const CopyHead& head = c.head;
  const uint32_t num_warps = gridDim.x * kWarps;
  for (uint32_t task = blockIdx.x * kWarps + threadIdx.x / 32; task < head.num_tasks;
       task += num_warps) {
    const uint32_t page = head.page_chunks.divide(task);
    const uint32_t chunk = task - page * head.page_chunks.divisor;
    const CopyPair pair = c.pair(page);
    // Out of range: skipped, see checked_mode.
    if (is_bad_pair(pair.source, pair.destination, head.num_sources, head.num_destinations)) {
      continue;
    }
    const uint32_t index = c.region_of(chunk);
    const CopyRegion r = c.region(index);
    const bool cleared = pair.source == kCleared;
    const auto copy = [&](auto vector) {
      using Vector = decltype(vector);
      constexpr int64_t kVector = sizeof(Vector);
      const int64_t at = int64_t{chunk - c.first_chunk(index)} * copy_chunk_bytes(kVector);
      copy_chunk(reinterpret_cast<const Vector*>(head.source + r.source +
                                                 pair.source * r.source_stride + at),
                 reinterpret_cast<Vector*>(head.destination + r.destination +
                                           pair.destination * r.destination_stride + at),
                 (r.num_bytes - at) / kVector, cleared);
    };
    if constexpr (kWide) {
      copy(uint4{});
    } else {
      switch (c.vector_bytes(index)) {
        case 16:
          copy(uint4{});
          break;
        case 8:
          copy(uint2{});
          break;
        case 4:
          copy(uint32_t{});
          break;
        case 2:
          copy(uint16_t{});
          break;
        default:
          copy(uint8_t{});
      }
    }
  }
}

template <size_t kBytes>
void launch_shares(const BlockCopy& c, const std::vector<VectorRegion>& regions, int64_t most,
                   const OnDevice& device) {
  static_assert(sizeof(CopyLaunch<kBytes>) <= kBytes, "a launch's parameters");
  CopyLaunch<kBytes> launch;
  for_each_share<kBytes>(c, regions, [&](const CopyShare& share) {
    fill(launch, c, share);
    const int64_t needed = (launch.head.num_tasks + int64_t{kWarps} - 1) / kWarps;
    const dim3 grid(static_cast<unsigned>(std::min(needed, most)));
    if (share.is_wide()) {
      KV_LAUNCH((copy_blocks_kernel<kBytes, true>), grid, dim3(kWarps * 32), 0, device.stream,
                launch);
    } else {
      KV_LAUNCH((copy_blocks_kernel<kBytes, false>), grid, dim3(kWarps * 32), 0, device.stream,
                launch);
    }
  });
}

// One launch where possible, with as few bytes of parameters as that takes: a launch copies them
// all.
void copy_by_kernel(const BlockCopy& c, bool with_host, const OnDevice& device) {
  const std::vector<VectorRegion> regions = vector_regions(c);
  const int64_t usual = with_host ? kHostThreadBlocks : kDeviceThreadBlocks;
  const int64_t most = c.num_thread_blocks > 0 ? c.num_thread_blocks : usual;
  const bool fits = CopyLaunch<kSmallParameterBytes>::holds(static_cast<int64_t>(regions.size()),
                                                            c.pairs_on_cpu ? c.num_pairs : 0);
  if (fits || !takes_large_parameters()) {
    launch_shares<kSmallParameterBytes>(c, regions, most, device);
  } else {
    launch_shares<kLargeParameterBytes>(c, regions, most, device);
  }
}

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

void copy_by_engine(const BlockCopy& c, bool from_host, bool to_host, const OnDevice& device) {
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

// A kernel reads and writes memory of the host only where it is pinned.
void require_pinned(const void* memory, const char* name) {
  cudaPointerAttributes attributes{};
  const cudaError_t error = cudaPointerGetAttributes(&attributes, memory);
  if (error == cudaSuccess && attributes.type == cudaMemoryTypeHost) return;
  (void)cudaGetLastError();
  fail(std::string(name) +
       " is host memory that is not pinned: expected pinned memory for engine 0 "
       "(kernel), or engine 1 (copy engine)");
}

struct BadPair {
  BlockCopy copy;
  KV_HOST_DEVICE bool operator()(int64_t i) const {
    return is_bad_pair(copy.pairs[2 * i], copy.pairs[2 * i + 1], copy.num_sources,
                       copy.num_destinations);
  }
};

void copy_blocks_cuda(std::optional<Tensor> src, Tensor dst, Tensor regions, Tensor pairs,
                      int64_t num_src_blocks, int64_t num_dst_blocks, int64_t engine,
                      int64_t pages_per_run, int64_t num_thread_blocks) {
  const BlockCopy c =
      checked_block_copy(src, dst, regions, pairs, num_src_blocks, num_dst_blocks, engine,
                         pages_per_run, num_thread_blocks, ids_on_host(pairs));
  const bool from_host = src.has_value() && src->is_cpu(), to_host = dst.is_cpu();
  const Tensor& on_device = to_host && src.has_value() ? *src : dst;
#ifdef __CUDACC__
  if (!on_device.is_cuda()) fail("neither src nor dst is on a CUDA device: expected one of them");
#endif
  if (src.has_value() && !from_host && !to_host) check_same_device(*src, "src", dst, "dst");
  if (!c.pairs_on_cpu) check_same_device(pairs, "pairs", on_device, "the device's side");
  const bool by_kernel = c.engine == CopyEngine::kKernel;
  if (!by_kernel) {
    if (!c.pairs_on_cpu) fail("pairs is on a device: expected cpu for engine 1 (copy engine)");
    for (int64_t i = 0; i < c.num_pairs; ++i) {
      if (c.pairs[2 * i] == kCleared) {
        fail("pairs[" + std::to_string(i) + "] clears a page: expected engine 0 (kernel) for that");
      }
    }
  }
  if (c.num_pairs == 0 || c.page_bytes() == 0) return;
  const OnDevice device(on_device);
  if (by_kernel && from_host) require_pinned(c.source, "src");
  if (by_kernel && to_host) require_pinned(c.destination, "dst");
  if (!c.pairs_on_cpu && checked_mode()) {
    const int64_t i = first_bad_on_device(BadPair{c}, c.num_pairs, device.stream);
    if (i >= 0) {
      fail_pair(c, i, fetch(c.pairs + 2 * i, device.stream),
                fetch(c.pairs + 2 * i + 1, device.stream));
    }
  }
  if (by_kernel) {
    copy_by_kernel(c, from_host || to_host, device);
  } else {
    copy_by_engine(c, from_host, to_host, device);
  }
}

}  // namespace

KV_REGISTER_CUDA("copy_blocks", copy_blocks_cuda)

}  // namespace kvcache
