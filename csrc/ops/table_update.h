// SPDX-License-Identifier: Apache-2.0
// Updates block tables on the device, and gathers their rows in batch order.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "ops/table_groups.h"

namespace kvcache {

// The buffer written by `HostTables::pack`: [number of segments, (start, length, index of the
// values) per segment, values].
struct TableUpdate {
  int32_t* tables;
  int64_t num_ids;
  const int32_t* updates;
  int64_t num_updates;

  KV_HOST_DEVICE int64_t num_segments() const { return updates[0]; }
  KV_HOST_DEVICE const int32_t* segment(int64_t s) const { return updates + 1 + 3 * s; }
  // Returns whether segment s exceeds the tables or the buffer. For s = -1, returns whether the
  // number of segments is invalid.
  KV_HOST_DEVICE bool bad_segment(int64_t s) const {
    const int32_t* place = segment(s);
    return place[0] < 0 || place[1] < 0 || place[2] < 0 || int64_t{place[0]} + place[1] > num_ids ||
           int64_t{place[2]} + place[1] > num_updates;
  }
  KV_HOST_DEVICE bool bad_count() const {
    return updates[0] < 0 || 1 + 3 * int64_t{updates[0]} > num_updates;
  }
};

inline TableUpdate checked_table_update(const Tensor& tables, const Tensor& updates) {
  check_dim(tables, "tables", 1, "[entries of all tables]");
  check_dtype(tables, "tables", {ScalarType::Int});
  check_contiguous(tables, "tables");
  check_dim(updates, "updates", 1, "[at least 1]");
  check_dtype(updates, "updates", {ScalarType::Int});
  check_contiguous(updates, "updates");
  check_same_device(updates, "updates", tables, "tables");
  check_disjoint({{"tables", tables}}, {{"updates", updates}});
  if (updates.numel() < 1) fail("updates has shape [0]: expected at least the number of segments");
  return {tables.mutable_data_ptr<int32_t>(), tables.numel(), updates.const_data_ptr<int32_t>(),
          updates.numel()};
}

[[noreturn]] inline void fail_table_update(const TableUpdate& u, int64_t s) {
  if (s < 0) {
    fail("updates[0], the number of segments, is negative or does not fit in the " +
         std::to_string(u.num_updates) + " entries");
  }
  fail("segment " + std::to_string(s) + " of updates lies outside the tables or the buffer");
}

// A row in one group's gathered table. The first `hidden` columns, which precede the window, are
// null; the ids follow. In a padding row, all columns are null.
struct GatheredRow {
  const int32_t* from;
  int32_t* to;
  int32_t columns;
  int32_t hidden;
};

// Rows of all tables in batch order.
struct TableGather {
  TableGroups groups;
  const int32_t* tables;
  const int32_t* idx_mapping;  // [num_out_rows]; -1: padding
  // [num_out_rows], number of tokens before each row's first query, or null
  const int32_t* num_computed;
  int64_t num_out_rows;
  int64_t max_num_tokens;  // columns beyond this number of tokens are not written
  int32_t* out;            // same layout as tables

  KV_HOST_DEVICE int64_t num_columns(int g) const {
    return groups.group[g].num_columns_for(max_num_tokens);
  }
  KV_HOST_DEVICE GatheredRow row(int g, int64_t i) const {
    const TableGroupView& group = groups.group[g];
    const int32_t row = idx_mapping[i];
    const auto columns = static_cast<int32_t>(num_columns(g));
    // All columns, for padding or a row out of range (see checked_mode).
    int64_t hidden = columns;
    if (row >= 0 && row < groups.num_rows) {
      hidden = num_computed != nullptr ? group.num_hidden_columns(num_computed[i]) : 0;
    }
    return {tables + group.offset + int64_t{hidden < columns ? row : 0} * group.num_columns,
            out + group.offset + i * group.num_columns, columns,
            hidden < columns ? static_cast<int32_t>(hidden) : columns};
  }
};

inline TableGather checked_table_gather(const Tensor& tables, const Tensor& groups,
                                        int64_t num_rows, const Tensor& idx_mapping,
                                        const std::optional<Tensor>& num_computed_tokens,
                                        int64_t max_num_tokens, const Tensor& out) {
  TableGather m{};
  m.groups = checked_groups(groups, tables, num_rows);
  check_dim(idx_mapping, "idx_mapping", 1, "[num_requests]");
  check_dtype(idx_mapping, "idx_mapping", {ScalarType::Int});
  check_contiguous(idx_mapping, "idx_mapping");
  check_same_device(idx_mapping, "idx_mapping", tables, "tables");
  if (idx_mapping.size(0) > num_rows) {
    fail("idx_mapping has " + std::to_string(idx_mapping.size(0)) +
         " entries: expected at most num_rows, which is " + std::to_string(num_rows));
  }
  check_dim(out, "out", 1, "[entries of all tables]");
  check_dtype(out, "out", {ScalarType::Int});
  check_contiguous(out, "out");
  check_same_device(out, "out", tables, "tables");
  for (int g = 0; g < m.groups.num_groups; ++g) {
    const TableGroupView& group = m.groups.group[g];
    if (group.offset + num_rows * group.num_columns <= out.numel()) continue;
    fail("out has shape " + shape_of(out) + ": expected the tables of " +
         std::to_string(m.groups.num_groups) + " groups to fit, laid out as in tables");
  }
  if (max_num_tokens < 0) {
    fail("max_num_tokens is " + std::to_string(max_num_tokens) + ": expected 0 or more");
  }
  if (num_computed_tokens) {
    const Tensor& computed = *num_computed_tokens;
    check_dim(computed, "num_computed_tokens", 1, "[num_requests]");
    check_dtype(computed, "num_computed_tokens", {ScalarType::Int});
    check_contiguous(computed, "num_computed_tokens");
    check_same_device(computed, "num_computed_tokens", tables, "tables");
    check_size(computed, "num_computed_tokens", 0, idx_mapping.size(0), "as idx_mapping has");
    m.num_computed = computed.const_data_ptr<int32_t>();
  }
  m.tables = tables.const_data_ptr<int32_t>();
  m.out = out.mutable_data_ptr<int32_t>();
  check_disjoint({{"out", out}}, {{"tables", tables},
                                  {"idx_mapping", idx_mapping},
                                  {"num_computed_tokens", num_computed_tokens}});
  m.idx_mapping = idx_mapping.const_data_ptr<int32_t>();
  m.num_out_rows = idx_mapping.size(0);
  m.max_num_tokens = max_num_tokens;
  return m;
}

// Returns whether entry i of idx_mapping is not a valid row.
struct BadIndex {
  const int32_t* idx_mapping;
  int32_t num_rows;
  KV_HOST_DEVICE bool operator()(int64_t i) const {
    return idx_mapping[i] < -1 || idx_mapping[i] >= num_rows;
  }
};

[[noreturn]] inline void fail_index(int64_t i, int32_t row, int32_t num_rows) {
  fail("idx_mapping[" + std::to_string(i) + "] is " + std::to_string(row) +
       ": expected -1 (a padded row) to " + std::to_string(num_rows - 1));
}

}  // namespace kvcache
