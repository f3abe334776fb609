// SPDX-License-Identifier: Apache-2.0
#include "ops/attention_metadata.h"

#include <algorithm>
#include <vector>

#include "ops/dependent_launch.h"
#include "ops/device.h"
#include "ops/launch_ids.h"
#include "ops/occupancy.h"

namespace kvcache {
namespace {

// These constants were chosen by estimating the amount of work. They have not been tuned on a GPU.
constexpr unsigned kThreads = 256;
constexpr unsigned kWarps = kThreads / 32;
constexpr unsigned kInFlight = 8;  // number of table entries that a thread loads at once
constexpr int64_t kPass = int64_t{kThreads} * kInFlight;  // entries per pass over a thread block
constexpr int kMaxTile = static_cast<int>(kThreads);      // number of requests per thread block
// The maximum number of tiles. Every tile computes prefix sums over all requests; with more tiles,
// these sums would cost more than the copies, so tiles grow instead.
constexpr int kMostTiles = 128;

// The sums that a thread block needs: over the requests before its own, and over all requests.
struct Sums {
  int64_t queries_before;
  int64_t pages_before, pages;
};

// Sums the values of all threads in the block, and returns the sums to every thread. All threads
// must call this function.
__device__ inline Sums sum_over_block(Sums sums) {
  __shared__ Sums of_warp[kWarps];
  for (int step = 16; step > 0; step /= 2) {
    sums.queries_before += __shfl_xor_sync(0xFFFFFFFFu, sums.queries_before, step);
    sums.pages_before += __shfl_xor_sync(0xFFFFFFFFu, sums.pages_before, step);
    sums.pages += __shfl_xor_sync(0xFFFFFFFFu, sums.pages, step);
  }
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = sums;
  __syncthreads();
  sums = {0, 0, 0};
  for (unsigned w = 0; w < kWarps; ++w) {
    sums.queries_before += of_warp[w].queries_before;
    sums.pages_before += of_warp[w].pages_before;
    sums.pages += of_warp[w].pages;
  }
  return sums;
}

__device__ inline Sums sums_up_to(const AttentionMetadata& m, int g, int64_t first) {
  Sums sums = {0, 0, 0};
  const int64_t end = m.page_indptr != nullptr ? m.num_requests : first;
  for (int64_t i = threadIdx.x; i < end; i += kThreads) {
    const int32_t pages = m.page_indptr != nullptr ? m.extent(g, i, m.row_of(g, i)).num_pages : 0;
    sums.pages += pages;
    if (i < first) {
      sums.pages_before += pages;
      sums.queries_before += m.num_queries(i);
    }
  }
  return sum_over_block(sums);
}

__device__ inline int32_t saturated(int64_t sum) {
  return static_cast<int32_t>(sum < INT32_MAX ? sum : INT32_MAX);
}

// Runs one thread block per tile of requests (x), group (y) and range of columns (z). Each thread
// block computes the sums over the requests before its tile, so it does not wait for other thread
// blocks, and no state is kept between launches.
__global__ void __launch_bounds__(kThreads)
    attention_metadata_kernel(KV_PARAMETER AttentionMetadata m, int tile) {
  begin_after_previous_kernel();
  __shared__ KVExtent kv[kMaxTile];
  __shared__ int32_t num_queries[kMaxTile];
  __shared__ int32_t rows[kMaxTile];
  __shared__ int64_t page_start[kMaxTile];
  const int g = static_cast<int>(blockIdx.y);
  const int64_t first = int64_t{blockIdx.x} * tile;
  const int count = static_cast<int>(min(int64_t{tile}, m.num_out - first));
  const Sums sums = sums_up_to(m, g, first);

  const int t = static_cast<int>(threadIdx.x);
  if (t < count) {
    rows[t] = m.row_of(g, first + t);
    kv[t] = m.extent(g, first + t, rows[t]);
    num_queries[t] = m.num_queries(first + t);
  }
  __syncthreads();
  // A tile needs one more entry than it has requests, for the end of the last request.
  if (t <= count) {
    int64_t queries = sums.queries_before, pages = sums.pages_before;
    for (int before = 0; before < t; ++before) {
      queries += num_queries[before];
      pages += kv[before].num_pages;
    }
    const int64_t i = first + t;
    const bool writes = blockIdx.z == 0 && (t < count || i == m.num_out);
    if (writes && g == 0) m.query_start[i] = saturated(queries);
    if (writes && m.page_indptr != nullptr) {
      m.page_indptr[g * m.page_indptr_stride + i] = static_cast<int32_t>(pages);
    }
    if (t < count) {
      page_start[t] = pages;
      if (blockIdx.z == 0) {
        m.seqused[g * m.seqused_stride + i] = kv[t].num_tokens;
        if (m.last_page_len != nullptr) {
          m.last_page_len[g * m.last_page_len_stride + i] = kv[t].last_page_len;
        }
      }
    }
  }
  if (m.block_tables == nullptr && m.page_indices == nullptr) return;
  __syncthreads();

  // The sums are below 2^31, because the outputs have at least as many entries.
  const int32_t columns = m.num_written[g];
  const int64_t num_entries = int64_t{count} * columns;
  for (int64_t pass = blockIdx.z * kPass; pass < num_entries; pass += gridDim.z * kPass) {
    int32_t ids[kInFlight];
#pragma unroll
    for (unsigned k = 0; k < kInFlight; ++k) {  // all loads precede the first store
      const int64_t entry = pass + k * kThreads + threadIdx.x;
      ids[k] = 0;
      if (entry < num_entries) {
        const auto request = m.by_written[g].divide(static_cast<uint32_t>(entry));
        const auto c = static_cast<int32_t>(entry - int64_t{request} * columns);
        if (rows[request] >= 0 && c >= kv[request].first_page) {
          ids[k] = m.table_row(g, rows[request])[c];
        }
      }
    }
#pragma unroll
    for (unsigned k = 0; k < kInFlight; ++k) {
      const int64_t entry = pass + k * kThreads + threadIdx.x;
      if (entry >= num_entries) break;
      const auto request = m.by_written[g].divide(static_cast<uint32_t>(entry));
      const auto c = static_cast<int32_t>(entry - int64_t{request} * columns);
      const int64_t i = first + request;
      if (m.block_tables != nullptr) m.block_table_row(g, i)[c] = ids[k];
      if (m.page_indices != nullptr) {
        const KVExtent& extent = kv[request];
        const bool listed = c >= extent.first_page && c - extent.first_page < extent.num_pages;
        m.page_list(g)[m.page_place(g, i, c, extent, page_start[request], sums.pages)] =
            listed ? ids[k] : 0;
      }
    }
  }
}

void check_values(const AttentionMetadata& m, cudaStream_t stream) {
  const int64_t i = first_bad_on_device(m, m.num_requests, stream);
  if (i >= 0) {
    fail_request(m, i, fetch(m.rows + i, stream), fetch(m.query_lens + i, stream),
                 fetch(m.seq_lens + i, stream));
  }
  std::vector<int32_t> lens(static_cast<size_t>(m.num_requests));
  KV_CUDA_CHECK(cudaMemcpyAsync(lens.data(), m.query_lens, lens.size() * sizeof(int32_t),
                                cudaMemcpyDeviceToHost, stream));
  KV_CUDA_CHECK(cudaStreamSynchronize(stream));
  int64_t queries = 0;
  for (const int32_t len : lens) queries += len;
  if (queries > INT32_MAX) fail_query_total();
}

void attention_metadata_cuda(Tensor tables, Tensor groups, int64_t num_rows, Tensor rows,
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
  const OnDevice device(query_start_loc);
  if (checked_mode()) check_values(m, device.stream);
  // A tile has at most kThreads - 1 requests, because each request needs one thread, and the end of
  // the last request needs another.
  const int tile = std::clamp((m.num_out + kMostTiles - 1) / kMostTiles, 1, kMaxTile - 1);
  const int64_t num_tiles = std::max(1, (m.num_out + tile - 1) / tile);
  const int32_t widest = *std::max_element(m.num_written, m.num_written + m.groups.num_groups);
  const bool copies = m.block_tables != nullptr || m.page_indices != nullptr;
  const int64_t passes = copies ? (int64_t{tile} * widest + kPass - 1) / kPass : 1;
  const int64_t at_once = resident_blocks<attention_metadata_kernel, int{kThreads}>(device);
  const int64_t most = std::max<int64_t>(1, at_once / (num_tiles * m.groups.num_groups));
  const dim3 grid(static_cast<unsigned>(num_tiles), static_cast<unsigned>(m.groups.num_groups),
                  static_cast<unsigned>(std::clamp<int64_t>(passes, 1, most)));
  KV_LAUNCH_DEPENDENT(attention_metadata_kernel, grid, dim3(kThreads), device, m, tile);
}

}  // namespace

KV_REGISTER_CUDA("attention_metadata", attention_metadata_cuda)

}  // namespace kvcache
