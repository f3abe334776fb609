#include "ops/block_permute.h"

#include "ops/async_copy.h"
#include "ops/device.h"
#include "ops/launch_ids.h"
#include "ops/vector.h"

namespace kvcache {
namespace {

constexpr unsigned kThreads = 256;
constexpr int kUnroll = 8;                       // loads in flight per thread
constexpr int64_t kSharedBytes = 32 << 10;       // per thread block, where the slice is wide enough
constexpr int64_t kMoreSharedBytes = 96 << 10;   // where slices would be below kLeastSliceBytes
constexpr int64_t kLeastSliceBytes = 64;         // one memory transaction
constexpr int64_t kPlainSharedBytes = 48 << 10;  // a kernel must ask for more

constexpr int64_t kMaxGrid = INT32_MAX;
constexpr int kLayersPerLaunch = 64;
constexpr int kIdsPerLaunch = 812;

// The parameters of one launch: some groups, in some layers.
struct PermuteLaunch {
  BlockPermute p;
  FastDivisor units_per_group;
  FastDivisor unit_blocks;  // thread blocks of a unit
  FastDivisor slice;        // vectors of a slice; the last one of a row may have fewer
  FastDivisor row;          // vectors of a row
  uint32_t rows_at_once;    // rows that the threads of a block move together
  int64_t layers[kLayersPerLaunch];
  LaunchIds<kIdsPerLaunch> ids;

  // The unit that this thread block works on, and the index of the block within the unit.
  KV_HOST_DEVICE PermuteUnit unit(uint32_t block, uint32_t& of_unit) const {
    const uint32_t u = unit_blocks.divide(block);
    of_unit = block - u * unit_blocks.divisor;
    const uint32_t group = units_per_group.divide(u);
    return p.unit(group, u - group * units_per_group.divisor);
  }

  // Whether the group of this unit names a block out of range. Such a unit is skipped, see
  // checked_mode.
  KV_HOST_DEVICE bool skips(const PermuteUnit& unit) const {
    if (ids.on_device == nullptr) return false;  // the host has checked them
    for (int32_t i = 0; i < p.group_size; ++i) {
      const int32_t id = ids[unit.first_id + i];
      if (id < 0 || id >= p.num_blocks) return true;
    }
    return false;
  }
};
static_assert(sizeof(PermuteLaunch) <= kSmallParameterBytes, "too many ids in a launch");

// One thread block per unit and slice of its rows (x) and per layer (y). It reads the whole slice
// into shared memory and writes it back permuted. A thread keeps its column, so neighbouring
// threads read and write neighbouring bytes of a row. kDense: all rows are evenly spaced.
//
// All reads of a thread are in flight together where the hardware copies asynchronously, else
// kUnroll at a time.
template <class Vector, bool kDense>
__global__ void __launch_bounds__(kThreads) permute_kernel(KV_PARAMETER PermuteLaunch launch) {
  KV_DYN_SHARED(uint4, shared);
  const BlockPermute& p = launch.p;
  const uint32_t slice = launch.slice.divisor;
  uint32_t of_unit;
  const PermuteUnit unit = launch.unit(blockIdx.x, of_unit);
  if (launch.skips(unit)) return;
  const uint32_t first_row = launch.slice.divide(threadIdx.x);
  const uint32_t column = threadIdx.x - first_row * slice;
  const uint32_t in_row = of_unit * slice + column;
  const uint32_t step = launch.rows_at_once;
  const bool takes_part = first_row < step && in_row < launch.row.divisor;
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
        for (uint32_t row = first_row; row < p.unit_rows; row += step) {
          async_copy(held + row * slice, vector_at(row));
        }
      } else {  // the ids of several rows are read together
        for (uint32_t begin = first_row; begin < p.unit_rows; begin += step * kUnroll) {
          const Vector* from[kUnroll];
#pragma unroll
          for (int i = 0; i < kUnroll; ++i)
            from[i] = vector_at(min(begin + i * step, p.unit_rows - 1));
#pragma unroll
          for (int i = 0; i < kUnroll; ++i) {
            const uint32_t row = begin + i * step;
            if (row < p.unit_rows) async_copy(held + row * slice, from[i]);
          }
        }
      }
      async_copy_commit();
      async_copy_wait<0>();
    } else {
      for (uint32_t begin = first_row; begin < p.unit_rows; begin += step * kUnroll) {
        Vector moved[kUnroll];
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) {
          const uint32_t row = begin + i * step;
          if (row < p.unit_rows) moved[i] = __ldcs(vector_at(row));
        }
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) {
          const uint32_t row = begin + i * step;
          if (row < p.unit_rows) held[row * slice] = moved[i];
        }
      }
    }
  }
  __syncthreads();
  if (!takes_part) return;
#pragma unroll 4
  for (uint32_t row = first_row; row < p.unit_rows; row += step) {
    __stcs(vector_at(row), held[p.source(row) * slice]);
  }
}

// For units of which not even one vector of every row fits into shared memory: one thread per row
// and vector. A thread whose row is the smallest of its cycle moves the vectors along that cycle.
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

// The widest vector, in bytes, that every row of every layer allows: 16, 8, 4, 2 or 1.
int64_t vector_bytes(const BlockPermute& p, const int64_t* layers, int64_t num_layers) {
  uint64_t all =
      reinterpret_cast<uint64_t>(p.cache) |
      static_cast<uint64_t>(p.block_stride | p.outer_stride | p.inner_stride | p.row_bytes);
  for (int64_t i = 0; i < num_layers; ++i) all |= static_cast<uint64_t>(layers[i]);
  return common_vector_bytes(all);
}

int64_t most_shared_bytes(const Tensor& t) {
  int bytes = 0;
  KV_CUDA_CHECK(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin,
                                       t.is_cpu() ? 0 : t.get_device_index()));
  return bytes;
}

// Bytes of a slice, a power of two or a whole row; 0 where no vector of every row fits.
int64_t slice_bytes(const BlockPermute& p, int64_t vector, const Tensor& cache) {
  int64_t slice = kLeastSliceBytes;
  const int64_t most = std::min<int64_t>(kSharedBytes / p.unit_rows, vector * kThreads);
  while (slice < p.row_bytes && 2 * slice <= most) slice *= 2;
  while (slice > vector && slice * p.unit_rows > kMoreSharedBytes) slice /= 2;
  slice = std::min(slice, p.row_bytes);
  const int64_t needed = slice * p.unit_rows;
  return needed <= kPlainSharedBytes || needed <= most_shared_bytes(cache) ? slice : 0;
}

template <class Vector, bool kDense>
void launch_sliced(const PermuteLaunch& launch, dim3 grid, int64_t slice, const Tensor& cache,
                   cudaStream_t stream) {
  const int64_t shared = launch.p.unit_rows * slice;
  if (shared > kPlainSharedBytes) {
    // Always the maximum: another thread may be between this call and its own launch.
    KV_CUDA_CHECK(cudaFuncSetAttribute(permute_kernel<Vector, kDense>,
                                       cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       static_cast<int>(most_shared_bytes(cache))));
  }
  KV_LAUNCH((permute_kernel<Vector, kDense>), grid, dim3(kThreads), static_cast<size_t>(shared),
            stream, launch);
}

template <class Vector>
void launch_on(const PermuteLaunch& launch, dim3 grid, int64_t slice, const Tensor& cache,
               cudaStream_t stream) {
  if (slice == 0) {
    KV_LAUNCH(rotate_kernel<Vector>, grid, dim3(kThreads), 0, stream, launch);
  } else if (launch.p.is_dense() && launch.p.unit_rows <= launch.p.block_rows.divisor) {
    launch_sliced<Vector, true>(launch, grid, slice, cache, stream);
  } else {
    launch_sliced<Vector, false>(launch, grid, slice, cache, stream);
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
  const int64_t slice = slice_bytes(p, vector, cache);
  const int64_t unit_blocks = slice > 0 ? (p.row_bytes + slice - 1) / slice
                                        : (p.unit_bytes() / vector + kThreads - 1) / kThreads;
  PermuteLaunch launch{};
  launch.p = p;
  launch.units_per_group = fast_divisor(p.units_per_group);
  launch.unit_blocks = fast_divisor(unit_blocks);
  launch.slice = fast_divisor(std::max<int64_t>(slice / vector, 1));
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
        launch_on<decltype(v)>(launch, grid, slice, cache, device.stream);
      });
    }
  }
}

}  // namespace

KV_REGISTER_CUDA("permute_blocks_", permute_blocks_cuda_)

}  // namespace kvcache
