#include "ops/table_update.h"

#include "ops/device.h"

namespace kvcache {
namespace {

constexpr unsigned kWarps = 8;  // per thread block
constexpr unsigned kUpdateBlocks = 64;
constexpr unsigned kGatherThreads = 128;

// One warp per segment, in turns: the grid does not depend on their number, which the kernel reads,
// so that a captured graph serves every step.
__global__ void update_kernel(const TableUpdate u) {
  if (u.bad_count()) return;  // see checked_mode
  const unsigned lane = threadIdx.x % 32;
  const int64_t first = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  for (int64_t s = first; s < u.num_segments(); s += int64_t{gridDim.x} * kWarps) {
    if (u.bad_segment(s)) continue;
    const int32_t* place = u.segment(s);
    for (int32_t i = static_cast<int32_t>(lane); i < place[1]; i += 32) {
      u.tables[int64_t{place[0]} + i] = u.updates[int64_t{place[2]} + i];
    }
  }
}

// One thread block per output row (x) and group (y).
__global__ void gather_kernel(const TableGather m) {
  const int64_t i = blockIdx.x;
  const int g = static_cast<int>(blockIdx.y);
  const int64_t columns = m.num_columns(g);
  int32_t* row = m.out_row(g, i);
  for (int64_t c = threadIdx.x; c < columns; c += blockDim.x) row[c] = m.id(g, i, c);
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
  KV_LAUNCH(update_kernel, dim3(kUpdateBlocks), dim3(kWarps * 32), 0, device.stream, u);
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
  KV_LAUNCH(gather_kernel, grid, dim3(kGatherThreads), 0, device.stream, m);
}

}  // namespace

KV_REGISTER_CUDA("update_block_tables", update_block_tables_cuda)
KV_REGISTER_CUDA("gather_block_tables", gather_block_tables_cuda)

}  // namespace kvcache
