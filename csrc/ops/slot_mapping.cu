#include "ops/slot_mapping.h"

#include "ops/device.h"

namespace kvcache {
namespace {

constexpr unsigned kThreads = 256;

// One thread per output entry of a group (y): first the tokens, then the entries after the last
// token. Parallel over tokens, so that long and short requests are equal.
template <class Slot>
__global__ void slot_mapping_kernel(const SlotMapping m) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= m.num_out) return;
  const int g = static_cast<int>(blockIdx.y);
  const int32_t row = m.row_of(i);
  // Only this group's length of the row counts: other groups may hold a block for the position.
  const bool none = row < 0 || m.bad_row(row) || m.outside(i) ||
                    (m.counts != nullptr && m.positions[i] >= m.num_held(g, row));
  static_cast<Slot*>(m.out)[g * m.num_out + i] =
      static_cast<Slot>(none ? kNoSlot : m.slot(g, row, i));
}

void check_values(const SlotMapping& m, cudaStream_t stream) {
  if (m.query_start != nullptr) {
    const BadQueryStart bad{m.query_start, m.num_tokens};
    const int64_t r = first_bad_on_device(bad, m.num_requests + 1, stream);
    if (r >= 0) fail_query_start(r, m.num_tokens);
  }
  const int64_t i = first_bad_on_device(m, m.num_tokens, stream);
  if (i < 0) return;
  int64_t at = i;
  if (m.query_start != nullptr) {
    at = 0;  // finds the request of token i again, on the host
    while (at + 1 < m.num_requests && fetch(m.query_start + at + 1, stream) <= i) ++at;
  }
  fail_slot_mapping(m, i, fetch(m.rows + at, stream), fetch(m.positions + i, stream));
}

void slot_mapping_cuda(Tensor tables, Tensor groups, int64_t num_rows, Tensor rows,
                       std::optional<Tensor> query_start_loc, Tensor positions,
                       std::optional<Tensor> num_blocks_per_row, Tensor out) {
  const SlotMapping m = checked_slot_mapping(tables, groups, num_rows, rows, query_start_loc,
                                             positions, num_blocks_per_row, out);
  if (m.num_out == 0 || m.groups.num_groups == 0) return;
  const OnDevice device(out);
  if (checked_mode()) check_values(m, device.stream);
  const dim3 grid(static_cast<unsigned>((m.num_out + kThreads - 1) / kThreads),
                  static_cast<unsigned>(m.groups.num_groups));
  if (m.wide) {
    KV_LAUNCH(slot_mapping_kernel<int64_t>, grid, dim3(kThreads), 0, device.stream, m);
  } else {
    KV_LAUNCH(slot_mapping_kernel<int32_t>, grid, dim3(kThreads), 0, device.stream, m);
  }
}

}  // namespace

KV_REGISTER_CUDA("slot_mapping", slot_mapping_cuda)

}  // namespace kvcache
