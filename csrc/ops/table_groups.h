// The cache groups of a worker's tables, as arguments of ops: where each group's table lies in the
// arena that all share, and how its blocks hold tokens.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <string>

#include "ops/checks.h"
#include "ops/fast_divisor.h"
#include "ops/host_device.h"

namespace kvcache {

// One group, as plain data that is passed to a kernel.
struct TableGroupView {
  int64_t offset;             // where its table begins in the arena
  int32_t num_columns;        // kernel blocks per row
  int32_t block_size;         // tokens of a kernel block on one rank
  int32_t window;             // tokens that a query sees, its own included; 0: all
  int32_t counts_row;         // the group's row in num_blocks_per_row
  uint32_t rank;              // this worker's among `by_world.divisor` context-parallel ranks
  FastDivisor by_column;      // block_size * world: the tokens that one column stands for
  FastDivisor by_interleave;  // consecutive tokens that stay on one rank
  FastDivisor by_world;

  KV_HOST_DEVICE int64_t num_positions() const { return int64_t{num_columns} * by_column.divisor; }

  // The slot of the token at `position`, in [0, num_positions()), of the row with these ids. The
  // token lies in column pos / V with V = block_size * world. With o = pos % V and interleave I,
  // rank (o / I) % world holds it, at offset (o / I / world) * I + o % I of its block. -1 on other
  // ranks, and where the entry is no block id.
  KV_HOST_DEVICE int64_t slot(const int32_t* row, uint32_t position) const {
    const uint32_t column = by_column.divide(position);
    uint32_t offset = position - column * by_column.divisor;
    if (by_world.divisor > 1) {
      const uint32_t chunk = by_interleave.divide(offset);
      const uint32_t round = by_world.divide(chunk);
      if (chunk - round * by_world.divisor != rank) return -1;
      offset = round * by_interleave.divisor + (offset - chunk * by_interleave.divisor);
    }
    const int64_t block = row[column];
    return block < 0 ? -1 : block * block_size + offset;
  }

  // How many of the first `num_tokens` tokens of a column this rank holds. `num_tokens` is less
  // than a column covers.
  KV_HOST_DEVICE uint32_t num_local(uint32_t num_tokens) const {
    if (by_world.divisor == 1) return num_tokens;
    const uint32_t chunk = by_interleave.divide(num_tokens);  // has the first token not counted
    const uint32_t round = by_world.divide(chunk);
    const uint32_t turn = chunk - round * by_world.divisor;
    uint32_t of_round = 0;  // this rank's tokens in the incomplete round
    if (turn > rank) of_round = by_interleave.divisor;
    if (turn == rank) of_round = num_tokens - chunk * by_interleave.divisor;
    return round * by_interleave.divisor + of_round;
  }

  // Leading columns that the window hides from all queries from position `first` on.
  KV_HOST_DEVICE int64_t num_hidden_columns(int32_t first) const {
    const int64_t first_visible = int64_t{first} - window + 1;
    if (window == 0 || first_visible <= 0) return 0;
    return by_column.divide(static_cast<uint32_t>(first_visible));
  }

  // Columns of a row of up to this many tokens.
  KV_HOST_DEVICE int64_t num_columns_for(int64_t max_num_tokens) const {
    if (max_num_tokens <= 0) return 0;
    const int64_t last = (max_num_tokens < INT32_MAX ? max_num_tokens : INT32_MAX) - 1;
    const int64_t needed = by_column.divide(static_cast<uint32_t>(last)) + 1;
    return needed < num_columns ? needed : num_columns;
  }
};

inline constexpr int kMaxGroups = 32;  // groups are kernel parameters, of 4 KiB in total

struct TableGroups {
  int32_t num_groups;
  int32_t num_rows;
  int64_t num_positions;  // positions for which every group has a column
  TableGroupView group[kMaxGroups];
};

// Columns of the `groups` argument, in this order.
enum GroupField {
  kOffset,
  kColumns,
  kBlockSize,
  kWorld,
  kRank,
  kInterleave,
  kWindow,
  kCountsRow,
  kNumFields
};

// Reads the argument `groups`, int64[num_groups, kNumFields] on the CPU.
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
  if (groups.size(0) > kMaxGroups) {
    fail("groups has " + std::to_string(groups.size(0)) + " groups: expected at most " +
         std::to_string(kMaxGroups));
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
    // Products below cannot overflow: each factor is under 2^31.
    require(fields[kOffset] >= 0 && columns <= tables.numel() / num_rows &&
                fields[kOffset] <= tables.numel() - num_rows * columns,
            kOffset, "offset", "a table that lies within tables");
    TableGroupView& view = out.group[g];
    view.offset = fields[kOffset];
    view.num_columns = static_cast<int32_t>(columns);
    view.block_size = static_cast<int32_t>(block_size);
    view.window = static_cast<int32_t>(fields[kWindow]);
    view.counts_row = static_cast<int32_t>(fields[kCountsRow]);
    view.rank = static_cast<uint32_t>(fields[kRank]);
    view.by_column = fast_divisor(block_size * world);
    view.by_interleave = fast_divisor(interleave);
    view.by_world = fast_divisor(world);
    if (view.num_positions() < out.num_positions) out.num_positions = view.num_positions();
  }
  return out;
}

// Checks the argument `num_blocks_per_row`: the entries that each row of each group holds.
inline void check_counts(const Tensor& counts, const TableGroups& groups, const Tensor& tables) {
  check_dim(counts, "num_blocks_per_row", 2, "[num_groups, num_rows]");
  check_dtype(counts, "num_blocks_per_row", {ScalarType::Int});
  check_contiguous(counts, "num_blocks_per_row");
  check_same_device(counts, "num_blocks_per_row", tables, "tables");
  check_size(counts, "num_blocks_per_row", 1, groups.num_rows, "one entry per row");
  for (int g = 0; g < groups.num_groups; ++g) {
    if (groups.group[g].counts_row < counts.size(0)) continue;
    fail("groups[" + std::to_string(g) + "] names row " +
         std::to_string(groups.group[g].counts_row) + " of num_blocks_per_row, which has " +
         std::to_string(counts.size(0)));
  }
}

}  // namespace kvcache
