// Slot mapping: the slot of each token's KV in the paged cache, for all groups in one call.
//
// The row of a token is given per token, or per request with the index where each request's tokens
// begin. Row -1 is a dummy request. Tokens of dummy requests, tokens that another context-parallel
// rank holds, and entries after the last token get slot -1, which every reader and writer skips.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cstdint>
#include <optional>
#include <string>

#include "ops/table_groups.h"

namespace kvcache {

inline constexpr int64_t kNoSlot = -1;

// The checked arguments of one call, as plain data that is passed to a kernel.
struct SlotMapping {
  TableGroups groups;
  const int32_t* tables;
  const int32_t* rows;         // [num_tokens], or [num_requests] with query_start_loc
  const int32_t* query_start;  // [num_requests + 1], or null
  int64_t num_requests;
  const int64_t* positions;  // [num_tokens]
  const int32_t* counts;     // [any, num_rows] entries that each row holds, or null
  int64_t num_tokens;
  int64_t num_out;  // entries per group, num_out >= num_tokens
  bool wide;        // out is int64, else int32
  void* out;        // [num_groups, num_out]

  // The request that token i belongs to: the last that starts at or before i. -1 after the last
  // request.
  KV_HOST_DEVICE int64_t request_of(int64_t i) const {
    if (num_requests == 0 || i < query_start[0] || i >= query_start[num_requests]) return -1;
    int64_t low = 0, high = num_requests;
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (query_start[middle] <= i ? low : high) = middle;
    }
    return low;
  }
  KV_HOST_DEVICE int32_t row_of(int64_t i) const {
    if (i >= num_tokens) return -1;
    if (query_start == nullptr) return rows[i];
    const int64_t request = request_of(i);
    return request < 0 ? -1 : rows[request];
  }
  KV_HOST_DEVICE bool bad_row(int32_t row) const { return row < -1 || row >= groups.num_rows; }
  // Whether no row has a column for position i.
  KV_HOST_DEVICE bool outside(int64_t i) const {
    return positions[i] < 0 || positions[i] >= groups.num_positions;
  }
  KV_HOST_DEVICE bool bad_position(int32_t row, int64_t i) const {
    return row >= 0 && (outside(i) || (counts != nullptr && group_without(row, positions[i]) >= 0));
  }
  // The first group in which the row holds no entry for this position, or -1.
  KV_HOST_DEVICE int group_without(int32_t row, int64_t position) const {
    for (int g = 0; g < groups.num_groups; ++g) {
      if (position >= num_held(g, row)) return g;
    }
    return -1;
  }
  // Positions that the entries of a row cover.
  KV_HOST_DEVICE int64_t num_held(int g, int32_t row) const {
    const TableGroupView& group = groups.group[g];
    return int64_t{counts[int64_t{group.counts_row} * groups.num_rows + row]} *
           group.by_column.divisor;
  }
  // Whether token i cannot be served; reads nothing beyond its own entries.
  KV_HOST_DEVICE bool operator()(int64_t i) const {
    const int32_t row = row_of(i);
    return bad_row(row) || bad_position(row, i);
  }
  // The slot of token i in group g. Its row and position are valid.
  KV_HOST_DEVICE int64_t slot(int g, int32_t row, int64_t i) const {
    const TableGroupView& group = groups.group[g];
    const int32_t* ids = tables + group.offset + int64_t{row} * group.num_columns;
    return group.slot(ids, static_cast<uint32_t>(positions[i]));
  }
};

// Finds an entry r of query_start_loc that is below the one before it, or beyond the tokens.
struct BadQueryStart {
  const int32_t* query_start;
  int64_t num_tokens;
  KV_HOST_DEVICE bool operator()(int64_t r) const {
    return query_start[r] < (r == 0 ? 0 : query_start[r - 1]) || query_start[r] > num_tokens;
  }
};

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
  check_disjoint(out, "out", tables, "tables");
  check_disjoint(out, "out", rows, "rows");
  check_disjoint(out, "out", positions, "positions");
  if (query_start_loc) check_disjoint(out, "out", *query_start_loc, "query_start_loc");
  m.tables = tables.const_data_ptr<int32_t>();
  m.rows = rows.const_data_ptr<int32_t>();
  m.positions = positions.const_data_ptr<int64_t>();
  m.num_tokens = positions.size(0);
  m.num_out = out.size(1);
  m.wide = out.scalar_type() == ScalarType::Long;
  m.out = out.mutable_data_ptr();
  return m;
}

// Throws for token i. The row and position are arguments, because they may have come from a device.
[[noreturn]] inline void fail_slot_mapping(const SlotMapping& m, int64_t i, int32_t row,
                                           int64_t position) {
  if (m.bad_row(row)) {
    fail(std::string(m.query_start ? "the row of token " : "rows[") + std::to_string(i) +
         (m.query_start ? " is " : "] is ") + std::to_string(row) +
         ": expected -1 (a dummy request) to " + std::to_string(m.groups.num_rows - 1));
  }
  const std::string text = "positions[" + std::to_string(i) + "] is " + std::to_string(position);
  if (position < 0 || position >= m.groups.num_positions) {
    fail(text + ": expected 0 to " + std::to_string(m.groups.num_positions - 1) +
         ", the tokens that a row has columns for");
  }
  fail(text + ": expected less, as row " + std::to_string(row) + " holds no block for it");
}

[[noreturn]] inline void fail_query_start(int64_t r, int64_t num_tokens) {
  fail("query_start_loc[" + std::to_string(r) + "] is wrong: expected numbers from 0 to " +
       std::to_string(num_tokens) + ", the number of positions, that never decrease");
}

}  // namespace kvcache
