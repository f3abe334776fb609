// SPDX-License-Identifier: Apache-2.0
#include "ops/block_copy.h"

#include <type_traits>

#include "ops/copy_engine.h"
#include "ops/copy_launch.h"
#include "ops/device.h"
#include "ops/launch_ids.h"
#include "ops/mapped_host.h"
#include "ops/occupancy.h"

namespace kvcache {
namespace {

constexpr int kWarps = 16;  // per thread block
// The number of thread blocks for a copy to or from the host. A few thread blocks saturate the bus
// and leave resources for attention, which runs concurrently. A copy within the device uses as many
// thread blocks as can be resident.
constexpr int64_t kHostThreadBlocks = 8;

// Copies one chunk, which has kCopyUnroll vectors per lane, or fewer at the end of the region. All
// loads are issued before the first store.
template <class Vector>
__device__ __forceinline__ void copy_chunk(const Vector* from, Vector* to, int64_t num_vectors,
                                           bool cleared) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  // Each lane copies its vectors at offsets 0, 32, ... below `left`.
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

// With kWide, all regions have 16-byte vectors. Otherwise, each warp uses its region's vector size.
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
    // Pairs that are out of range are skipped (see checked_mode).
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

// `most`: the number of thread blocks, or 0 for as many as can be resident.
template <size_t kBytes>
void launch_shares(const BlockCopy& c, const std::vector<VectorRegion>& regions, int64_t most,
                   const OnDevice& device) {
  static_assert(sizeof(CopyLaunch<kBytes>) <= kBytes, "a launch's parameters");
  CopyLaunch<kBytes> launch;
  for_each_share<kBytes>(c, regions, [&](const CopyShare& share) {
    fill(launch, c, share);
    const int64_t needed = (launch.head.num_tasks + int64_t{kWarps} - 1) / kWarps;
    const auto launch_as = [&](auto wide) {
      constexpr auto kKernel = copy_blocks_kernel<kBytes, wide>;
      const int64_t blocks = most > 0 ? most : resident_blocks<kKernel, kWarps * 32>(device);
      const dim3 grid(static_cast<unsigned>(std::min(needed, blocks)));
      KV_LAUNCH(kKernel, grid, dim3(kWarps * 32), 0, device.stream, launch);
    };
    share.is_wide() ? launch_as(std::true_type{}) : launch_as(std::false_type{});
  });
}

// Uses a single launch if possible. Uses the smaller parameter struct if it suffices, because a
// launch copies all of its parameters.
void copy_by_kernel(const BlockCopy& c, bool with_host, const OnDevice& device) {
  const std::vector<VectorRegion> regions = vector_regions(c);
  const int64_t usual = with_host ? kHostThreadBlocks : 0;
  const int64_t most = c.num_thread_blocks > 0 ? c.num_thread_blocks : usual;
  const bool fits = CopyLaunch<kSmallParameterBytes>::holds(static_cast<int64_t>(regions.size()),
                                                            c.pairs_on_cpu ? c.num_pairs : 0);
  if (fits || !takes_large_parameters()) {
    launch_shares<kSmallParameterBytes>(c, regions, most, device);
  } else {
    launch_shares<kLargeParameterBytes>(c, regions, most, device);
  }
}

// Performs the copy with the device addresses of the host memory.
void copy_by_kernel(const BlockCopy& c, bool from_host, bool to_host, const OnDevice& device) {
  const auto to_mapped = [&](const BlockCopy& part) {
    const auto launch_part = [&](const BlockCopy& p) {
      copy_by_kernel(p, from_host || to_host, device);
    };
    to_host ? with_mapped_host(part, false, device.index, launch_part) : launch_part(part);
  };
  from_host ? with_mapped_host(c, true, device.index, to_mapped) : to_mapped(c);
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
                      int64_t pages_per_run, int64_t num_thread_blocks, Owners owners) {
  const BlockCopy c =
      checked_block_copy(src, dst, regions, pairs, num_src_blocks, num_dst_blocks, engine,
                         pages_per_run, num_thread_blocks, ids_on_host(pairs), owners);
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
