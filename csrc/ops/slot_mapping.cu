// SPDX-License-Identifier: Apache-2.0
#include "ops/slot_mapping.h"

#include <type_traits>

#include "ops/dependent_launch.h"
#include "ops/device.h"

namespace kvcache {
namespace {

constexpr unsigned kThreads = 256;
// Maximum number of query_start_loc entries in shared memory, per thread block.
constexpr unsigned kStarts = 4 * kThreads;

// Finds requests like SlotMapping::request_of, with every `step`-th entry of query_start_loc in
// shared memory. All of these entries are loaded at once. A search in device memory would instead
// wait for each entry in turn.
class RequestFinder {
 public:
  // Must be called by all threads in the thread block.
  __device__ RequestFinder(const SlotMapping& m, int32_t* starts) : m_(m), starts_(starts) {
    step_ = static_cast<uint32_t>((m.num_requests + kStarts - 1) / kStarts);
    if (step_ > 0) end_ = m.query_start[m.num_requests];
#pragma unroll
    for (unsigned u = 0; u < kStarts / kThreads; ++u) {
      const unsigned n = threadIdx.x + u * kThreads;
      const int64_t r = int64_t{n} * step_;
      if (r < m.num_requests) starts[n] = m.query_start[r];
    }
    __syncthreads();
  }

  __device__ int64_t request_of(int64_t i) const {
    if (step_ == 0 || i < starts_[0] || i >= end_) return -1;
    const int64_t num_starts = (m_.num_requests + step_ - 1) / step_;
    const int64_t first = last_up_to(starts_, 0, num_starts, i) * step_;
    return last_up_to(m_.query_start, first, min(first + step_, m_.num_requests), i);
  }

 private:
  const SlotMapping& m_;
  const int32_t* starts_;
  uint32_t step_;  // 0 if there are no requests
  int32_t end_ = 0;
};

// Runs one thread per output entry (x) and group (y): first the tokens, then the entries after the
// last token. Because the work is divided by token, long and short requests are equally fast.
template <class Slot, bool kByRequest>
__global__ void __launch_bounds__(kThreads) slot_mapping_kernel(const SlotMapping m) {
  begin_after_previous_kernel();
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const bool is_token = i < m.num_tokens;
  const int64_t position = is_token ? m.positions[i] : -1;
  int32_t row = -1;
  if constexpr (kByRequest) {
    __shared__ int32_t starts[kStarts];
    const RequestFinder finder(m, starts);
    const int64_t request = is_token ? finder.request_of(i) : -1;
    if (request >= 0) row = m.rows[request];
  } else {
    if (is_token) row = m.rows[i];
  }
  if (i >= m.num_out) return;
  const int g = static_cast<int>(blockIdx.y);
  int64_t slot = kNoSlot;
  if (row >= 0 && !m.bad_row(row) && !m.outside(position)) {
    // Only this group's row length is checked, because other groups may hold a block for the
    // position. The entry is loaded before the length is compared, so that both loads overlap.
    const int64_t num_held = m.counts == nullptr ? INT64_MAX : m.num_held(g, row);
    slot = m.slot(g, row, position);
    if (position >= num_held) slot = kNoSlot;
  }
  static_cast<Slot*>(m.out)[g * m.num_out + i] = static_cast<Slot>(slot);
}

void check_values(const SlotMapping& m, cudaStream_t stream) {
  if (m.query_start != nullptr) {
    const BadQueryStart bad{m.query_start, m.num_tokens};
    const int64_t r = first_bad_on_device(bad, m.num_requests + 1, stream);
    if (r >= 0) fail_query_start(r, m.num_tokens);
  }
  const int64_t i = first_bad_on_device(m, m.num_tokens, stream);
  if (i < 0) return;
  int64_t at = i;
  if (m.query_start != nullptr) {
    at = 0;  // on the host, token i's request must be found again
    while (at + 1 < m.num_requests && fetch(m.query_start + at + 1, stream) <= i) ++at;
  }
  fail_slot_mapping(m, i, fetch(m.rows + at, stream), fetch(m.positions + i, stream));
}

void slot_mapping_cuda(Tensor tables, Tensor groups, int64_t num_rows, Tensor rows,
                       std::optional<Tensor> query_start_loc, Tensor positions,
                       std::optional<Tensor> num_blocks_per_row, Tensor out) {
  const SlotMapping m = checked_slot_mapping(tables, groups, num_rows, rows, query_start_loc,
                                             positions, num_blocks_per_row, out);
  if (m.num_out == 0 || m.groups.num_groups == 0) return;
  const OnDevice device(out);
  if (checked_mode()) check_values(m, device.stream);
  const dim3 grid(static_cast<unsigned>((m.num_out + kThreads - 1) / kThreads),
                  static_cast<unsigned>(m.groups.num_groups));
  const auto launch = [&](auto slot, auto by_request) {
    KV_LAUNCH_DEPENDENT((slot_mapping_kernel<decltype(slot), by_request>), grid, dim3(kThreads),
                        device, m);
  };
  const auto launch_wide = [&](auto by_request) {
    m.wide ? launch(int64_t{}, by_request) : launch(int32_t{}, by_request);
  };
  m.query_start == nullptr ? launch_wide(std::false_type{}) : launch_wide(std::true_type{});
}

}  // namespace

KV_REGISTER_CUDA("slot_mapping", slot_mapping_cuda)

}  // namespace kvcache
