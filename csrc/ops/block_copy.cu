#include "ops/block_copy.h"

#include "ops/copy_engine.h"
#include "ops/device.h"
#include "ops/launch_ids.h"
#include "ops/mapped_host.h"
#include "ops/vector.h"

namespace kvcache {
namespace {

constexpr int kWarps = 16;                        // per thread block
constexpr int kUnroll = 8;                        // loads in flight per thread
constexpr int kMaxRegions = 40, kMaxPairs = 256;  // per launch, see kMaxParameterBytes
// Thread blocks where the host is one side: a bus is full long before the device is, and attention
// runs beside. Where both sides are the device's, as many as it holds.
constexpr int64_t kHostThreadBlocks = 8;
constexpr int64_t kDeviceThreadBlocks = 4 * 132;

// What one launch does: each pair's page is cut into chunks, and a warp copies a chunk at a time.
struct CopyLaunch {
  const char* source;
  char* destination;
  int64_t num_sources, num_destinations;
  uint32_t num_pairs, chunks_per_pair;
  int num_regions;
  uint32_t first_chunk[kMaxRegions + 1];  // of a page, where each region begins
  CopyRegion regions[kMaxRegions];
  LaunchIds<2 * kMaxPairs> ids;
};
static_assert(sizeof(CopyLaunch) <= kMaxParameterBytes, "a launch's parameters");

template <class Vector>
constexpr uint32_t kChunkBytes = 32 * kUnroll * sizeof(Vector);

__device__ __forceinline__ int region_of(const CopyLaunch& c, uint32_t chunk) {
  int low = 0, high = c.num_regions - 1;  // the last region that begins at or before the chunk
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (c.first_chunk[middle] <= chunk) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

template <class Vector>
__global__ void __launch_bounds__(kWarps * 32) copy_blocks_kernel(KV_PARAMETER CopyLaunch c) {
  const unsigned lane = threadIdx.x % 32;
  const uint32_t num_tasks = c.num_pairs * c.chunks_per_pair;
  const uint32_t num_warps = gridDim.x * kWarps;
  for (uint32_t task = blockIdx.x * kWarps + threadIdx.x / 32; task < num_tasks;
       task += num_warps) {
    const uint32_t pair = task / c.chunks_per_pair;
    const uint32_t chunk = task - pair * c.chunks_per_pair;
    const int32_t source = c.ids[2 * pair], destination = c.ids[2 * pair + 1];
    // Out of range: skipped, see checked_mode.
    if (is_bad_pair(source, destination, c.num_sources, c.num_destinations)) continue;
    const int index = region_of(c, chunk);
    const CopyRegion& r = c.regions[index];
    const int64_t at = int64_t{chunk - c.first_chunk[index]} * kChunkBytes<Vector>;
    const int64_t left = (r.num_bytes - at) / static_cast<int64_t>(sizeof(Vector));
    const auto* from =
        reinterpret_cast<const Vector*>(c.source + r.source + source * r.source_stride + at);
    auto* to = reinterpret_cast<Vector*>(c.destination + r.destination +
                                         destination * r.destination_stride + at);
    Vector moved[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const unsigned j = lane + 32 * i;
      moved[i] = Vector{};
      if (source != kCleared && j < left) moved[i] = __ldcs(from + j);
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const unsigned j = lane + 32 * i;
      if (j < left) __stcs(to + j, moved[i]);
    }
  }
}

template <class Vector>
void launch(const BlockCopy& c, bool with_host, int64_t first_region, int64_t num_regions,
            int64_t first_pair, int64_t num_pairs, const OnDevice& device) {
  CopyLaunch l{};
  l.source = c.source;
  l.destination = c.destination;
  l.num_sources = c.num_sources;
  l.num_destinations = c.num_destinations;
  l.num_pairs = static_cast<uint32_t>(num_pairs);
  l.num_regions = static_cast<int>(num_regions);
  for (int64_t i = 0; i < num_regions; ++i) {
    l.regions[i] = c.regions[first_region + i];
    const int64_t size = kChunkBytes<Vector>;
    l.first_chunk[i + 1] =
        l.first_chunk[i] + static_cast<uint32_t>((l.regions[i].num_bytes + size - 1) / size);
  }
  l.chunks_per_pair = l.first_chunk[num_regions];
  if (l.chunks_per_pair == 0) return;
  l.ids = launch_ids<2 * kMaxPairs>(c.pairs, c.pairs_on_cpu, 2 * first_pair, 2 * num_pairs);
  const int64_t needed = (num_pairs * l.chunks_per_pair + kWarps - 1) / kWarps;
  const int64_t usual = with_host ? kHostThreadBlocks : kDeviceThreadBlocks;
  const int64_t most = c.num_thread_blocks > 0 ? c.num_thread_blocks : usual;
  KV_LAUNCH(copy_blocks_kernel<Vector>, dim3(unsigned(std::min(needed, most))), dim3(kWarps * 32),
            0, device.stream, l);
}

// What every address, stride and size of all regions allows.
int64_t vector_bytes(const BlockCopy& c) {
  uint64_t all = reinterpret_cast<uint64_t>(c.source) | reinterpret_cast<uint64_t>(c.destination);
  for (int64_t i = 0; i < c.num_regions; ++i) {
    const CopyRegion& r = c.regions[i];
    all |= static_cast<uint64_t>(r.source | r.source_stride | r.destination | r.destination_stride |
                                 r.num_bytes);
  }
  return common_vector_bytes(all);
}

// Pairs of one launch: as many as its parameters hold, and fewer where pages are so large that the
// number of chunks would not fit 31 bits.
int64_t pairs_per_launch(const BlockCopy& c, int64_t vector) {
  int64_t largest = 1;
  for (int64_t i = 0; i < c.num_regions; ++i) largest = std::max(largest, c.regions[i].num_bytes);
  const int64_t chunks = (largest / (vector * 32 * kUnroll) + 1) * kMaxRegions;
  return std::clamp<int64_t>(INT32_MAX / chunks, 1, kMaxPairs);
}

void copy_by_kernel(const BlockCopy& c, bool with_host, const OnDevice& device) {
  const int64_t vector = vector_bytes(c);
  const int64_t step = pairs_per_launch(c, vector);
  with_vector(vector, [&](auto v) {
    for (int64_t pair = 0; pair < c.num_pairs; pair += step) {
      for (int64_t region = 0; region < c.num_regions; region += kMaxRegions) {
        launch<decltype(v)>(c, with_host, region,
                            std::min<int64_t>(c.num_regions - region, kMaxRegions), pair,
                            std::min(c.num_pairs - pair, step), device);
      }
    }
  });
}

// Host memory by the device's addresses for it.
void copy_by_kernel(const BlockCopy& c, bool from_host, bool to_host, const OnDevice& device) {
  const auto to_mapped = [&](const BlockCopy& part) {
    const auto launch_part = [&](const BlockCopy& p) {
      copy_by_kernel(p, from_host || to_host, device);
    };
    to_host ? with_mapped_host(part, false, launch_part) : launch_part(part);
  };
  from_host ? with_mapped_host(c, true, to_mapped) : to_mapped(c);
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
  const BlockCopy c = checked_block_copy(src, dst, regions, pairs, num_src_blocks, num_dst_blocks,
                                         engine, pages_per_run, num_thread_blocks);
  const bool from_host = src.has_value() && src->is_cpu(), to_host = dst.is_cpu();
  const Tensor& on_device = to_host && src.has_value() ? *src : dst;
#ifdef __CUDACC__
  if (!on_device.is_cuda()) fail("neither src nor dst is on a CUDA device: expected one of them");
#endif
  if (src.has_value() && !from_host && !to_host) check_same_device(*src, "src", dst, "dst");
  if (!c.pairs_on_cpu) check_same_device(pairs, "pairs", on_device, "the device's side");
  const bool by_kernel = c.engine == CopyEngine::kKernel;
  if (!by_kernel) {
    if (!c.pairs_on_cpu) fail("pairs is on a device: expected cpu for the copy engine");
    for (int64_t i = 0; i < c.num_pairs; ++i) {
      if (c.pairs[2 * i] == kCleared) {
        fail("pairs[" + std::to_string(i) + "] clears a page: expected engine 0 (kernel) for that");
      }
    }
  }
  if (c.num_pairs == 0 || c.page_bytes() == 0) return;
  const OnDevice device(on_device);
  if (!c.pairs_on_cpu && checked_mode()) {
    const int64_t i = first_bad_on_device(BadPair{c}, c.num_pairs, device.stream);
    if (i >= 0) {
      fail_pair(c, i, fetch(c.pairs + 2 * i, device.stream),
                fetch(c.pairs + 2 * i + 1, device.stream));
    }
  }
  if (by_kernel) {
    copy_by_kernel(c, from_host, to_host, device);
  } else {
    copy_by_engine(c, from_host, to_host, device);
  }
}

}  // namespace

KV_REGISTER_CUDA("copy_blocks", copy_blocks_cuda)

}  // namespace kvcache
