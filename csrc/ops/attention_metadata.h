// SPDX-License-Identifier: Apache-2.0
// Computes a batch's metadata for attention kernels from block tables. For each group, the outputs
// are local sequence lengths, block tables in batch order (FlashAttention) and page lists
// (FlashInfer). The start of each request's queries is the same for all groups.
//
// A padding request (with row -1, or after the last request) has no KV: its length is 0, its table
// row is null, and it has no pages.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "ops/table_groups.h"

namespace kvcache {

// The part of a request's KV that this rank holds in one group.
struct KVExtent {
  int32_t num_tokens;     // number of local tokens, including those outside the window
  int32_t first_page;     // first visible column
  int32_t num_pages;      // number of visible pages
  int32_t last_page_len;  // number of tokens in the last visible page; 0 if there are no pages
};

// The validated arguments of one call, as plain data that is passed to a kernel.
struct AttentionMetadata {
  TableGroups groups;
  const int32_t* tables;
  const int32_t* rows;        // [num_requests]
  const int32_t* query_lens;  // [num_requests], number of tokens in this step
  const int32_t* seq_lens;    // [num_requests], number of tokens after this step
  const int32_t* counts;      // number of entries in each row
  int32_t num_requests;
  int32_t num_out;       // number of requests, including padding
  int32_t most_tokens;   // maximum number of tokens per request
  int64_t out_capacity;  // capacity of block_tables and page_indices in requests

  int32_t* query_start;    // [num_out + 1]
  int32_t* seqused;        // [num_groups, num_out], rows seqused_stride apart
  int32_t* block_tables;   // per group [out_capacity, columns], or null
  int32_t* page_indptr;    // [num_groups, num_out + 1], rows page_indptr_stride apart, or null
  int32_t* page_indices;   // per group [out_capacity * columns], or null
  int32_t* last_page_len;  // [num_groups, num_out], rows last_page_len_stride apart, or null
  int64_t seqused_stride, page_indptr_stride, last_page_len_stride;

  int64_t columns_before[kMaxTables];  // number of columns in all earlier groups
  FastDivisor by_written[kMaxTables];  // divides by num_written, or by 1 if it is 0
  int32_t num_written[kMaxTables];     // number of columns per request that this call writes

  // Returns whether request i names a row that does not exist.
  KV_HOST_DEVICE bool bad_row(int64_t i) const {
    return rows[i] < -1 || rows[i] >= groups.num_rows;
  }
  KV_HOST_DEVICE bool bad_lens(int64_t i) const {
    return query_lens[i] < 0 ||
           (rows[i] >= 0 && (seq_lens[i] < query_lens[i] || seq_lens[i] > most_tokens));
  }
  // Returns whether request i has tokens beyond the blocks of its row in group g.
  KV_HOST_DEVICE bool behind_row(int g, int64_t i) const {
    const TableGroupView& group = groups.group[g];
    const int32_t held = counts[int64_t{group.counts_row} * groups.num_rows + rows[i]];
    return seq_lens[i] > int64_t{held} * group.by_column.divisor;
  }
  // Returns the first group in which request i's row holds too few blocks, or -1.
  KV_HOST_DEVICE int group_without(int64_t i) const {
    for (int g = 0; g < groups.num_groups && rows[i] >= 0; ++g) {
      if (behind_row(g, i)) return g;
    }
    return -1;
  }
  // Returns whether request i is invalid in any group. Reads only the entries for request i.
  KV_HOST_DEVICE bool operator()(int64_t i) const {
    return bad_row(i) || bad_lens(i) || group_without(i) >= 0;
  }

  // Returns the table row of request i < num_out in group g, or -1 if the request has no KV in the
  // group. Invalid requests, which can occur only on devices without the checked mode, have no row.
  // Reads only group g's counts.
  KV_HOST_DEVICE int32_t row_of(int g, int64_t i) const {
    const bool served =
        i < num_requests && rows[i] >= 0 && !bad_row(i) && !bad_lens(i) && !behind_row(g, i);
    return served ? rows[i] : -1;
  }
  KV_HOST_DEVICE int32_t num_queries(int64_t i) const {
    return i < num_requests && query_lens[i] > 0 ? query_lens[i] : 0;
  }
  // Returns request i's local KV. `row` is the result of row_of.
  KV_HOST_DEVICE KVExtent extent(int g, int64_t i, int32_t row) const {
    if (row < 0) return {0, 0, 0, 0};
    const TableGroupView& group = groups.group[g];
    const auto length = static_cast<uint32_t>(seq_lens[i]);
    const uint32_t whole = group.by_column.divide(length);
    const uint32_t rest = group.num_local(length - whole * group.by_column.divisor);
    // The first query attends at least to its own position, so a column is hidden only if all of
    // its tokens precede the window.
    const auto hidden = static_cast<uint32_t>(group.num_hidden_columns(length - query_lens[i]));
    const uint32_t pages = whole + (rest > 0) - hidden;
    const uint32_t last = rest > 0 ? rest : group.block_size;
    return {static_cast<int32_t>(whole * group.block_size + rest), static_cast<int32_t>(hidden),
            static_cast<int32_t>(pages), static_cast<int32_t>(pages > 0 ? last : 0)};
  }

  KV_HOST_DEVICE const int32_t* table_row(int g, int32_t row) const {
    const TableGroupView& group = groups.group[g];
    return tables + group.offset + int64_t{row} * group.num_columns;
  }
  KV_HOST_DEVICE int32_t* block_table_row(int g, int64_t i) const {
    return block_tables + out_capacity * columns_before[g] + i * groups.group[g].num_columns;
  }
  KV_HOST_DEVICE int32_t* page_list(int g) const {
    return page_indices + out_capacity * columns_before[g];
  }
  // Returns the index in the page list for column c of request i. The request's visible pages start
  // at `start`. Its other columns are mapped to null entries after the `total` pages of all
  // requests. Therefore, the num_out * num_written columns fill as many entries, each exactly once.
  KV_HOST_DEVICE int64_t page_place(int g, int64_t i, int32_t c, const KVExtent& kv, int64_t start,
                                    int64_t total) const {
    const int32_t page = c - kv.first_page;
    if (page >= 0 && page < kv.num_pages) return start + page;
    return total + i * num_written[g] - start + (page < 0 ? c : c - kv.num_pages);
  }
};

namespace attention_metadata {

inline void check_lengths(const Tensor& t, const char* name, const Tensor& tables) {
  check_dim(t, name, 1, "[num_requests]");
  check_dtype(t, name, {ScalarType::Int});
  check_contiguous(t, name);
  check_same_device(t, name, tables, "tables");
}

inline void check_per_group(const Tensor& t, const char* name, const char* shape,
                            const Tensor& tables, const Tensor& groups, int64_t size,
                            const char* why) {
  check_dim(t, name, 2, shape);
  check_dtype(t, name, {ScalarType::Int});
  check_same_device(t, name, tables, "tables");
  check_size(t, name, 0, groups.size(0), "one row per group");
  check_size(t, name, 1, size, why);
  if (t.numel() > 0 && size > 1 && t.stride(1) != 1) {
    fail(std::string(name) + " has stride " + std::to_string(t.stride(1)) +
         " in dimension 1: expected 1");
  }
  check_no_overlap(t, name);
}

// Checks an output that has columns for each group and request, and returns its capacity in
// requests.
inline int64_t check_arena(const Tensor& t, const char* name, const Tensor& tables,
                           const AttentionMetadata& m, int64_t num_columns) {
  check_dim(t, name, 1, "[requests * columns of all groups]");
  check_dtype(t, name, {ScalarType::Int});
  check_contiguous(t, name);
  check_same_device(t, name, tables, "tables");
  const int64_t capacity = t.numel() / num_columns;
  if (capacity < m.num_out || capacity * num_columns != t.numel() || t.numel() > INT32_MAX) {
    fail(std::string(name) + " has shape " + shape_of(t) + ": expected a multiple of " +
         std::to_string(num_columns) + " entries (the columns of all groups), at least " +
         std::to_string(m.num_out * num_columns) + " for " + std::to_string(m.num_out) +
         " requests, and fewer than 2^31");
  }
  return capacity;
}

}  // namespace attention_metadata

inline AttentionMetadata checked_attention_metadata(
    const Tensor& tables, const Tensor& groups, int64_t num_rows, const Tensor& rows,
    const Tensor& query_lens, const Tensor& seq_lens, const Tensor& num_blocks_per_row,
    int64_t max_num_tokens, const Tensor& query_start_loc, const Tensor& seqused_k,
    const std::optional<Tensor>& block_tables, const std::optional<Tensor>& paged_kv_indptr,
    const std::optional<Tensor>& paged_kv_indices,
    const std::optional<Tensor>& paged_kv_last_page_len) {
  using namespace attention_metadata;
  AttentionMetadata m{};
  m.groups = checked_groups(groups, tables, num_rows);
  if (m.groups.num_groups == 0) fail("groups has no group: expected 1 or more");
  check_lengths(rows, "rows", tables);
  check_lengths(query_lens, "query_lens", tables);
  check_size(query_lens, "query_lens", 0, rows.size(0), "as rows has");
  check_lengths(seq_lens, "seq_lens", tables);
  check_size(seq_lens, "seq_lens", 0, rows.size(0), "as rows has");
  check_counts(num_blocks_per_row, m.groups, tables);
  if (max_num_tokens < 0) {
    fail("max_num_tokens is " + std::to_string(max_num_tokens) + ": expected 0 or more");
  }

  check_dim(query_start_loc, "query_start_loc", 1, "[requests with padding + 1]");
  check_dtype(query_start_loc, "query_start_loc", {ScalarType::Int});
  check_contiguous(query_start_loc, "query_start_loc");
  check_same_device(query_start_loc, "query_start_loc", tables, "tables");
  if (query_start_loc.size(0) < rows.size(0) + 1 || query_start_loc.size(0) > INT32_MAX) {
    fail("query_start_loc has shape " + shape_of(query_start_loc) + ": expected at least " +
         std::to_string(rows.size(0) + 1) + " entries, one more than rows has");
  }
  m.num_requests = static_cast<int32_t>(rows.size(0));
  m.num_out = static_cast<int32_t>(query_start_loc.size(0) - 1);
  check_per_group(seqused_k, "seqused_k", "[num_groups, requests]", tables, groups, m.num_out,
                  "one less than query_start_loc has");
  if (paged_kv_indptr.has_value() != paged_kv_last_page_len.has_value() ||
      (paged_kv_indices && !paged_kv_indptr)) {
    fail(
        "some of paged_kv_indptr, paged_kv_indices and paged_kv_last_page_len are None: expected "
        "all, none, or only paged_kv_indices");
  }
  if (paged_kv_indptr) {
    check_per_group(*paged_kv_indptr, "paged_kv_indptr", "[num_groups, requests + 1]", tables,
                    groups, m.num_out + int64_t{1}, "as query_start_loc has");
    check_per_group(*paged_kv_last_page_len, "paged_kv_last_page_len", "[num_groups, requests]",
                    tables, groups, m.num_out, "one less than query_start_loc has");
    m.page_indptr = paged_kv_indptr->mutable_data_ptr<int32_t>();
    m.page_indptr_stride = paged_kv_indptr->stride(0);
    m.last_page_len = paged_kv_last_page_len->mutable_data_ptr<int32_t>();
    m.last_page_len_stride = paged_kv_last_page_len->stride(0);
  }

  int64_t num_columns = 0;
  for (int g = 0; g < m.groups.num_groups; ++g) {
    const TableGroupView& group = m.groups.group[g];
    m.columns_before[g] = num_columns;
    num_columns += group.num_columns;
    m.num_written[g] = static_cast<int32_t>(group.num_columns_for(max_num_tokens));
    m.by_written[g] = fast_divisor(m.num_written[g] > 0 ? m.num_written[g] : 1);
    const int64_t most_pages = int64_t{m.num_out} * m.num_written[g];
    if (paged_kv_indptr && most_pages > INT32_MAX) {
      fail("max_num_tokens is " + std::to_string(max_num_tokens) + ": " +
           std::to_string(m.num_out) + " requests may have " + std::to_string(most_pages) +
           " pages in groups[" + std::to_string(g) +
           "], expected fewer than 2^31, because paged_kv_indptr is int32");
    }
  }
  if (block_tables) {
    m.out_capacity = check_arena(*block_tables, "block_tables", tables, m, num_columns);
    m.block_tables = block_tables->mutable_data_ptr<int32_t>();
  }
  if (paged_kv_indices) {
    const int64_t capacity =
        check_arena(*paged_kv_indices, "paged_kv_indices", tables, m, num_columns);
    if (block_tables && capacity != m.out_capacity) {
      fail("paged_kv_indices has shape " + shape_of(*paged_kv_indices) + ": expected " +
           shape_of(*block_tables) + ", as block_tables has");
    }
    m.out_capacity = capacity;
    m.page_indices = paged_kv_indices->mutable_data_ptr<int32_t>();
  }

  const NamedTensor outputs[] = {
      {"query_start_loc", query_start_loc},   {"seqused_k", seqused_k},
      {"block_tables", block_tables},         {"paged_kv_indptr", paged_kv_indptr},
      {"paged_kv_indices", paged_kv_indices}, {"paged_kv_last_page_len", paged_kv_last_page_len}};
  for (const NamedTensor& out : outputs) {
    check_disjoint({out}, {{"tables", tables},
                           {"rows", rows},
                           {"query_lens", query_lens},
                           {"seq_lens", seq_lens},
                           {"num_blocks_per_row", num_blocks_per_row}});
    for (const NamedTensor& other : outputs) {
      if (other.tensor == out.tensor) break;
      check_disjoint({out}, {other});
    }
  }

  m.tables = tables.const_data_ptr<int32_t>();
  m.rows = rows.const_data_ptr<int32_t>();
  m.query_lens = query_lens.const_data_ptr<int32_t>();
  m.seq_lens = seq_lens.const_data_ptr<int32_t>();
  m.counts = num_blocks_per_row.const_data_ptr<int32_t>();
  m.most_tokens = static_cast<int32_t>(
      max_num_tokens < m.groups.num_positions ? max_num_tokens : m.groups.num_positions);
  m.query_start = query_start_loc.mutable_data_ptr<int32_t>();
  m.seqused = seqused_k.mutable_data_ptr<int32_t>();
  m.seqused_stride = seqused_k.stride(0);
  return m;
}

// Throws the error for request i. The row and the lengths are passed as arguments, because the
// arrays may be on a device.
[[noreturn]] inline void fail_request(const AttentionMetadata& m, int64_t i, int32_t row,
                                      int32_t query_len, int32_t seq_len) {
  const std::string at = "[" + std::to_string(i) + "] is ";
  if (row < -1 || row >= m.groups.num_rows) {
    fail("rows" + at + std::to_string(row) + ": expected -1 (a padded request) to " +
         std::to_string(m.groups.num_rows - 1));
  }
  if (query_len < 0) {
    fail("query_lens" + at + std::to_string(query_len) + ": expected 0 or more");
  }
  const std::string text = "seq_lens" + at + std::to_string(seq_len) + ": expected ";
  if (seq_len < query_len) {
    fail(text + "at least query_lens[" + std::to_string(i) + "], which is " +
         std::to_string(query_len) + ", because seq_lens includes the tokens of this step");
  }
  if (seq_len > m.groups.num_positions) {
    fail(text + "at most " + std::to_string(m.groups.num_positions) +
         ", the number of tokens for which a row has columns");
  }
  if (seq_len > m.most_tokens) {
    fail(text + "at most max_num_tokens, which is " + std::to_string(m.most_tokens));
  }
  fail(text + "less, because row " + std::to_string(row) +
       " of some group holds no block for its last token: append blocks first");
}

[[noreturn]] inline void fail_query_total() {
  fail("query_lens add up to 2^31 or more: expected fewer, because query_start_loc is int32");
}

}  // namespace kvcache
