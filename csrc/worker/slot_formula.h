// SPDX-License-Identifier: Apache-2.0
// Views of all cache groups' tables in their shared arena, and the slot formula. Plain C++ that is
// compiled for both the CPU and kernels.
#pragma once

#include <cstdint>

#include "worker/fast_divisor.h"
#include "worker/host_device.h"

namespace kvcache {

inline constexpr int64_t kNoSlot = -1;

// One group, as plain data passed to a kernel.
struct TableGroupView {
  int64_t offset;             // start of the group's table in the arena
  int32_t num_columns;        // number of kernel blocks per row
  int32_t block_size;         // number of tokens per kernel block on one rank
  int32_t window;             // number of tokens that a query attends to, including its own; 0: all
  int32_t counts_row;         // the group's row in num_blocks_per_row
  uint32_t rank;              // this worker's rank among `by_world.divisor` context-parallel ranks
  FastDivisor by_column;      // block_size * world: tokens per column
  FastDivisor by_interleave;  // number of consecutive tokens that stay on one rank
  FastDivisor by_world;

  KV_HOST_DEVICE int64_t num_positions() const { return int64_t{num_columns} * by_column.divisor; }

  // Returns the slot of the token at `position`, which is in [0, num_positions()), for a row with
  // these ids. With V = block_size * world, the token is in column pos / V. With o = pos % V and
  // interleave I, the token is on rank (o / I) % world, at offset (o / I / world) * I + o % I
  // within its block. Returns -1 on other ranks, and if the entry is not a block id.
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

  // Returns how many of a column's first `num_tokens` tokens this rank holds. `num_tokens` must be
  // smaller than the number of tokens in a column.
  KV_HOST_DEVICE uint32_t num_local(uint32_t num_tokens) const {
    if (by_world.divisor == 1) return num_tokens;
    // The interleave chunk of the first token that is not counted.
    const uint32_t chunk = by_interleave.divide(num_tokens);
    const uint32_t round = by_world.divide(chunk);
    const uint32_t turn = chunk - round * by_world.divisor;
    uint32_t of_round = 0;  // number of this rank's tokens in the incomplete round
    if (turn > rank) of_round = by_interleave.divisor;
    if (turn == rank) of_round = num_tokens - chunk * by_interleave.divisor;
    return round * by_interleave.divisor + of_round;
  }

  // Returns the number of leading columns that the window hides from all queries at or after
  // position `first`.
  KV_HOST_DEVICE int64_t num_hidden_columns(int32_t first) const {
    const int64_t first_visible = int64_t{first} - window + 1;
    if (window == 0 || first_visible <= 0) return 0;
    return by_column.divide(static_cast<uint32_t>(first_visible));
  }

  // Returns the number of columns that this many tokens need, at most num_columns.
  KV_HOST_DEVICE int64_t num_columns_for(int64_t max_num_tokens) const {
    if (max_num_tokens <= 0) return 0;
    const int64_t last = (max_num_tokens < INT32_MAX ? max_num_tokens : INT32_MAX) - 1;
    const int64_t needed = by_column.divide(static_cast<uint32_t>(last)) + 1;
    return needed < num_columns ? needed : num_columns;
  }
};

// The limit exists because groups are passed as kernel parameters, which may take 4 KiB in total.
inline constexpr int kMaxTables = 32;

struct TableGroups {
  int32_t num_groups;
  int32_t num_rows;
  int64_t num_positions;  // every group has columns for this number of positions
  TableGroupView group[kMaxTables];
};

// The fields of a group, in this order.
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

// Creates a group from kNumFields numbers, which must be in range.
inline TableGroupView table_view(const int64_t* fields) {
  TableGroupView view{};
  view.offset = fields[kOffset];
  view.num_columns = static_cast<int32_t>(fields[kColumns]);
  view.block_size = static_cast<int32_t>(fields[kBlockSize]);
  view.window = static_cast<int32_t>(fields[kWindow]);
  view.counts_row = static_cast<int32_t>(fields[kCountsRow]);
  view.rank = static_cast<uint32_t>(fields[kRank]);
  view.by_column = fast_divisor(fields[kBlockSize] * fields[kWorld]);
  view.by_interleave = fast_divisor(fields[kInterleave]);
  view.by_world = fast_divisor(fields[kWorld]);
  return view;
}

// Returns the index in [low, high) of the last of the ascending numbers that is at most i.
// numbers[low] must be at most i. Even if the numbers are not ascending, the function reads nothing
// outside the range, and the result is in the range.
KV_HOST_DEVICE int64_t last_up_to(const int32_t* numbers, int64_t low, int64_t high, int64_t i) {
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (numbers[middle] <= i ? low : high) = middle;
  }
  return low;
}

// The validated arguments of one call, as plain data that is passed to a kernel.
struct SlotMapping {
  TableGroups groups;
  const int32_t* tables;
  const int32_t* rows;         // [num_tokens], or [num_requests] with query_start_loc
  const int32_t* query_start;  // [num_requests + 1], or null
  int64_t num_requests;
  const int64_t* positions;  // [num_tokens]
  const int32_t* counts;     // [any, num_rows], number of entries in each row, or null
  int64_t num_tokens;
  int64_t num_out;  // number of entries per group, at least num_tokens
  bool wide;        // whether out is int64 instead of int32
  void* out;        // [num_groups, num_out]

  // Returns the request of token i, which is the last request that starts at or before i, or -1
  // after the last request.
  KV_HOST_DEVICE int64_t request_of(int64_t i) const {
    if (num_requests == 0 || i < query_start[0] || i >= query_start[num_requests]) return -1;
    return last_up_to(query_start, 0, num_requests, i);
  }
  KV_HOST_DEVICE int32_t row_of(int64_t i) const {
    if (i >= num_tokens) return -1;
    if (query_start == nullptr) return rows[i];
    const int64_t request = request_of(i);
    return request < 0 ? -1 : rows[request];
  }
  KV_HOST_DEVICE bool bad_row(int32_t row) const { return row < -1 || row >= groups.num_rows; }
  // Returns whether no row has a column for this position.
  KV_HOST_DEVICE bool outside(int64_t position) const {
    return position < 0 || position >= groups.num_positions;
  }
  KV_HOST_DEVICE bool bad_position(int32_t row, int64_t i) const {
    return row >= 0 &&
           (outside(positions[i]) || (counts != nullptr && group_without(row, positions[i]) >= 0));
  }
  // Returns the first group in which the row has no entry for this position, or -1.
  KV_HOST_DEVICE int group_without(int32_t row, int64_t position) const {
    for (int g = 0; g < groups.num_groups; ++g) {
      if (position >= num_held(g, row)) return g;
    }
    return -1;
  }
  // Returns the number of positions that a row's entries cover.
  KV_HOST_DEVICE int64_t num_held(int g, int32_t row) const {
    const TableGroupView& group = groups.group[g];
    return int64_t{counts[int64_t{group.counts_row} * groups.num_rows + row]} *
           group.by_column.divisor;
  }
  // Returns whether token i is invalid. Reads only the entries for token i.
  KV_HOST_DEVICE bool operator()(int64_t i) const {
    const int32_t row = row_of(i);
    return bad_row(row) || bad_position(row, i);
  }
  // Returns the slot in group g of the token at this position in a row. The row and the position
  // must be valid.
  KV_HOST_DEVICE int64_t slot(int g, int32_t row, int64_t position) const {
    const TableGroupView& group = groups.group[g];
    const int32_t* ids = tables + group.offset + int64_t{row} * group.num_columns;
    return group.slot(ids, static_cast<uint32_t>(position));
  }
};

// Returns whether entry r of query_start_loc is smaller than its predecessor or larger than the
// number of tokens.
struct BadQueryStart {
  const int32_t* query_start;
  int64_t num_tokens;
  KV_HOST_DEVICE bool operator()(int64_t r) const {
    return query_start[r] < (r == 0 ? 0 : query_start[r - 1]) || query_start[r] > num_tokens;
  }
};

}  // namespace kvcache
