// SPDX-License-Identifier: Apache-2.0
#include "ops/block_permute.h"

#include <type_traits>

#include "ops/async_copy.h"
#include "ops/cluster.h"
#include "ops/device.h"
#include "ops/launch_ids.h"
#include "ops/switches.h"
#include "ops/vector.h"

namespace kvcache {
namespace {

constexpr unsigned kThreads = 256;
constexpr int kUnroll = 8;                  // number of loads in flight per thread
constexpr int kClusterUnroll = 4;           // loads in flight from other blocks of the cluster
constexpr int64_t kSharedBytes = 32 << 10;  // per thread block, if the slice is wide enough
// Used instead of kSharedBytes if slices would otherwise be smaller than kLeastSliceBytes.
constexpr int64_t kMoreSharedBytes = 96 << 10;
constexpr int64_t kLeastSliceBytes = 64;  // one memory transaction
constexpr int64_t kLineBytes = 128;       // an L2 cache line; narrower slices read half lines
// Used for slices of one line. With this size, three thread blocks fit on an H100 SM.
constexpr int64_t kWideSharedBytes = 64 << 10;
// The default limit. To use more, a kernel must opt in with
// cudaFuncAttributeMaxDynamicSharedMemorySize.
constexpr int64_t kPlainSharedBytes = 48 << 10;
constexpr int64_t kReservedSharedBytes = 1 << 10;  // reserved by CUDA in each thread block

constexpr int64_t kMaxGrid = INT32_MAX;
constexpr int kLayersPerLaunch = 64;
constexpr int kIdsPerLaunch = 812;

// The parameters of one launch, which processes a range of groups in a range of layers.
struct PermuteLaunch {
  BlockPermute p;
  FastDivisor units_per_group;
  FastDivisor unit_blocks;  // thread blocks per unit; those in a cluster are adjacent
  FastDivisor slice;        // vectors per slice; the last slice of a row may have fewer
  FastDivisor row;          // vectors per row
  FastDivisor cluster;      // thread blocks that share a slice
  FastDivisor share;        // rows per thread block in a cluster; the last may have fewer
  uint32_t rows_at_once;    // number of rows that a thread block moves at once
  int64_t layers[kLayersPerLaunch];
  LaunchIds<kIdsPerLaunch> ids;

  // Returns this thread block's unit, and its index within the unit.
  KV_HOST_DEVICE PermuteUnit unit(uint32_t block, uint32_t& of_unit) const {
    const uint32_t u = unit_blocks.divide(block);
    of_unit = block - u * unit_blocks.divisor;
    const uint32_t group = units_per_group.divide(u);
    return p.unit(group, u - group * units_per_group.divisor);
  }

  // Returns whether this unit's group has a block that is out of range. Such units are skipped (see
  // checked_mode).
  KV_HOST_DEVICE bool skips(const PermuteUnit& unit) const {
    if (ids.on_device == nullptr) return false;  // checked on the host
    for (int32_t i = 0; i < p.group_size; ++i) {
      const int32_t id = ids[unit.first_id + i];
      if (id < 0 || id >= p.num_blocks) return true;
    }
    return false;
  }
};
static_assert(sizeof(PermuteLaunch) <= kSmallParameterBytes, "too many ids in a launch");

// Runs one thread block per slice of a unit's rows (x) and per layer (y). The thread block reads
// the whole slice into shared memory and writes it back permuted. Each thread stays in one column,
// so adjacent threads access adjacent bytes of a row. With kDense, all rows are evenly spaced.
//
// With kClustered, a cluster of thread blocks shares a slice. Each thread block holds some of the
// rows and reads the other rows from the cluster's shared memory, so that slices can be as wide as
// an L2 cache line.
//
// If the hardware supports asynchronous copies, all of a thread's loads are in flight together.
// Otherwise, kUnroll loads are in flight at a time.
template <class Vector, bool kDense, bool kClustered>
__global__ void __launch_bounds__(kThreads) permute_kernel(KV_PARAMETER PermuteLaunch launch) {
  KV_DYN_SHARED(uint4, shared);
  const BlockPermute& p = launch.p;
  const uint32_t slice = launch.slice.divisor;
  uint32_t of_unit;
  const PermuteUnit unit = launch.unit(blockIdx.x, of_unit);
  if (launch.skips(unit)) return;
  uint32_t begin = 0, end = p.unit_rows;  // number of rows in this thread block
  if constexpr (kClustered) {
    const uint32_t of_slice = launch.cluster.divide(of_unit);
    begin = (of_unit - of_slice * launch.cluster.divisor) * launch.share.divisor;
    end = min(begin + launch.share.divisor, end);
    of_unit = of_slice;
  }
  const uint32_t of_step = launch.slice.divide(threadIdx.x);  // the thread's row within a step
  const uint32_t column = threadIdx.x - of_step * slice;
  const uint32_t in_row = of_unit * slice + column;
  const uint32_t step = launch.rows_at_once;
  const bool takes_part = of_step < step && in_row < launch.row.divisor;
  const uint32_t first_row = begin + of_step;
  char* const base = p.cache + launch.layers[blockIdx.y] +
                     int64_t{in_row} * static_cast<int64_t>(sizeof(Vector)) +
                     (kDense ? p.place(unit, launch.ids, 0) : 0);
  const auto vector_at = [&](uint32_t row) {
    return reinterpret_cast<Vector*>(
        base + (kDense ? row * p.inner_stride : p.place(unit, launch.ids, row)));
  };
  Vector* const held = reinterpret_cast<Vector*>(shared) + column;
  if (takes_part) {
    if constexpr (has_async_copy<Vector>) {
      if constexpr (kDense) {
#pragma unroll kUnroll
        for (uint32_t row = first_row; row < end; row += step) {
          async_copy(held + (row - begin) * slice, vector_at(row));
        }
      } else {  // loads several rows' ids together
        for (uint32_t at = first_row; at < end; at += step * kUnroll) {
          const Vector* from[kUnroll];
#pragma unroll
          for (int i = 0; i < kUnroll; ++i) from[i] = vector_at(min(at + i * step, end - 1));
#pragma unroll
          for (int i = 0; i < kUnroll; ++i) {
            const uint32_t row = at + i * step;
            if (row < end) async_copy(held + (row - begin) * slice, from[i]);
          }
        }
      }
      async_copy_commit();
      async_copy_wait<0>();
    } else {
      // Unevenly spaced rows need additional registers. With more loads in flight, registers would
      // be spilled on sm_100.
      constexpr int kLoads = kDense ? kUnroll : kUnroll / 2;
      for (uint32_t at = first_row; at < end; at += step * kLoads) {
        Vector moved[kLoads];
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
          const uint32_t row = at + i * step;
          if (row < end) moved[i] = __ldcs(vector_at(row));
        }
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
          const uint32_t row = at + i * step;
          if (row < end) held[row * slice] = moved[i];
        }
      }
    }
  }
  if constexpr (kClustered) {
    cluster_sync();
    if (takes_part) {
      // Loads from another thread block's memory have a high latency, so several are in flight
      // before the first store.
      for (uint32_t at = first_row; at < end; at += step * kClusterUnroll) {
        Vector moved[kClusterUnroll];
#pragma unroll
        for (int i = 0; i < kClusterUnroll; ++i) {
          const uint32_t source = p.source(min(at + i * step, end - 1));
          const uint32_t rank = launch.share.divide(source);
          moved[i] = load_of_cluster(held + (source - rank * launch.share.divisor) * slice, rank);
        }
#pragma unroll
        for (int i = 0; i < kClusterUnroll; ++i) {
          const uint32_t row = at + i * step;
          if (row < end) __stcs(vector_at(row), moved[i]);
        }
      }
    }
    cluster_sync_before_end();
  } else {
    __syncthreads();
    if (!takes_part) return;
#pragma unroll 4
    for (uint32_t row = first_row; row < end; row += step) {
      __stcs(vector_at(row), held[p.source(row) * slice]);
    }
  }
}

// Handles units that do not fit into shared memory even with one vector per row. Runs one thread
// per row and vector. If the row is the smallest in its cycle, the thread moves the vectors along
// the cycle.
template <class Vector>
__global__ void __launch_bounds__(kThreads) rotate_kernel(KV_PARAMETER PermuteLaunch launch) {
  const BlockPermute& p = launch.p;
  uint32_t of_unit;
  const PermuteUnit unit = launch.unit(blockIdx.x, of_unit);
  const uint32_t j = of_unit * kThreads + threadIdx.x;
  if (j >= p.unit_rows * launch.row.divisor) return;
  const uint32_t row = launch.row.divide(j);
  const uint32_t column = j - row * launch.row.divisor;
  if (!p.leads_cycle(row) || launch.skips(unit)) return;
  char* const layer = p.cache + launch.layers[blockIdx.y];
  const auto vector_at = [&](uint32_t r) {
    return reinterpret_cast<Vector*>(layer + p.place(unit, launch.ids, r)) + column;
  };
  const Vector first = __ldcs(vector_at(row));
  uint32_t to = row;
  for (uint32_t from = p.source(row); from != row; from = p.source(to = from)) {
    __stcs(vector_at(to), __ldcs(vector_at(from)));
  }
  __stcs(vector_at(to), first);
}

// Returns the size in bytes of the widest vector that all rows in all layers allow: 16, 8, 4, 2 or
// 1.
int64_t vector_bytes(const BlockPermute& p, const int64_t* layers, int64_t num_layers) {
  uint64_t all =
      reinterpret_cast<uint64_t>(p.cache) |
      static_cast<uint64_t>(p.block_stride | p.outer_stride | p.inner_stride | p.row_bytes);
  for (int64_t i = 0; i < num_layers; ++i) all |= static_cast<uint64_t>(layers[i]);
  return common_vector_bytes(all);
}

int64_t device_attribute(const Tensor& t, cudaDeviceAttr attribute) {
  int value = 0;
  KV_CUDA_CHECK(cudaDeviceGetAttribute(&value, attribute, t.is_cpu() ? 0 : t.get_device_index()));
  return value;
}

int64_t most_shared_bytes(const Tensor& t) {
  return device_attribute(t, cudaDevAttrMaxSharedMemoryPerBlockOptin);
}

// KVCACHE_CLUSTERS=0 disables clusters.
bool has_clusters(const Tensor& t) {
  return switched_on("KVCACHE_CLUSTERS", true) &&
         device_attribute(t, cudaDevAttrClusterLaunch) != 0;
}

// How units are divided into slices.
struct Slicing {
  // Bytes per slice: a power of two, or a whole row. 0 if not even one vector per row fits.
  int64_t bytes;
  int64_t cluster;  // thread blocks that share a slice
  int64_t rows;     // maximum rows per thread block
};

Slicing slicing_of(const BlockPermute& p, int64_t vector, const Tensor& cache) {
  const int64_t rows = p.unit_rows;
  int64_t slice = kLeastSliceBytes;
  const int64_t most = std::min<int64_t>(kSharedBytes / rows, vector * kThreads);
  while (slice < p.row_bytes && 2 * slice <= most) slice *= 2;
  while (slice > vector && slice * rows > kMoreSharedBytes) slice /= 2;
  slice = std::min(slice, p.row_bytes);
  const int64_t wide = std::min(kLineBytes, p.row_bytes);
  if (slice < wide) {
    int64_t cluster = 1;
    const auto share = [&] { return (rows + cluster - 1) / cluster; };
    while (share() * wide > kWideSharedBytes) cluster *= 2;
    const bool fits =
        cluster == 1
            ? 2 * (rows * wide + kReservedSharedBytes) <=
                  device_attribute(cache, cudaDevAttrMaxSharedMemoryPerMultiprocessor)
            : cluster <= kMostClusterBlocks && vector == sizeof(uint4) && has_clusters(cache);
    if (fits) return {wide, cluster, share()};
  }
  const int64_t needed = slice * rows;
  const bool fits = needed <= kPlainSharedBytes || needed <= most_shared_bytes(cache);
  return {fits ? slice : 0, 1, rows};
}

template <auto kKernel>
void allow_shared_bytes(int64_t shared, const Tensor& cache) {
  if (shared <= kPlainSharedBytes) return;
  // Always sets the maximum, because a smaller value could replace a value that another thread has
  // set for a launch that is still to come.
  KV_CUDA_CHECK(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     static_cast<int>(most_shared_bytes(cache))));
}

template <class Vector, bool kDense>
void launch_sliced(const PermuteLaunch& launch, dim3 grid, const Slicing& slicing,
                   const Tensor& cache, cudaStream_t stream) {
  const int64_t shared = slicing.rows * slicing.bytes;
  if constexpr (std::is_same_v<Vector, uint4>) {
    if (slicing.cluster > 1) {
      constexpr auto kKernel = permute_kernel<Vector, kDense, true>;
      allow_shared_bytes<kKernel>(shared, cache);
      KV_LAUNCH_CLUSTERS(kKernel, grid, dim3(kThreads), static_cast<size_t>(shared), stream,
                         static_cast<unsigned>(slicing.cluster), launch);
      return;
    }
  }
  constexpr auto kKernel = permute_kernel<Vector, kDense, false>;
  allow_shared_bytes<kKernel>(shared, cache);
  KV_LAUNCH(kKernel, grid, dim3(kThreads), static_cast<size_t>(shared), stream, launch);
}

template <class Vector>
void launch_on(const PermuteLaunch& launch, dim3 grid, const Slicing& slicing, const Tensor& cache,
               cudaStream_t stream) {
  if (slicing.bytes == 0) {
    KV_LAUNCH(rotate_kernel<Vector>, grid, dim3(kThreads), 0, stream, launch);
  } else if (launch.p.is_dense() && launch.p.unit_rows <= launch.p.block_rows.divisor) {
    launch_sliced<Vector, true>(launch, grid, slicing, cache, stream);
  } else {
    launch_sliced<Vector, false>(launch, grid, slicing, cache, stream);
  }
}

struct BadBlockId {
  const int32_t* ids;
  int64_t num_blocks;
  KV_HOST_DEVICE bool operator()(int64_t i) const {
    if (ids[i] < 0 || ids[i] >= num_blocks) return true;
    for (int64_t j = 0; j < i; ++j) {
      if (ids[j] == ids[i]) return true;
    }
    return false;
  }
};

void permute_blocks_cuda_(Tensor cache, Tensor offsets, Tensor indices, int64_t remote_block_size,
                          bool remote_is_hnd, Owners owners) {
  const BlockPermute p =
      checked_block_permute(cache, offsets, indices, remote_block_size, remote_is_hnd, owners);
  const int32_t* ids = indices.const_data_ptr<int32_t>();
  const bool host_ids = ids_on_host(indices);
  if (host_ids) {
    check_block_ids(ids, indices.numel(), p.num_blocks);
    if (p.group_size > kIdsPerLaunch) {
      fail("remote_block_size is " + std::to_string(remote_block_size) + ", " +
           std::to_string(p.group_size) + " local blocks: expected at most " +
           std::to_string(kIdsPerLaunch) + " where indices is on the cpu");
    }
  }
  if (p.num_groups == 0) return;
  const OnDevice device(cache);
  if (!host_ids && checked_mode()) {
    const BadBlockId bad{ids, p.num_blocks};
    const int64_t i = first_bad_on_device(bad, indices.numel(), device.stream);
    if (i >= 0) fail_block_id(i, fetch(ids + i, device.stream), p.num_blocks);
  }
  if (p.is_identity() || p.row_bytes == 0) return;

  const int64_t* layers = offsets.const_data_ptr<int64_t>();
  const int64_t num_layers = offsets.numel();
  const int64_t vector = vector_bytes(p, layers, num_layers);
  const Slicing slicing = slicing_of(p, vector, cache);
  const int64_t slice = slicing.bytes;
  const int64_t unit_blocks = slice > 0 ? (p.row_bytes + slice - 1) / slice * slicing.cluster
                                        : (p.unit_bytes() / vector + kThreads - 1) / kThreads;
  PermuteLaunch launch{};
  launch.p = p;
  launch.units_per_group = fast_divisor(p.units_per_group);
  launch.unit_blocks = fast_divisor(unit_blocks);
  launch.slice = fast_divisor(std::max<int64_t>(slice / vector, 1));
  launch.cluster = fast_divisor(slicing.cluster);
  launch.share = fast_divisor(slicing.rows);
  launch.rows_at_once = kThreads / launch.slice.divisor;
  launch.row = fast_divisor(p.row_bytes / vector);
  const int64_t most_groups = std::min(kMaxGrid / (p.units_per_group * unit_blocks),
                                       host_ids ? kIdsPerLaunch / p.group_size : kMaxGrid);
  for (int64_t layer = 0; layer < num_layers; layer += kLayersPerLaunch) {
    const int64_t layers_now = std::min<int64_t>(num_layers - layer, kLayersPerLaunch);
    std::copy_n(layers + layer, layers_now, launch.layers);
    for (int64_t group = 0; group < p.num_groups; group += most_groups) {
      const int64_t groups_now = std::min(p.num_groups - group, most_groups);
      launch.ids =
          launch_ids<kIdsPerLaunch>(ids, host_ids, group * p.group_size, groups_now * p.group_size);
      const dim3 grid(static_cast<unsigned>(groups_now * p.units_per_group * unit_blocks),
                      static_cast<unsigned>(layers_now));
      with_vector(vector, [&](auto v) {
        launch_on<decltype(v)>(launch, grid, slicing, cache, device.stream);
      });
    }
  }
}

}  // namespace

KV_REGISTER_CUDA("permute_blocks_", permute_blocks_cuda_)

}  // namespace kvcache
