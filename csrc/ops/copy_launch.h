// SPDX-License-Identifier: Apache-2.0
// The parameters of a launch of the kernel that copies blocks, including regions and pairs, and the
// division of work among warps.
//
// Each pair's page is divided into chunks, region by region. A warp copies one chunk at a time. A
// chunk has kUnroll vectors per lane, which are as wide as the region allows. Regions and ids share
// the parameter memory, so the fewer regions there are, the more pairs fit. Ids on the device take
// no space.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "ops/copy_pages.h"
#include "ops/vector.h"
#include "worker/fast_divisor.h"
#include "worker/host_device.h"

namespace kvcache {

constexpr int kCopyUnroll = 8;  // number of loads in flight per thread

KV_HOST_DEVICE constexpr int64_t copy_chunk_bytes(int64_t vector_bytes) {
  return 32 * kCopyUnroll * vector_bytes;
}

struct CopyPair {
  int32_t source, destination;
};

// The fixed part of the parameters, followed by the regions and pairs.
struct CopyHead {
  const char* source;
  char* destination;
  int64_t num_sources, num_destinations;
  const int32_t* pairs;       // pairs on the device; nullptr: the pairs follow the regions
  FastDivisor page_chunks;    // chunks per page
  FastDivisor region_chunks;  // chunks per region; divisor 0 if the regions differ
  uint32_t num_regions;
  uint32_t num_tasks;  // number of pairs times chunks per page, below 2^31
};

template <size_t kBytes>
struct CopyLaunch {
  // The fields of a region, its first chunk (low half), and the size of its vectors in bytes (high
  // half).
  static constexpr int64_t kRegionWords = kRegionFields + 1;
  static constexpr int64_t kWords = static_cast<int64_t>((kBytes - sizeof(CopyHead)) / 8);

  CopyHead head;
  int64_t words[kWords];

  // Returns whether this many regions and pairs fit. For pairs on the device, pass num_pairs = 0.
  static constexpr bool holds(int64_t num_regions, int64_t num_pairs) {
    return num_regions * kRegionWords + num_pairs <= kWords;
  }

  KV_HOST_DEVICE CopyRegion region(uint32_t i) const {
    const int64_t* fields = words + i * kRegionWords;
    return {fields[0], fields[1], fields[2], fields[3], fields[4]};
  }
  KV_HOST_DEVICE uint32_t first_chunk(uint32_t i) const {
    return static_cast<uint32_t>(words[i * kRegionWords + kRegionFields]);
  }
  KV_HOST_DEVICE int vector_bytes(uint32_t i) const {
    return static_cast<int>(words[i * kRegionWords + kRegionFields] >> 32);
  }
  KV_HOST_DEVICE CopyPair pair(uint32_t i) const {
    if (head.pairs != nullptr) return {head.pairs[2 * int64_t{i}], head.pairs[2 * int64_t{i} + 1]};
    const int64_t ids = words[head.num_regions * kRegionWords + i];
    return {static_cast<int32_t>(ids), static_cast<int32_t>(ids >> 32)};
  }

  // Returns the region that contains a chunk of a page.
  KV_HOST_DEVICE uint32_t region_of(uint32_t chunk) const {
    if (head.region_chunks.divisor != 0) return head.region_chunks.divide(chunk);
    // A binary search finds the last region that starts at or before the chunk.
    uint32_t low = 0, high = head.num_regions - 1;
    while (low < high) {
      const uint32_t middle = (low + high + 1) / 2;
      if (first_chunk(middle) <= chunk) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return low;
  }
};

// A region, and the size of the widest vectors that its addresses, strides and length allow.
struct VectorRegion {
  CopyRegion region;
  int64_t vector_bytes;

  int64_t num_chunks() const {
    const int64_t size = copy_chunk_bytes(vector_bytes);
    return (region.num_bytes + size - 1) / size;
  }
};

// Returns the regions that are not empty.
inline std::vector<VectorRegion> vector_regions(const BlockCopy& c) {
  std::vector<VectorRegion> found;
  for (int64_t i = 0; i < c.num_regions; ++i) {
    const CopyRegion& r = c.regions[i];
    if (r.num_bytes == 0) continue;
    const uint64_t all = reinterpret_cast<uint64_t>(c.source) |
                         reinterpret_cast<uint64_t>(c.destination) |
                         static_cast<uint64_t>(r.source | r.source_stride | r.destination |
                                               r.destination_stride | r.num_bytes);
    found.push_back({r, common_vector_bytes(all)});
  }
  return found;
}

// The part of a copy that one launch performs.
struct CopyShare {
  const VectorRegion* regions;
  int64_t num_regions, first_pair, num_pairs, page_chunks;

  bool is_wide() const {
    return std::all_of(regions, regions + num_regions,
                       [](const VectorRegion& r) { return r.vector_bytes == 16; });
  }
};

// Calls f(share) for consecutive shares of a copy, each as large as a launch's parameters allow.
template <size_t kBytes, class F>
void for_each_share(const BlockCopy& c, const std::vector<VectorRegion>& regions, F&& f) {
  using Launch = CopyLaunch<kBytes>;
  // If pairs are passed in the parameters, at least half of the space is reserved for them.
  const int64_t most_regions = Launch::kWords / Launch::kRegionWords / (c.pairs_on_cpu ? 2 : 1);
  const auto num_regions = static_cast<int64_t>(regions.size());
  for (int64_t region = 0; region < num_regions; region += most_regions) {
    CopyShare share{regions.data() + region, std::min(num_regions - region, most_regions), 0, 0, 0};
    for (int64_t i = 0; i < share.num_regions; ++i) {
      share.page_chunks += share.regions[i].num_chunks();
    }
    int64_t most_pairs = std::max<int64_t>(INT32_MAX / share.page_chunks, 1);
    if (c.pairs_on_cpu) {
      most_pairs = std::min(most_pairs, Launch::kWords - share.num_regions * Launch::kRegionWords);
    }
    for (; share.first_pair < c.num_pairs; share.first_pair += most_pairs) {
      share.num_pairs = std::min(c.num_pairs - share.first_pair, most_pairs);
      f(share);
    }
  }
}

template <size_t kBytes>
void fill(CopyLaunch<kBytes>& launch, const BlockCopy& c, const CopyShare& share) {
  CopyHead& head = launch.head;
  head.source = c.source;
  head.destination = c.destination;
  head.num_sources = c.num_sources;
  head.num_destinations = c.num_destinations;
  head.pairs = c.pairs_on_cpu ? nullptr : c.pairs + 2 * share.first_pair;
  head.page_chunks = fast_divisor(share.page_chunks);
  head.num_regions = static_cast<uint32_t>(share.num_regions);
  head.num_tasks = static_cast<uint32_t>(share.num_pairs * share.page_chunks);
  int64_t* word = launch.words;
  int64_t first_chunk = 0;
  bool alike = true;
  for (int64_t i = 0; i < share.num_regions; ++i) {
    const auto& [r, vector_bytes] = share.regions[i];
    for (int64_t field :
         {r.source, r.source_stride, r.destination, r.destination_stride, r.num_bytes}) {
      *word++ = field;
    }
    *word++ = first_chunk | vector_bytes << 32;
    first_chunk += share.regions[i].num_chunks();
    alike = alike && share.regions[i].num_chunks() == share.regions[0].num_chunks();
  }
  head.region_chunks = alike ? fast_divisor(share.regions[0].num_chunks()) : FastDivisor{};
  if (!c.pairs_on_cpu) return;
  for (int64_t i = 0; i < share.num_pairs; ++i) {
    const int32_t* pair = c.pairs + 2 * (share.first_pair + i);
    *word++ = static_cast<int64_t>(uint64_t{static_cast<uint32_t>(pair[0])} |
                                   uint64_t{static_cast<uint32_t>(pair[1])} << 32);
  }
}

}  // namespace kvcache
