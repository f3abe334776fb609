// SPDX-License-Identifier: Apache-2.0
#include "ops/attention_metadata.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>

namespace kvcache {
namespace {

void check_values(const AttentionMetadata& m) {
  int64_t queries = 0;
  for (int64_t i = 0; i < m.num_requests; ++i) {
    if (m(i)) fail_request(m, i, m.rows[i], m.query_lens[i], m.seq_lens[i]);
    queries += m.query_lens[i];
  }
  if (queries > INT32_MAX) fail_query_total();
}

void write_block_table_row(const AttentionMetadata& m, int g, int64_t i, int32_t row,
                           const KVExtent& kv) {
  int32_t* out = m.block_table_row(g, i);
  const int32_t columns = m.num_written[g];
  const int32_t hidden = row < 0 ? columns : kv.first_page;
  std::fill(out, out + hidden, 0);
  if (hidden < columns) {
    const int32_t* ids = m.table_row(g, row);
    std::copy(ids + hidden, ids + columns, out + hidden);
  }
}

void run_group(const AttentionMetadata& m, int g) {
  int64_t start = 0;  // start of the request's pages in the page list
  for (int64_t i = 0; i < m.num_out; ++i) {
    // Like row_of, but without its checks, because the rows were validated.
    const int32_t row = i < m.num_requests ? m.rows[i] : -1;
    const KVExtent kv = m.extent(g, i, row);
    m.seqused[g * m.seqused_stride + i] = kv.num_tokens;
    if (m.block_tables != nullptr) write_block_table_row(m, g, i, row, kv);
    if (m.page_indptr == nullptr) continue;
    m.page_indptr[g * m.page_indptr_stride + i] = static_cast<int32_t>(start);
    m.last_page_len[g * m.last_page_len_stride + i] = kv.last_page_len;
    if (m.page_indices != nullptr && kv.num_pages > 0) {
      const int32_t* ids = m.table_row(g, row) + kv.first_page;
      std::copy(ids, ids + kv.num_pages, m.page_list(g) + start);
    }
    start += kv.num_pages;
  }
  if (m.page_indptr == nullptr) return;
  m.page_indptr[g * m.page_indptr_stride + m.num_out] = static_cast<int32_t>(start);
  if (m.page_indices != nullptr) {
    // Writes null entries where page_place maps columns that have no visible page.
    int32_t* list = m.page_list(g);
    std::fill(list + start, list + int64_t{m.num_out} * m.num_written[g], 0);
  }
}

void attention_metadata_cpu(Tensor tables, Tensor groups, int64_t num_rows, Tensor rows,
                            Tensor query_lens, Tensor seq_lens, Tensor num_blocks_per_row,
                            int64_t max_num_tokens, Tensor query_start_loc, Tensor seqused_k,
                            std::optional<Tensor> block_tables,
                            std::optional<Tensor> paged_kv_indptr,
                            std::optional<Tensor> paged_kv_indices,
                            std::optional<Tensor> paged_kv_last_page_len) {
  const AttentionMetadata m = checked_attention_metadata(
      tables, groups, num_rows, rows, query_lens, seq_lens, num_blocks_per_row, max_num_tokens,
      query_start_loc, seqused_k, block_tables, paged_kv_indptr, paged_kv_indices,
      paged_kv_last_page_len);
  check_values(m);
  m.query_start[0] = 0;
  for (int64_t i = 0; i < m.num_out; ++i) {
    m.query_start[i + 1] = m.query_start[i] + m.num_queries(i);
  }
  for (int g = 0; g < m.groups.num_groups; ++g) run_group(m, g);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(kvcache, CPU, m) {
  m.impl("attention_metadata", TORCH_BOX(&attention_metadata_cpu));
}

}  // namespace kvcache
