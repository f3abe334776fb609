#include "ops/slot_mapping.h"

#include "ops/device.h"

namespace kvcache {
namespace {

constexpr unsigned kThreads = 256;

// One thread per entry of `out`: tokens first, then the tail behind them.
__global__ void slot_mapping_kernel(SlotMapping m) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= m.num_out) return;
  m.out[i] = i < m.num_tokens && m(i) ? kNoSlot : m.slot(i);
}

void slot_mapping_cuda(Tensor block_table, Tensor row_indices, Tensor positions, int64_t block_size,
                       Tensor out) {
  const SlotMapping m = checked_slot_mapping(block_table, row_indices, positions, block_size, out);
  if (m.num_out == 0) return;
  const OnDevice device(out);
  if (checked_mode()) {
    const int64_t i = first_bad_on_device(m, m.num_tokens, device.stream);
    if (i >= 0) {
      fail_slot_mapping(m, i, fetch(m.row_indices + i, device.stream),
                        fetch(m.positions + i, device.stream));
    }
  }
  KV_LAUNCH(slot_mapping_kernel, dim3(unsigned((m.num_out + kThreads - 1) / kThreads)),
            dim3(kThreads), 0, device.stream, m);
}

}  // namespace

KV_REGISTER_CUDA("slot_mapping", slot_mapping_cuda)

}  // namespace kvcache
