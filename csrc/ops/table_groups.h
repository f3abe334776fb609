// SPDX-License-Identifier: Apache-2.0
// Reads the cache groups of block tables from op arguments.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <string>

#include "ops/checks.h"
#include "worker/slot_formula.h"

namespace kvcache {

// Validates and reads the argument `groups`, int64[num_groups, kNumFields] on the CPU.
inline TableGroups checked_groups(const Tensor& groups, const Tensor& tables, int64_t num_rows) {
  check_dim(tables, "tables", 1, "[entries of all tables]");
  check_dtype(tables, "tables", {ScalarType::Int});
  check_contiguous(tables, "tables");
  check_dim(groups, "groups", 2, "[num_groups, 8]");
  check_size(groups, "groups", 1, kNumFields,
             "offset, columns, block size, world size, rank, interleave, window, row of counts");
  check_dtype(groups, "groups", {ScalarType::Long});
  check_contiguous(groups, "groups");
  if (!groups.is_cpu()) fail("groups is on " + device_of(groups) + ": expected cpu");
  if (groups.size(0) > kMaxTables) {
    fail("groups has " + std::to_string(groups.size(0)) + " groups: expected at most " +
         std::to_string(kMaxTables));
  }
  if (num_rows < 1 || num_rows > INT32_MAX) {
    fail("num_rows is " + std::to_string(num_rows) + ": expected 1 to 2147483647");
  }
  TableGroups out{};
  out.num_groups = static_cast<int32_t>(groups.size(0));
  out.num_rows = static_cast<int32_t>(num_rows);
  out.num_positions = INT32_MAX;
  const int64_t* fields = groups.const_data_ptr<int64_t>();
  for (int g = 0; g < out.num_groups; ++g, fields += kNumFields) {
    const auto require = [&](bool ok, GroupField field, const char* name, const char* expected) {
      if (ok) return;
      fail("groups[" + std::to_string(g) + "] has " + name + " " + std::to_string(fields[field]) +
           ": expected " + expected);
    };
    constexpr int64_t kMost = INT32_MAX;
    const int64_t columns = fields[kColumns], block_size = fields[kBlockSize];
    const int64_t world = fields[kWorld], interleave = fields[kInterleave];
    require(columns >= 1 && columns <= kMost, kColumns, "columns", "1 to 2147483647");
    require(block_size >= 1 && block_size <= kMost, kBlockSize, "block size", "1 to 2147483647");
    require(world >= 1 && world <= kMost / block_size, kWorld, "world size",
            "1 or more, and fewer than 2^31 tokens in a block of all ranks");
    require(fields[kRank] >= 0 && fields[kRank] < world, kRank, "rank", "0 to world size - 1");
    require(interleave >= 1 && block_size % interleave == 0, kInterleave, "interleave",
            "a divisor of the block size");
    require(fields[kWindow] >= 0 && fields[kWindow] <= kMost, kWindow, "window", "0 or more");
    require(fields[kCountsRow] >= 0 && fields[kCountsRow] <= kMost, kCountsRow, "row of counts",
            "0 or more");
    // The products below cannot overflow, because each factor is below 2^31.
    require(fields[kOffset] >= 0 && columns <= tables.numel() / num_rows &&
                fields[kOffset] <= tables.numel() - num_rows * columns,
            kOffset, "offset", "a table that lies within tables");
    TableGroupView& view = out.group[g];
    view = table_view(fields);
    if (view.num_positions() < out.num_positions) out.num_positions = view.num_positions();
  }
  return out;
}

// Checks the argument `num_blocks_per_row`, which contains the number of entries in each row of
// each group.
inline void check_counts(const Tensor& counts, const TableGroups& groups, const Tensor& tables) {
  check_dim(counts, "num_blocks_per_row", 2, "[num_groups, num_rows]");
  check_dtype(counts, "num_blocks_per_row", {ScalarType::Int});
  check_contiguous(counts, "num_blocks_per_row");
  check_same_device(counts, "num_blocks_per_row", tables, "tables");
  check_size(counts, "num_blocks_per_row", 1, groups.num_rows, "one entry per row");
  for (int g = 0; g < groups.num_groups; ++g) {
    if (groups.group[g].counts_row < counts.size(0)) continue;
    fail("groups[" + std::to_string(g) + "] refers to row " +
         std::to_string(groups.group[g].counts_row) + " of num_blocks_per_row, which has " +
         std::to_string(counts.size(0)));
  }
}

}  // namespace kvcache
