// SPDX-License-Identifier: Apache-2.0
#include "ops/rope_write.h"

#include <type_traits>

#include "ops/dependent_launch.h"
#include "ops/device.h"
#include "ops/launch_ids.h"
#include "ops/warp_extent.h"

namespace kvcache {
namespace {

constexpr unsigned kWarps = 4;  // per thread block

__device__ __forceinline__ float merge_sums(float sum) {
#pragma unroll
  for (unsigned step = kWarp / 2; step > 0; step /= 2) {
    sum += __shfl_xor_sync(kFullWarp, sum, step);
  }
  return sum;
}

// Calls f with the format of a cache of codes.
template <class F>
__device__ __forceinline__ void with_code_format(const TokenPages& p, F&& f) {
  if (p.page_type == ScalarType::Float8_e4m3fn) return f(E4M3{});
  if (p.page_type == ScalarType::Float8_e5m2) return f(E5M2{});
  if (p.page_type == ScalarType::Char) return f(Int8{});
  if (p.group_scale_type == ScalarType::Float) return f(Int4{});
  f(NvFp4{});
}

// Writes one head in groups, whose scales are derived from the elements.
template <class Format, class Element>
__device__ __forceinline__ void write_groups(const TokenPages& p, int64_t slot, int64_t head,
                                             const Element* row, uint8_t* page) {
  constexpr int kCodes = kPerByte<Format>;
  const auto size = static_cast<uint32_t>(p.group_size),
             num_groups = static_cast<uint32_t>(p.head_size) / size;
  for (uint32_t which = 0; which < num_groups; ++which, row += size, page += size / kCodes) {
    typename Group<Format>::Extent extent;
    for (uint32_t j = threadIdx.x; j < size; j += kWarp) extent.add(widen(row[j]));
    merge_lanes(extent);
    const Group<Format> group(extent, p.rule);
    if (threadIdx.x == 0) {
      *p.group_scale<typename Group<Format>::Scale>(0, slot, head, which) = group.stored;
    }
    for (uint32_t j = threadIdx.x; j < size / kCodes; j += kWarp) {
      if constexpr (kCodes == 2) {
        page[j] = static_cast<uint8_t>(group.encode(widen(row[2 * j])) |
                                       group.encode(widen(row[2 * j + 1])) << 4);
      } else {
        page[j] = group.encode(widen(row[j]));
      }
    }
  }
}

// Writes one head of a token that has a slot.
template <class Element>
__device__ __forceinline__ void write_row(const TokenPages& p, int64_t slot, int64_t head,
                                          const Element* row) {
  char* const page = p.page(0, slot) + head * p.page_head_stride;
  const auto head_size = static_cast<uint32_t>(p.head_size);
  if (p.group_scales != nullptr) {
    with_code_format(p, [&](auto format) {
      write_groups<decltype(format)>(p, slot, head, row, reinterpret_cast<uint8_t*>(page));
    });
  } else if (p.scales != nullptr) {
    const float scale = p.scale(0, head);
    with_code_format(p, [&](auto format) {
      if constexpr (kPerByte<decltype(format)> == 1) {
        for (uint32_t j = threadIdx.x; j < head_size; j += kWarp) {
          quantize<decltype(format)>(row[j], scale, reinterpret_cast<uint8_t*>(page)[j]);
        }
      }
    });
  } else {
    for (uint32_t j = threadIdx.x; j < head_size; j += kWarp) {
      reinterpret_cast<Element*>(page)[j] = row[j];
    }
  }
}

// The grid dimensions are tokens (x) and the heads of query, key and value (y). The thread block
// dimensions are lanes (x) and heads (y). A warp holds its row in shared memory.
template <class Element>
__global__ void __launch_bounds__(kWarps* kWarp) rope_write_kernel(KV_PARAMETER RopeWrite r) {
  begin_after_previous_kernel();
  __shared__ Element shared[kWarps][kMaxHeadSize];
  int64_t head = blockIdx.y * kWarps + threadIdx.y;
  int side = 0;
  while (side < 3 && head >= r.rows[side].num_heads) head -= r.rows[side++].num_heads;
  if (side == 3) return;  // the same for all lanes of a warp
  const Rows& rows = r.rows[side];
  const int64_t i = blockIdx.x, slot = r.io.slots[i];
  const bool is_written = side > 0 && slot >= r.io.first_slot() && slot < r.io.num_slots;
  if (r.has_bad_position(i) || !(is_written || rows.out != nullptr)) return;  // see checked_mode

  Element* const row = shared[threadIdx.y];
  const auto* const in = reinterpret_cast<const Element*>(rows.row(i, head));
  const auto n = static_cast<uint32_t>(rows.head_size);
  float sum = 0.0f;
  for (uint32_t j = threadIdx.x; j < n; j += kWarp) {
    row[j] = in[j];
    sum += product(widen(row[j]), widen(row[j]));
  }
  if (rows.weight != nullptr) {
    const float factor = norm_factor(merge_sums(sum), n, r.eps);
    for (uint32_t j = threadIdx.x; j < n; j += kWarp) {
      const float weight = number_at<Element>(rows.weight, j, rows.has_float_weight);
      narrow(normalized<Element>(widen(row[j]), factor, weight, rows.has_float_weight), row[j]);
    }
  }
  __syncwarp();
  if (rows.is_rotated) {
    const char* const cos_sin = r.cos_sin + r.position(i) * r.cos_sin_stride;
    const auto num_pairs = static_cast<uint32_t>(r.rotary_dim / 2);
    for (uint32_t j = threadIdx.x; j < num_pairs; j += kWarp) {
      Element& first = row[r.is_neox ? j : 2 * j];
      Element& second = row[r.is_neox ? num_pairs + j : 2 * j + 1];
      float x = widen(first), y = widen(second);
      rotate_pair<Element>(x, y, number_at<Element>(cos_sin, j, r.has_float_cos_sin),
                           number_at<Element>(cos_sin, num_pairs + j, r.has_float_cos_sin));
      narrow(x, first);
      narrow(y, second);
    }
    __syncwarp();
  }
  if (rows.out != nullptr) {
    auto* const out = reinterpret_cast<Element*>(rows.out_row(i, head));
    for (uint32_t j = threadIdx.x; j < n; j += kWarp) out[j] = row[j];
  }
  if (is_written) write_row(r.io.sides[side - 1], slot, head, row);
}

template <class Element>
void launch(const RopeWrite& r, const OnDevice& device) {
  unsigned num_heads = 0;
  for (const Rows& rows : r.rows) num_heads += static_cast<unsigned>(rows.num_heads);
  if (num_heads == 0 || r.io.num_tokens == 0) return;
  const dim3 grid(unsigned(r.io.num_tokens), (num_heads + kWarps - 1) / kWarps);
  KV_LAUNCH_DEPENDENT((rope_write_kernel<Element>), grid, dim3(kWarp, kWarps), device, r);
}

void rope_write_kv_cuda(Tensor positions, Tensor query, Tensor key, Tensor value,
                        Tensor cos_sin_cache, Tensor key_cache, Tensor value_cache,
                        Tensor slot_mapping, std::optional<Tensor> k_scale,
                        std::optional<Tensor> v_scale, int64_t scale_rule, bool is_neox,
                        bool rotates_value, std::optional<Tensor> q_weight,
                        std::optional<Tensor> k_weight, double eps, std::optional<Tensor> query_out,
                        std::optional<Tensor> key_out, std::optional<Tensor> value_out) {
  const RopeWrite r =
      checked_rope_write(positions, query, key, value, cos_sin_cache, key_cache, value_cache,
                         slot_mapping, k_scale, v_scale, scale_rule, is_neox, rotates_value,
                         q_weight, k_weight, eps, query_out, key_out, value_out);
  const OnDevice device(key);
  if (checked_mode()) {
    const int64_t i = first_bad_on_device(r, r.io.num_tokens, device.stream);
    if (i >= 0) {
      const int64_t position =
          r.has_long_positions ? fetch(static_cast<const int64_t*>(r.positions) + i, device.stream)
                               : fetch(static_cast<const int32_t*>(r.positions) + i, device.stream);
      fail_rope_write(r, i, position, fetch(r.io.slots + i, device.stream));
    }
  }
  with_token_type(r, [&](auto element) { launch<decltype(element)>(r, device); });
}

}  // namespace

KV_REGISTER_CUDA("rope_write_kv", rope_write_kv_cuda)

}  // namespace kvcache
