// SPDX-License-Identifier: Apache-2.0
#include "ops/block_copy.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <cstring>

#include "ops/parallel.h"
#include "ops/stream_copy.h"

namespace kvcache {
namespace {

// The minimum number of bytes per thread, below which an additional thread does not pay off.
constexpr int64_t kCopyGrainBytes = int64_t{1} << 19;
constexpr int64_t kRunBytes = int64_t{4} << 20;  // longer runs are divided among threads

// Copies one run in one region: in a single copy if its pages are contiguous, otherwise page by
// page.
template <bool streamed>
void copy_run(const BlockCopy& c, const CopyRegion& r, const CopyRun& run) {
  const bool dense = run.source == kCleared ? r.destination_stride == r.num_bytes : r.is_dense();
  const int64_t num_copies = dense ? 1 : run.num_pages;
  const int64_t bytes = dense ? run.num_pages * r.num_bytes : r.num_bytes;
  for (int64_t i = 0; i < num_copies; ++i) {
    char* to = c.to(r, run.destination + i);
    if (run.source == kCleared) {
      std::memset(to, 0, static_cast<size_t>(bytes));
    } else if (streamed) {
      stream_copy(to, c.from(r, run.source + i), bytes);
    } else {
      std::memcpy(to, c.from(r, run.source + i), static_cast<size_t>(bytes));
    }
  }
}

void copy_blocks(std::optional<Tensor> src, Tensor dst, Tensor regions, Tensor pairs,
                 int64_t num_src_blocks, int64_t num_dst_blocks, int64_t engine,
                 int64_t pages_per_run, int64_t num_thread_blocks, Owners owners) {
  const BlockCopy c =
      checked_block_copy(src, dst, regions, pairs, num_src_blocks, num_dst_blocks, engine,
                         pages_per_run, num_thread_blocks, pairs.is_cpu(), owners);
  const int64_t page_bytes = c.page_bytes();
  if (c.num_pairs == 0 || page_bytes == 0) return;
  int64_t largest = 1;
  for (int64_t r = 0; r < c.num_regions; ++r) largest = std::max(largest, c.regions[r].num_bytes);
  const std::vector<CopyRun> runs = runs_of(c, std::max<int64_t>(kRunBytes / largest, 1));
  const auto num_runs = static_cast<int64_t>(runs.size());
  const int64_t total = c.num_pairs * page_bytes;
  const int64_t num_tasks = num_runs * c.num_regions;
  const int64_t grain =
      std::max<int64_t>(kCopyGrainBytes / std::max<int64_t>(total / num_tasks, 1), 1);
  const bool streamed = total >= kStreamedBytes;
  // Tasks are ordered by region, so that each thread works on contiguous memory.
  parallel_for(0, num_tasks, grain, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const CopyRegion& r = c.regions[task / num_runs];
      const CopyRun& run = runs[static_cast<size_t>(task % num_runs)];
      streamed ? copy_run<true>(c, r, run) : copy_run<false>(c, r, run);
    }
    if (streamed) stream_done();
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(kvcache, CPU, m) { m.impl("copy_blocks", TORCH_BOX(&copy_blocks)); }

}  // namespace kvcache
