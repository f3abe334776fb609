// SPDX-License-Identifier: Apache-2.0
#include "ops/slot_mapping.h"

#include <torch/csrc/stable/library.h>

namespace kvcache {
namespace {

void slot_mapping(Tensor tables, Tensor groups, int64_t num_rows, Tensor rows,
                  std::optional<Tensor> query_start_loc, Tensor positions,
                  std::optional<Tensor> num_blocks_per_row, Tensor out) {
  const SlotMapping m = checked_slot_mapping(tables, groups, num_rows, rows, query_start_loc,
                                             positions, num_blocks_per_row, out);
  if (const auto wrong = map_slots(m)) fail(*wrong);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(kvcache, CPU, m) { m.impl("slot_mapping", TORCH_BOX(&slot_mapping)); }

}  // namespace kvcache
