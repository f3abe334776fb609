// SPDX-License-Identifier: Apache-2.0
// Permutes received blocks into the local layout, in place.
//
// A remote engine's blocks arrive as bytes, with the remote block size and the remote order of
// tokens and heads. A row (one head of one token) stays whole, so the conversion is a permutation
// of rows. NHD is equivalent to HND with blocks of one token. Therefore, only one case remains:
// from HND blocks of R tokens to HND blocks of L tokens, where R divides L or L divides R. The
// conversion keeps runs of min(L, R) rows whole, and transposes a matrix of max(L, R) / min(L, R)
// by number-of-heads runs.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "ops/checks.h"
#include "worker/fast_divisor.h"
#include "worker/host_device.h"

namespace kvcache {

// The start of a unit, which is the set of rows that one transposition moves.
struct PermuteUnit {
  int64_t first_id;    // index of the group's first id among all ids
  uint32_t first_row;  // index of the unit's first row within the group
};

// The arguments of one call, as plain data that is passed to a kernel. Strides are in bytes. A
// group consists of the blocks in one row of ids.
struct BlockPermute {
  char* cache;
  int64_t num_blocks, block_stride, outer_stride, inner_stride, row_bytes;
  FastDivisor block_rows;  // rows per block
  FastDivisor inner_rows;  // number of consecutive rows in a block that are inner_stride apart
  FastDivisor run;         // number of rows that stay together
  FastDivisor columns;     // number of runs in a row of the transposed matrix
  uint32_t matrix_rows;    // if matrix_rows or columns is 1, nothing moves
  uint32_t unit_rows;      // matrix_rows * columns * run
  int32_t group_size;      // ids per group
  uint32_t units_per_group;
  int64_t num_groups;

  KV_HOST_DEVICE PermuteUnit unit(int64_t group, uint32_t of_group) const {
    return {group * group_size, of_group * unit_rows};
  }

  // Returns which of the unit's received rows must move to row r.
  KV_HOST_DEVICE uint32_t source(uint32_t r) const {
    const uint32_t to = run.divide(r);
    const uint32_t i = columns.divide(to);
    const uint32_t j = to - i * columns.divisor;
    return (j * matrix_rows + i) * run.divisor + (r - to * run.divisor);
  }

  // Returns the byte offset within a layer of the unit's row r, with rows in memory order.
  template <class Ids>
  KV_HOST_DEVICE int64_t place(const PermuteUnit& unit, const Ids& ids, uint32_t r) const {
    const uint32_t row = unit.first_row + r;
    const uint32_t block = block_rows.divide(row);
    const uint32_t in_block = row - block * block_rows.divisor;
    const uint32_t outer = inner_rows.divide(in_block);
    return ids[unit.first_id + block] * block_stride + outer * outer_stride +
           (in_block - outer * inner_rows.divisor) * inner_stride;
  }

  // Returns whether r must move and is the smallest row in its cycle.
  KV_HOST_DEVICE bool leads_cycle(uint32_t r) const {
    uint32_t at = source(r);
    if (at == r) return false;
    while (at > r) at = source(at);
    return at == r;
  }

  // Returns whether all rows in a block are inner_stride apart.
  bool is_dense() const { return outer_stride == inner_rows.divisor * inner_stride; }
  bool is_identity() const { return matrix_rows == 1 || columns.divisor == 1; }
  int64_t unit_bytes() const { return int64_t{unit_rows} * row_bytes; }
};

// Checks the argument `offsets`. Each layer has the cache's strides. At its offset, it must lie in
// memory that was passed to the call, and must not overlap arguments that are read.
inline void check_layer_offsets(const Tensor& offsets, const Tensor& indices, const Tensor& cache,
                                const Owners& owners, int64_t row_bytes) {
  check_dim(offsets, "offsets", 1, "[num_layers]");
  check_dtype(offsets, "offsets", {ScalarType::Long});
  check_contiguous(offsets, "offsets");
  if (!offsets.is_cpu()) fail("offsets is on " + device_of(offsets) + ": expected cpu");
  const int64_t* begin = offsets.const_data_ptr<int64_t>();
  std::vector<int64_t> sorted(begin, begin + offsets.numel());
  std::sort(sorted.begin(), sorted.end());
  constexpr int64_t kMost = INT64_MAX / 4;  // sums of offsets and addresses fit into 64 bits
  if (!sorted.empty() && (sorted.front() < -kMost || sorted.back() > kMost)) {
    fail("offsets has " + std::to_string(sorted.front() < -kMost ? sorted.front() : sorted.back()) +
         ": expected bytes from the cache to a layer");
  }
  for (size_t i = 1; i < sorted.size(); ++i) {
    if (sorted[i] - sorted[i - 1] >= row_bytes) continue;
    fail("offsets has layers at " + std::to_string(sorted[i - 1]) + " and " +
         std::to_string(sorted[i]) + ": expected layers that share no memory");
  }
  const Reach reach({{"cache", cache}}, owners);
  const ByteSpan span = span_of(cache), from = span_of(offsets), ids = span_of(indices);
  for (const int64_t offset : sorted) {
    if (row_bytes > 0 && !reach.holds(span.moved(offset))) {
      fail("offsets has " + std::to_string(offset) +
           ": expected a layer in the memory of cache or of one of owners");
    }
    const std::string layer =
        std::string("cache") + (offset == 0 ? "" : " at offset " + std::to_string(offset));
    if (span.moved(offset).meets(from)) fail_shared(layer, "offsets");
    if (span.moved(offset).meets(ids)) fail_shared(layer, "indices");
  }
}

// Throws the error for entry i of indices, which is out of range or a duplicate.
[[noreturn]] inline void fail_block_id(int64_t i, int32_t id, int64_t num_blocks) {
  const bool there = id >= 0 && id < num_blocks;
  fail("indices, entry " + std::to_string(i) + ", is " + std::to_string(id) +
       (there ? " again: expected each block once"
              : ": expected 0 to " + std::to_string(num_blocks - 1)));
}

// Checks that ids on the host are in range and unique.
inline void check_block_ids(const int32_t* ids, int64_t n, int64_t num_blocks) {
  std::vector<bool> named(static_cast<size_t>(num_blocks));
  for (int64_t i = 0; i < n; ++i) {
    if (ids[i] < 0 || ids[i] >= num_blocks || named[ids[i]]) fail_block_id(i, ids[i], num_blocks);
    named[ids[i]] = true;
  }
}

inline BlockPermute checked_block_permute(const Tensor& cache, const Tensor& offsets,
                                          const Tensor& indices, int64_t remote_block_size,
                                          bool remote_is_hnd, const Owners& owners) {
  check_dim(cache, "cache", 4, "[num_blocks, block_size, num_kv_heads, head_size]");
  const int64_t num_blocks = cache.size(0), block_size = cache.size(1), heads = cache.size(2);
  const auto element = static_cast<int64_t>(cache.element_size());
  if (cache.numel() > 0 && cache.size(3) > 1 && cache.stride(3) != 1) {
    fail("cache has stride " + std::to_string(cache.stride(3)) +
         " in its last dimension: expected 1 (NHD or HND storage)");
  }
  if (block_size < 1) fail("cache has shape " + shape_of(cache) + ": expected tokens in a block");
  if (num_blocks > INT32_MAX) {
    fail("cache has shape " + shape_of(cache) + ": expected fewer than 2^31 blocks");
  }
  check_no_overlap(cache, "cache");
  if (remote_block_size < 1 ||
      (remote_block_size % block_size != 0 && block_size % remote_block_size != 0)) {
    fail("remote_block_size is " + std::to_string(remote_block_size) +
         ": expected a divisor or a multiple of the block size " + std::to_string(block_size));
  }
  const int64_t group_size = std::max<int64_t>(remote_block_size / block_size, 1);
  const auto token_bytes = multiply_add(heads, cache.size(3), 0);
  const int64_t most = token_bytes ? INT32_MAX / element / std::max<int64_t>(*token_bytes, 1) : 0;
  if (group_size > most / block_size) {
    fail("cache has shape " + shape_of(cache) + " and remote_block_size is " +
         std::to_string(remote_block_size) + ": expected less than 2 GiB in a block");
  }
  check_dim(indices, "indices", 2, "[n, local blocks per remote block, at least 1]");
  check_dtype(indices, "indices", {ScalarType::Int});
  check_contiguous(indices, "indices");
  if (!indices.is_cpu()) check_same_device(indices, "indices", cache, "cache");
  check_size(indices, "indices", 1, group_size, "the local blocks per remote block");
  check_layer_offsets(offsets, indices, cache, owners,
                      cache.numel() > 0 ? cache.size(3) * element : 0);

  // The stride of a dimension of size 1 is meaningless, because NHD and HND are identical then.
  const bool local_is_hnd = block_size > 1 && heads > 1 && cache.stride(2) > cache.stride(1);
  const int64_t local_rows_per_head = local_is_hnd ? block_size : 1;
  const int64_t remote_rows_per_head = remote_is_hnd ? remote_block_size : 1;
  const int64_t unit_tokens = std::max(local_rows_per_head, remote_rows_per_head);
  int64_t run = std::min(local_rows_per_head, remote_rows_per_head);
  const int64_t runs = unit_tokens / run;
  BlockPermute p{};
  p.cache = static_cast<char*>(cache.data_ptr());
  p.num_blocks = num_blocks;
  p.block_stride = cache.stride(0) * element;
  p.outer_stride = cache.stride(local_is_hnd ? 2 : 1) * element;
  p.inner_stride = cache.stride(local_is_hnd ? 1 : 2) * element;
  p.row_bytes = cache.numel() > 0 ? cache.size(3) * element : 0;
  int64_t inner_rows = local_is_hnd ? block_size : std::max<int64_t>(heads, 1);
  int64_t block_rows = block_size * std::max<int64_t>(heads, 1);
  if (run > 1 && p.inner_stride == p.row_bytes) {  // a contiguous run is one long row
    p.row_bytes *= run;
    p.inner_stride *= run;
    inner_rows /= run;
    block_rows /= run;
    run = 1;
  }
  p.block_rows = fast_divisor(block_rows);
  p.inner_rows = fast_divisor(inner_rows);
  p.run = fast_divisor(run);
  // Whether the rows of the transposed matrix are heads and its columns are runs of tokens, rather
  // than the other way around.
  const bool heads_outside = local_rows_per_head >= remote_rows_per_head;
  p.matrix_rows = static_cast<uint32_t>(heads_outside ? std::max<int64_t>(heads, 1) : runs);
  p.columns = fast_divisor(heads_outside ? runs : std::max<int64_t>(heads, 1));
  p.unit_rows = p.matrix_rows * p.columns.divisor * p.run.divisor;
  p.group_size = static_cast<int32_t>(group_size);
  p.units_per_group = static_cast<uint32_t>(group_size * block_size / unit_tokens);
  p.num_groups = indices.size(0);
  return p;
}

}  // namespace kvcache
