// Slot mapping: where in the paged cache each token's KV lives.
//
//   slot = table[row, position / block_size] * block_size + position % block_size
//
// A row of -1 is a dummy request: its tokens get slot -1, which every reader and writer skips.
#pragma once

#include <cstdint>
#include <string>

#include "ops/checks.h"
#include "ops/host_device.h"

namespace kvcache {

inline constexpr int64_t kNoSlot = -1;

// The arguments of one call, checked; plain data, as a kernel takes it.
struct SlotMapping {
  const int32_t* block_table;  // [num_rows, num_columns]
  int64_t num_rows, num_columns;
  const int32_t* row_indices;  // [num_tokens]
  const int64_t* positions;    // [num_tokens]
  int64_t num_tokens;
  int64_t block_size;
  int64_t* out;  // [num_out], num_out >= num_tokens
  int64_t num_out;

  KV_HOST_DEVICE bool bad_row(int64_t i) const {
    return row_indices[i] < -1 || row_indices[i] >= num_rows;
  }
  KV_HOST_DEVICE bool bad_position(int64_t i) const {
    return row_indices[i] >= 0 && (positions[i] < 0 || positions[i] >= num_columns * block_size);
  }
  // Whether entry i cannot be served; it is never read beyond its own index.
  KV_HOST_DEVICE bool operator()(int64_t i) const { return bad_row(i) || bad_position(i); }

  // The slot of token i, which is not bad; -1 behind the last token.
  KV_HOST_DEVICE int64_t slot(int64_t i) const {
    if (i >= num_tokens || row_indices[i] < 0) return kNoSlot;
    const int64_t column = positions[i] / block_size;
    const int64_t block = block_table[row_indices[i] * num_columns + column];
    return block * block_size + (positions[i] - column * block_size);
  }
};

inline SlotMapping checked_slot_mapping(const Tensor& block_table, const Tensor& row_indices,
                                        const Tensor& positions, int64_t block_size,
                                        const Tensor& out) {
  check_dim(block_table, "block_table", 2, "[num_rows, num_columns]");
  check_dim(row_indices, "row_indices", 1, "[num_tokens]");
  check_dim(positions, "positions", 1, "[num_tokens]");
  check_dim(out, "out", 1, "[at least num_tokens]");
  check_dtype(block_table, "block_table", {ScalarType::Int});
  check_dtype(row_indices, "row_indices", {ScalarType::Int});
  check_dtype(positions, "positions", {ScalarType::Long});
  check_dtype(out, "out", {ScalarType::Long});
  check_contiguous(block_table, "block_table");
  check_contiguous(row_indices, "row_indices");
  check_contiguous(positions, "positions");
  check_contiguous(out, "out");
  check_same_device(row_indices, "row_indices", block_table, "block_table");
  check_same_device(positions, "positions", block_table, "block_table");
  check_same_device(out, "out", block_table, "block_table");
  check_size(row_indices, "row_indices", 0, positions.size(0), "as positions has");
  if (out.size(0) < positions.size(0)) {
    fail("out has shape " + shape_of(out) + ": expected at least " +
         std::to_string(positions.size(0)) + " entries, one per position");
  }
  if (block_size < 1) {
    fail("block_size is " + std::to_string(block_size) + ": expected 1 or more");
  }
  return {block_table.const_data_ptr<int32_t>(),
          block_table.size(0),
          block_table.size(1),
          row_indices.const_data_ptr<int32_t>(),
          positions.const_data_ptr<int64_t>(),
          positions.size(0),
          block_size,
          out.mutable_data_ptr<int64_t>(),
          out.size(0)};
}

// Throws for entry i, whose values are given (they may have come from a device).
[[noreturn]] inline void fail_slot_mapping(const SlotMapping& m, int64_t i, int32_t row,
                                           int64_t position) {
  if (row < -1 || row >= m.num_rows) {
    fail("row_indices[" + std::to_string(i) + "] is " + std::to_string(row) +
         ": expected -1 (a dummy request) to " + std::to_string(m.num_rows - 1));
  }
  fail("positions[" + std::to_string(i) + "] is " + std::to_string(position) + ": expected 0 to " +
       std::to_string(m.num_columns * m.block_size - 1) + ", as a row has " +
       std::to_string(m.num_columns) + " blocks of " + std::to_string(m.block_size));
}

}  // namespace kvcache
