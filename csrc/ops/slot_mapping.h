// SPDX-License-Identifier: Apache-2.0
// Computes the slot of each token's KV in the paged cache, for all groups in one call.
//
// Rows are given per token, or per request together with the start index of each request's tokens.
// Row -1 denotes a dummy request. Slot -1, which every reader and writer skips, is assigned to
// tokens in dummy requests, tokens on another context-parallel rank, and entries after the last
// token.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cstdint>
#include <optional>
#include <string>

#include "ops/table_groups.h"
#include "worker/map_slots.h"

namespace kvcache {

inline SlotMapping checked_slot_mapping(const Tensor& tables, const Tensor& groups,
                                        int64_t num_rows, const Tensor& rows,
                                        const std::optional<Tensor>& query_start_loc,
                                        const Tensor& positions,
                                        const std::optional<Tensor>& num_blocks_per_row,
                                        const Tensor& out) {
  SlotMapping m{};
  m.groups = checked_groups(groups, tables, num_rows);
  check_dim(rows, "rows", 1, query_start_loc ? "[num_requests]" : "[num_tokens]");
  check_dtype(rows, "rows", {ScalarType::Int});
  check_contiguous(rows, "rows");
  check_same_device(rows, "rows", tables, "tables");
  check_dim(positions, "positions", 1, "[num_tokens]");
  check_dtype(positions, "positions", {ScalarType::Long});
  check_contiguous(positions, "positions");
  check_same_device(positions, "positions", tables, "tables");
  check_dim(out, "out", 2, "[num_groups, at least num_tokens]");
  check_dtype(out, "out", {ScalarType::Long, ScalarType::Int});
  check_contiguous(out, "out");
  check_same_device(out, "out", tables, "tables");
  check_size(out, "out", 0, groups.size(0), "one row per group");
  if (out.size(1) < positions.size(0)) {
    fail("out has shape " + shape_of(out) + ": expected at least " +
         std::to_string(positions.size(0)) + " entries per group, one per position");
  }
  if (query_start_loc) {
    const Tensor& start = *query_start_loc;
    check_dim(start, "query_start_loc", 1, "[num_requests + 1]");
    check_dtype(start, "query_start_loc", {ScalarType::Int});
    check_contiguous(start, "query_start_loc");
    check_same_device(start, "query_start_loc", tables, "tables");
    check_size(start, "query_start_loc", 0, rows.size(0) + 1, "one more than rows has");
    m.query_start = start.const_data_ptr<int32_t>();
    m.num_requests = rows.size(0);
  } else {
    check_size(rows, "rows", 0, positions.size(0), "as positions has");
  }
  if (num_blocks_per_row) {
    check_counts(*num_blocks_per_row, m.groups, tables);
    m.counts = num_blocks_per_row->const_data_ptr<int32_t>();
  }
  check_disjoint({{"out", out}}, {{"tables", tables},
                                  {"rows", rows},
                                  {"query_start_loc", query_start_loc},
                                  {"positions", positions},
                                  {"num_blocks_per_row", num_blocks_per_row}});
  m.tables = tables.const_data_ptr<int32_t>();
  m.rows = rows.const_data_ptr<int32_t>();
  m.positions = positions.const_data_ptr<int64_t>();
  m.num_tokens = positions.size(0);
  m.num_out = out.size(1);
  m.wide = out.scalar_type() == ScalarType::Long;
  m.out = out.mutable_data_ptr();
  return m;
}

// Throws the error for token i. The row and the position are passed as arguments, because the
// arrays may be on a device.
[[noreturn]] inline void fail_slot_mapping(const SlotMapping& m, int64_t i, int32_t row,
                                           int64_t position) {
  fail(wrong_token(m, i, row, position));
}

[[noreturn]] inline void fail_query_start(int64_t r, int64_t num_tokens) {
  fail(wrong_query_start(r, num_tokens));
}

}  // namespace kvcache
