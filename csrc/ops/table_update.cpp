// SPDX-License-Identifier: Apache-2.0
#include "ops/table_update.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstring>

namespace kvcache {
namespace {

void update_block_tables(Tensor tables, Tensor updates) {
  const TableUpdate u = checked_table_update(tables, updates);
  if (u.bad_count()) fail_table_update(u, -1);
  for (int64_t s = 0; s < u.num_segments(); ++s) {
    if (u.bad_segment(s)) fail_table_update(u, s);
  }
  for (int64_t s = 0; s < u.num_segments(); ++s) {
    const int32_t* place = u.segment(s);
    std::memcpy(u.tables + place[0], u.updates + place[2],
                static_cast<size_t>(place[1]) * sizeof(int32_t));
  }
}

void gather_block_tables(Tensor tables, Tensor groups, int64_t num_rows, Tensor idx_mapping,
                         std::optional<Tensor> num_computed_tokens, int64_t max_num_tokens,
                         Tensor out) {
  const TableGather m = checked_table_gather(tables, groups, num_rows, idx_mapping,
                                             num_computed_tokens, max_num_tokens, out);
  const BadIndex bad{m.idx_mapping, m.groups.num_rows};
  for (int64_t i = 0; i < m.num_out_rows; ++i) {
    if (bad(i)) fail_index(i, m.idx_mapping[i], m.groups.num_rows);
  }
  for (int g = 0; g < m.groups.num_groups; ++g) {
    for (int64_t i = 0; i < m.num_out_rows; ++i) {
      const GatheredRow row = m.row(g, i);
      std::fill_n(row.to, row.hidden, 0);
      std::copy(row.from + row.hidden, row.from + row.columns, row.to + row.hidden);
    }
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(kvcache, CPU, m) {
  m.impl("update_block_tables", TORCH_BOX(&update_block_tables));
  m.impl("gather_block_tables", TORCH_BOX(&gather_block_tables));
}

}  // namespace kvcache
