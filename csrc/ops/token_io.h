// SPDX-License-Identifier: Apache-2.0
// Copies the K and V of individual tokens to and from the paged cache, in one layer or in all
// layers.
//
// Caches are [num_blocks, block_size, num_kv_heads, head_size]. The last dimension is dense and the
// other strides are arbitrary, so the same code handles NHD and HND. If a cache contains all
// layers, num_layers is the first dimension. If the tokens have the dtype of the cache, their bytes
// are copied unchanged. An fp8 cache also accepts tokens with a wider dtype, which are divided by a
// scale (quantize.h).
//
// Block 0 is the null block. As for slot -1, writes to its slots are dropped, and reads return
// zeros. Therefore, tokens outside a window and padding tokens do not affect any request.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>

#include "ops/checks.h"
#include "ops/overlap.h"
#include "ops/quantize.h"
#include "worker/fast_divisor.h"
#include "worker/host_device.h"

namespace kvcache {

// The tokens, pages and scales of K or V. Strides are in bytes, and 0 for a dimension of size 1.
struct TokenPages {
  char* tokens;  // [num_layers, num_tokens, num_heads, head_size]
  int64_t token_layer_stride, token_stride;
  uint32_t token_head_stride;  // 32 bits, which a GPU multiplies in one instruction
  char* pages;                 // [num_layers, num_blocks, block_size, num_heads, head_size]
  int64_t page_layer_stride, block_stride, offset_stride, page_head_stride;
  FastDivisor by_block;  // divides by the block size
  int64_t num_heads, head_size;
  int64_t token_element, page_element;
  ScalarType token_type, page_type;
  const float* scales;  // [num_layers, 1 or num_heads]; nullptr: copy bytes
  int64_t scale_layer_stride, scale_head_stride;  // strides in elements; 0: one scale for all heads

  KV_HOST_DEVICE char* token(int64_t layer, int64_t i) const {
    return tokens + layer * token_layer_stride + i * token_stride;
  }
  // Returns the offset of a slot, in [0, num_slots), within its layer's pages.
  KV_HOST_DEVICE int64_t page_place(int64_t slot) const {
    const auto n = static_cast<uint32_t>(slot);
    const uint32_t block = by_block.divide(n);
    return int64_t{block} * block_stride + int64_t{n - block * by_block.divisor} * offset_stride;
  }
  KV_HOST_DEVICE char* page(int64_t layer, int64_t slot) const {
    return pages + layer * page_layer_stride + page_place(slot);
  }
  KV_HOST_DEVICE float scale(int64_t layer, int64_t head) const {
    return scales[layer * scale_layer_stride + head * scale_head_stride];
  }
  // Returns the number of elements per token.
  KV_HOST_DEVICE int64_t width() const { return num_heads * head_size; }
  // Returns whether each token is contiguous in memory and in its page (NHD), with one scale for
  // all heads.
  KV_HOST_DEVICE bool is_contiguous() const {
    return scale_head_stride == 0 &&
           (num_heads <= 1 || (page_head_stride == head_size * page_element &&
                               token_head_stride == head_size * token_element));
  }
};

struct TokenIo {
  TokenPages sides[2];   // K and V
  const int64_t* slots;  // [num_tokens]; -1 or a slot in the null block: no slot
  int64_t num_layers, num_tokens;
  int64_t num_slots;  // num_blocks * block_size

  KV_HOST_DEVICE const TokenPages& k() const { return sides[0]; }
  KV_HOST_DEVICE const TokenPages& v() const { return sides[1]; }
  // Returns the first slot after the null block. All smaller slots belong to the null block.
  KV_HOST_DEVICE int64_t first_slot() const { return k().by_block.divisor; }
  // Returns whether token i's slot is out of range.
  KV_HOST_DEVICE bool operator()(int64_t i) const { return slots[i] < -1 || slots[i] >= num_slots; }
};

enum class Direction { kWrite, kGather };

// Calls f with an element of the tokens' dtype and the cache's fp8 format, for a side with scales.
template <class F>
auto with_formats(const TokenPages& p, F&& f) {
  const auto with_format = [&](auto element) {
    return p.page_type == ScalarType::Float8_e5m2 ? f(element, E5M2{}) : f(element, E4M3{});
  };
  if (p.token_type == ScalarType::Float) return with_format(float{});
  if (p.token_type == ScalarType::Half) return with_format(c10::Half{});
  return with_format(c10::BFloat16{});
}

// --- checks

inline bool is_quantized(const Tensor& tokens, const Tensor& cache) {
  const ScalarType from = tokens.scalar_type(), to = cache.scalar_type();
  return (to == ScalarType::Float8_e4m3fn || to == ScalarType::Float8_e5m2) &&
         (from == ScalarType::Float || from == ScalarType::Half || from == ScalarType::BFloat16);
}

inline void check_scale(const std::optional<Tensor>& scale, const std::string& name,
                        const Tensor& tokens, const std::string& tokens_name, const Tensor& cache) {
  const auto dtypes = [&] {
    return tokens_name + " has dtype " + torch::headeronly::toString(tokens.scalar_type()) +
           " and " + tokens_name + "_cache " + torch::headeronly::toString(cache.scalar_type());
  };
  if (!is_quantized(tokens, cache)) {
    if (scale) fail(name + " is given: expected None, as " + dtypes());
    return;
  }
  if (!scale) fail(name + " is None: expected scales, as " + dtypes());
  check_dtype(*scale, name.c_str(), {ScalarType::Float});
  check_contiguous(*scale, name.c_str());
  check_same_device(*scale, name.c_str(), tokens, tokens_name.c_str());
  // Index of the num_blocks dimension: 1 if the first dimension is num_layers.
  const int64_t first = cache.dim() - 4;
  const int64_t layers = first ? cache.size(0) : 1, heads = cache.size(first + 2);
  const bool one = first == 0 && scale->dim() == 0;
  const bool many = scale->dim() == first + 1 && (first == 0 || scale->size(0) == layers) &&
                    (scale->size(first) == 1 || scale->size(first) == heads);
  if (!one && !many) {
    const std::string layer = first ? std::to_string(layers) + ", " : "";
    fail(name + " has shape " + shape_of(*scale) + ": expected [" + layer + "1] or [" + layer +
         std::to_string(heads) + "]");
  }
}

// `name` is "key" or "value".
inline TokenPages checked_token_pages(const Tensor& tokens, const std::string& name,
                                      const Tensor& cache, const std::optional<Tensor>& scale) {
  const std::string cache_name = name + "_cache", scale_name = name.substr(0, 1) + "_scale";
  const int64_t first = cache.dim() == 5;  // index of the dimension after num_layers
  if (first == 0) {
    check_dim(cache, cache_name.c_str(), 4,
              "[num_blocks, block_size, num_kv_heads, head_size], or with num_layers in front");
    check_dim(tokens, name.c_str(), 3, "[num_tokens, num_kv_heads, head_size]");
  } else {
    check_dim(tokens, name.c_str(), 4,
              "[num_layers, num_tokens, num_kv_heads, head_size], because the cache has layers");
    check_size(tokens, name.c_str(), 0, cache.size(0), "the layers of the cache");
  }
  if (!is_quantized(tokens, cache)) {
    check_same_dtype(tokens, name.c_str(), cache, cache_name.c_str());
  }
  check_same_device(tokens, name.c_str(), cache, cache_name.c_str());
  check_size(tokens, name.c_str(), first + 1, cache.size(first + 2), "the heads of the cache");
  check_size(tokens, name.c_str(), first + 2, cache.size(first + 3), "the head size of the cache");
  check_scale(scale, scale_name, tokens, name, cache);

  const int64_t num_heads = cache.size(first + 2), head_size = cache.size(first + 3);
  // Kernels count a token's bytes in 32 bits.
  if (head_size > 0 && num_heads > INT32_MAX / 16 / head_size) {
    fail(name + " has shape " + shape_of(tokens) + ": expected smaller tokens");
  }
  if (tokens.numel() > 0 && head_size > 1 && tokens.stride(first + 2) != 1) {
    fail(name + " has stride " + std::to_string(tokens.stride(first + 2)) +
         " in its last dimension: expected 1");
  }
  if (cache.numel() > 0 && head_size > 1 && cache.stride(first + 3) != 1) {
    fail(cache_name + " has stride " + std::to_string(cache.stride(first + 3)) +
         " in its last dimension: expected 1 (NHD or HND storage)");
  }
  const auto stride = [](const Tensor& t, int64_t dim) {
    const bool steps = dim >= 0 && t.size(dim) > 1;
    return steps ? t.stride(dim) * static_cast<int64_t>(t.element_size()) : 0;
  };
  TokenPages p{};
  p.tokens = static_cast<char*>(tokens.data_ptr());
  p.token_layer_stride = stride(tokens, first - 1);
  p.token_stride = stride(tokens, first);
  const int64_t head_stride = stride(tokens, first + 1);
  if (head_stride > UINT32_MAX) {
    fail(name + " has heads " + std::to_string(head_stride) +
         " bytes apart: expected fewer than 2^32");
  }
  p.token_head_stride = static_cast<uint32_t>(head_stride);
  p.pages = static_cast<char*>(cache.data_ptr());
  p.page_layer_stride = stride(cache, first - 1);
  p.block_stride = stride(cache, first);
  p.offset_stride = stride(cache, first + 1);
  p.page_head_stride = stride(cache, first + 2);
  p.by_block = fast_divisor(std::clamp<int64_t>(cache.size(first + 1), 1, INT32_MAX));
  p.num_heads = num_heads;
  p.head_size = head_size;
  p.token_element = static_cast<int64_t>(tokens.element_size());
  p.page_element = static_cast<int64_t>(cache.element_size());
  p.token_type = tokens.scalar_type();
  p.page_type = cache.scalar_type();
  if (scale) {
    const int64_t per_layer = scale->dim() == 0 ? 1 : scale->size(first);
    p.scales = scale->const_data_ptr<float>();
    p.scale_layer_stride = per_layer;
    p.scale_head_stride = per_layer > 1;
  }
  return p;
}

inline TokenIo checked_token_io(Direction direction, const Tensor& key, const Tensor& value,
                                const Tensor& key_cache, const Tensor& value_cache,
                                const Tensor& slot_mapping, const std::optional<Tensor>& k_scale,
                                const std::optional<Tensor>& v_scale) {
  const TokenPages k = checked_token_pages(key, "key", key_cache, k_scale);
  const TokenPages v = checked_token_pages(value, "value", value_cache, v_scale);
  check_same_device(value, "value", key, "key");
  const bool writes = direction == Direction::kWrite;
  const Tensor &k_out = writes ? key_cache : key, &v_out = writes ? value_cache : value;
  const char *k_name = writes ? "key_cache" : "key", *v_name = writes ? "value_cache" : "value";
  check_no_overlap(k_out, k_name);
  check_no_overlap(v_out, v_name);
  check_separate(v_out, v_name, k_out, k_name);
  const Tensor &k_in = writes ? key : key_cache, &v_in = writes ? value : value_cache;
  const char *k_in_name = writes ? "key" : "key_cache",
             *v_in_name = writes ? "value" : "value_cache";
  check_disjoint({{k_name, k_out}, {v_name, v_out}}, {{k_in_name, k_in},
                                                      {v_in_name, v_in},
                                                      {"slot_mapping", slot_mapping},
                                                      {"k_scale", k_scale},
                                                      {"v_scale", v_scale}});

  check_dim(value_cache, "value_cache", key_cache.dim(), "as many dimensions as key_cache");
  const int64_t first = key_cache.dim() - 4;
  if (first)
    check_size(value_cache, "value_cache", 0, key_cache.size(0), "the layers of key_cache");
  const int64_t num_tokens = key.size(first), num_layers = first ? key.size(0) : 1;
  check_size(value, "value", first, num_tokens, "the tokens of key");
  check_size(value_cache, "value_cache", first, key_cache.size(first), "the blocks of key_cache");
  check_size(value_cache, "value_cache", first + 1, key_cache.size(first + 1),
             "the block size of key_cache");
  check_dim(slot_mapping, "slot_mapping", 1, "[num_tokens]");
  check_dtype(slot_mapping, "slot_mapping", {ScalarType::Long});
  check_contiguous(slot_mapping, "slot_mapping");
  check_same_device(slot_mapping, "slot_mapping", key, "key");
  check_size(slot_mapping, "slot_mapping", 0, num_tokens, "the tokens of key");
  const int64_t num_blocks = key_cache.size(first), block_size = key_cache.size(first + 1);
  if (num_blocks > 0 && block_size > INT32_MAX / num_blocks) {  // kernels count slots in 31 bits
    fail("key_cache has shape " + shape_of(key_cache) + ": expected fewer than 2^31 slots");
  }
  if (num_tokens > INT32_MAX) fail("key has shape " + shape_of(key) + ": expected fewer tokens");
  if (num_layers > UINT16_MAX) fail("key has shape " + shape_of(key) + ": expected fewer layers");
  return {{k, v},
          slot_mapping.const_data_ptr<int64_t>(),
          num_layers,
          num_tokens,
          num_blocks * block_size};
}

// Throws the error for token i. The slot is passed as an argument, because the array may be on a
// device.
[[noreturn]] inline void fail_token_io(const TokenIo& io, int64_t i, int64_t slot) {
  fail("slot_mapping[" + std::to_string(i) + "] is " + std::to_string(slot) +
       ": expected -1 (no slot) to " + std::to_string(io.num_slots - 1));
}

}  // namespace kvcache
