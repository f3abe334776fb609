#include "ops/slot_mapping.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>

namespace kvcache {
namespace {

constexpr int64_t kGrain = 16384;  // tokens per thread: below it a second thread costs more

void slot_mapping(Tensor block_table, Tensor row_indices, Tensor positions, int64_t block_size,
                  Tensor out) {
  const SlotMapping m = checked_slot_mapping(block_table, row_indices, positions, block_size, out);
  // All of them before the first write; also before parallel_for, which would lose the message.
  for (int64_t i = 0; i < m.num_tokens; ++i) {
    if (m(i)) fail_slot_mapping(m, i, m.row_indices[i], m.positions[i]);
  }
  torch::stable::parallel_for(0, m.num_tokens, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) m.out[i] = m.slot(i);
  });
  std::fill(m.out + m.num_tokens, m.out + m.num_out, kNoSlot);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(kvcache, CPU, m) { m.impl("slot_mapping", TORCH_BOX(&slot_mapping)); }

}  // namespace kvcache
