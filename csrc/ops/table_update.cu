// SPDX-License-Identifier: Apache-2.0
#include "ops/table_update.h"

#include "ops/dependent_launch.h"
#include "ops/device.h"
#include "ops/launch_ids.h"

namespace kvcache {
namespace {

constexpr unsigned kFullWarp = 0xFFFFFFFFu;
constexpr unsigned kWarps = 8;  // per thread block
constexpr unsigned kUpdateBlocks = 64;
constexpr int32_t kShort = 4;  // maximum length of segments that one lane writes
constexpr unsigned kGatherThreads = 128;

// Copies ids with a whole warp, issuing several loads before the first store.
__device__ __forceinline__ void copy_by_warp(int32_t* to, const int32_t* from, int32_t length,
                                             int32_t lane) {
  constexpr int32_t kLoads = 4;
  for (int32_t first = lane; first < length; first += 32 * kLoads) {
    int32_t ids[kLoads];
#pragma unroll
    for (int32_t u = 0; u < kLoads; ++u) {
      if (first + 32 * u < length) ids[u] = from[first + 32 * u];
    }
#pragma unroll
    for (int32_t u = 0; u < kLoads; ++u) {
      if (first + 32 * u < length) to[first + 32 * u] = ids[u];
    }
  }
}

// The kernel itself reads the number of segments, and the grid size does not depend on that number,
// so a captured graph serves every step. The segments are divided equally among all warps. Each
// warp processes up to 32 segments at once, one per lane. A single lane writes a short segment (a
// decode step appends one id to a row). The whole warp writes long segments, one after another.
__global__ void __launch_bounds__(kWarps * 32) update_kernel(const TableUpdate u) {
  begin_after_previous_kernel();
  if (u.bad_count()) return;  // see checked_mode
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  const int32_t warp = static_cast<int32_t>(blockIdx.x * kWarps + threadIdx.x / 32);
  const auto num_warps = static_cast<int32_t>(gridDim.x * kWarps);
  const auto num_segments = static_cast<int32_t>(u.num_segments());
  const int32_t share = num_segments / num_warps + (num_segments % num_warps != 0);
  const int32_t at_once = share < 32 ? share : 32;
  for (int64_t first = int64_t{warp} * at_once; first < num_segments;
       first += int64_t{num_warps} * at_once) {
    const int64_t s = first + lane;
    int32_t to = 0, length = 0, from = 0;
    if (lane < at_once && s < num_segments && !u.bad_segment(s)) {
      const int32_t* place = u.segment(s);
      to = place[0];
      length = place[1];
      from = place[2];
    }
    if (length <= kShort) {
#pragma unroll
      for (int32_t i = 0; i < kShort; ++i) {
        if (i < length) u.tables[int64_t{to} + i] = u.updates[int64_t{from} + i];
      }
    }
    unsigned long_ones = __ballot_sync(kFullWarp, length > kShort);
    while (long_ones != 0) {
      const int owner = __ffs(static_cast<int>(long_ones)) - 1;
      long_ones &= long_ones - 1;
      const int32_t its_to = __shfl_sync(kFullWarp, to, owner);
      const int32_t its_length = __shfl_sync(kFullWarp, length, owner);
      const int32_t its_from = __shfl_sync(kFullWarp, from, owner);
      copy_by_warp(u.tables + its_to, u.updates + its_from, its_length, lane);
    }
  }
}

// Returns four ids in the output row, starting at column c.
__device__ __forceinline__ int4 shown(const GatheredRow& row, int32_t c) {
  if (c + 3 < row.hidden) return int4{0, 0, 0, 0};
  int4 ids = *reinterpret_cast<const int4*>(row.from + c);
  if (c < row.hidden) ids.x = 0;
  if (c + 1 < row.hidden) ids.y = 0;
  if (c + 2 < row.hidden) ids.z = 0;
  return ids;
}

// Runs one thread block per output row (x) and group (y). Copies four ids at a time if both rows
// are aligned to 16 bytes, either at their starts or after an equal number of leading ids.
__global__ void __launch_bounds__(kGatherThreads) gather_kernel(KV_PARAMETER TableGather m) {
  begin_after_previous_kernel();
  const GatheredRow row = m.row(static_cast<int>(blockIdx.y), blockIdx.x);
  const auto misalignment = [](const int32_t* p) {
    return static_cast<int32_t>(reinterpret_cast<uintptr_t>(p) / sizeof(int32_t) % 4);
  };
  const auto thread = static_cast<int32_t>(threadIdx.x);
  // The number of ids before the first vector, and the number of vectors, each of four ids.
  int32_t head = row.columns, vectors = 0;
  if (misalignment(row.to) == misalignment(row.from)) {
    head = min((4 - misalignment(row.to)) % 4, row.columns);
    vectors = (row.columns - head) / 4;
  }
  for (int32_t v = thread; v < vectors; v += kGatherThreads) {
    *reinterpret_cast<int4*>(row.to + head + 4 * v) = shown(row, head + 4 * v);
  }
  const int32_t singles = row.columns - 4 * vectors;
  for (int32_t n = thread; n < singles; n += kGatherThreads) {
    const int32_t c = n < head ? n : n + 4 * vectors;
    row.to[c] = c < row.hidden ? 0 : row.from[c];
  }
}

struct BadSegment {
  TableUpdate update;
  KV_HOST_DEVICE bool operator()(int64_t s) const { return update.bad_segment(s); }
};

void update_block_tables_cuda(Tensor tables, Tensor updates) {
  const TableUpdate u = checked_table_update(tables, updates);
  const OnDevice device(tables);
  if (checked_mode()) {
    const int64_t count = fetch(u.updates, device.stream);
    if (count < 0 || 1 + 3 * count > u.num_updates) fail_table_update(u, -1);
    const int64_t s = first_bad_on_device(BadSegment{u}, count, device.stream);
    if (s >= 0) fail_table_update(u, s);
  }
  KV_LAUNCH_DEPENDENT(update_kernel, dim3(kUpdateBlocks), dim3(kWarps * 32), device, u);
}

void gather_block_tables_cuda(Tensor tables, Tensor groups, int64_t num_rows, Tensor idx_mapping,
                              std::optional<Tensor> num_computed_tokens, int64_t max_num_tokens,
                              Tensor out) {
  const TableGather m = checked_table_gather(tables, groups, num_rows, idx_mapping,
                                             num_computed_tokens, max_num_tokens, out);
  if (m.num_out_rows == 0 || m.groups.num_groups == 0) return;
  const OnDevice device(out);
  if (checked_mode()) {
    const BadIndex bad{m.idx_mapping, m.groups.num_rows};
    const int64_t i = first_bad_on_device(bad, m.num_out_rows, device.stream);
    if (i >= 0) fail_index(i, fetch(m.idx_mapping + i, device.stream), m.groups.num_rows);
  }
  const dim3 grid(static_cast<unsigned>(m.num_out_rows),
                  static_cast<unsigned>(m.groups.num_groups));
  KV_LAUNCH_DEPENDENT(gather_kernel, grid, dim3(kGatherThreads), device, m);
}

}  // namespace

KV_REGISTER_CUDA("update_block_tables", update_block_tables_cuda)
KV_REGISTER_CUDA("gather_block_tables", gather_block_tables_cuda)

}  // namespace kvcache
