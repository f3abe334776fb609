// SPDX-License-Identifier: Apache-2.0
// Copies the K and V of individual tokens to and from the paged cache, in one layer or in all
// layers.
//
// Caches are [num_blocks, block_size, num_kv_heads, head_size]. The last dimension is dense and the
// other strides are arbitrary, so the same code handles NHD and HND. If a cache contains all
// layers, num_layers is the first dimension. If the tokens have the dtype of the cache, their bytes
// are copied unchanged. A cache of fp8 or int8 also accepts tokens with a wider dtype. These are
// divided by given scales (quantize.h), or by scales that are derived from the tokens and stored in
// the cache (group_scales.h). Such a cache may also hold int4 or nvfp4, with two elements per byte.
//
// Block 0 is the null block. As for slot -1, writes to its slots are dropped, and reads return
// zeros. Therefore, tokens outside a window and padding tokens do not affect any request.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>

#include "ops/checks.h"
#include "ops/group_scales.h"
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
  const float* scales;  // [num_layers, 1 or num_heads]; nullptr: none are given
  int64_t scale_layer_stride, scale_head_stride;  // strides in elements; 0: one scale for all heads
  char* group_scales;  // [num_layers, num_blocks, block_size, num_heads, num_groups]; or nullptr
  int64_t group_layer_stride, group_block_stride, group_offset_stride, group_head_stride;
  int64_t group_stride, group_size;  // group_size: elements per group
  ScalarType group_scale_type;       // Float, or Float8_e4m3fn for nvfp4
  ScaleRule rule;

  KV_HOST_DEVICE char* token(int64_t layer, int64_t i) const {
    return tokens + layer * token_layer_stride + i * token_stride;
  }
  // Returns the offset of a slot, in [0, num_slots), within its layer's pages.
  KV_HOST_DEVICE int64_t page_place(int64_t slot) const {
    const auto n = static_cast<uint32_t>(slot);
    const uint32_t block = by_block.divide(n);
    return int64_t{block} * block_stride + int64_t{n - block * by_block.divisor} * offset_stride;
  }
  // Returns the address of a group's scale, a `Group<Format>::Scale`.
  template <class Scale = float>
  KV_HOST_DEVICE Scale* group_scale(int64_t layer, int64_t slot, int64_t head,
                                    int64_t group) const {
    const auto n = static_cast<uint32_t>(slot);
    const uint32_t block = by_block.divide(n);
    return reinterpret_cast<Scale*>(group_scales + layer * group_layer_stride +
                                    int64_t{block} * group_block_stride +
                                    int64_t{n - block * by_block.divisor} * group_offset_stride +
                                    head * group_head_stride + group * group_stride);
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

// Tokens in positions of several requests, in place of a list of slots.
struct Context {
  const int32_t* block_tables;  // [num_requests, num_columns]
  const int32_t* cu_seq_lens;   // [num_requests + 1]: first token of each request
  const int32_t* seq_starts;    // [num_requests]: first position of each request; nullptr: 0
  // [num_tokens]: position of each token after its request's first, or -1 for none; nullptr:
  // consecutive positions.
  const int32_t* positions;
  int64_t table_stride;
  int32_t num_requests, num_columns;
};

enum class Direction { kWrite, kGather, kGatherContext };

struct TokenIo {
  TokenPages sides[2];  // K and V
  const int64_t*
      slots;  // [num_tokens]; -1 or a slot in the null block: no slot; nullptr: `context`
  int64_t num_layers, num_tokens;
  int64_t num_slots;  // num_blocks * block_size
  Context context;

  KV_HOST_DEVICE const TokenPages& k() const { return sides[0]; }
  KV_HOST_DEVICE const TokenPages& v() const { return sides[1]; }
  // Returns the first slot after the null block. All smaller slots belong to the null block.
  KV_HOST_DEVICE int64_t first_slot() const { return k().by_block.divisor; }
  // Returns token i's slot: -1 if it has none, and another number out of range if it is invalid.
  KV_HOST_DEVICE int64_t slot(int64_t i) const {
    return slots != nullptr ? slots[i] : context_slot(static_cast<int32_t>(i));
  }
  // The same, for code in which the direction is known.
  template <Direction direction>
  KV_HOST_DEVICE int64_t slot_for(int64_t i) const {
    if constexpr (direction == Direction::kGatherContext) {
      return context_slot(static_cast<int32_t>(i));
    } else {
      return slots[i];
    }
  }
  // Returns whether token i's slot is out of range.
  KV_HOST_DEVICE bool operator()(int64_t i) const {
    const int64_t its = slot(i);
    return its < -1 || its >= num_slots;
  }

 private:
  KV_HOST_DEVICE int64_t context_slot(int32_t i) const {
    const Context& c = context;
    if (c.num_requests == 0 || i >= c.cu_seq_lens[c.num_requests]) return -1;
    int32_t low = 0, high = c.num_requests;  // the request is in [low, high)
    while (high - low > 1) {
      const int32_t middle = (low + high) / 2;
      if (c.cu_seq_lens[middle] <= i) {
        low = middle;
      } else {
        high = middle;
      }
    }
    constexpr int64_t kInvalid = INT64_MIN;
    const int64_t start = c.seq_starts != nullptr ? c.seq_starts[low] : 0;
    int64_t position = start + i - c.cu_seq_lens[low];
    if (c.positions != nullptr) {
      if (c.positions[i] < 0) return c.positions[i] == -1 ? -1 : kInvalid;
      position = start + c.positions[i];
    }
    if (position < 0 || position > INT32_MAX) return kInvalid;
    const uint32_t column = k().by_block.divide(static_cast<uint32_t>(position));
    if (column >= static_cast<uint32_t>(c.num_columns)) return kInvalid;
    const int64_t block = c.block_tables[low * c.table_stride + column],
                  size = k().by_block.divisor;
    return block < 0 ? kInvalid : block * size + (position - int64_t{column} * size);
  }
};

// Copies one token in one layer on the CPU. The token must have a slot.
using TokenMove = void (*)(const TokenPages& p, int64_t layer, int64_t i, int64_t slot);

// Returns the function that writes tokens to these pages.
TokenMove write_move(const TokenPages& p);

// Calls f with an element of the tokens' dtype and the cache's format, for a side with scales.
template <class F>
auto with_formats(const TokenPages& p, F&& f) {
  const auto with_format = [&](auto element) {
    if (p.page_type == ScalarType::Float8_e5m2) return f(element, E5M2{});
    if (p.page_type == ScalarType::Char) return f(element, Int8{});
    return f(element, E4M3{});
  };
  if (p.token_type == ScalarType::Float) return with_format(float{});
  if (p.token_type == ScalarType::Half) return with_format(c10::Half{});
  return with_format(c10::BFloat16{});
}

// The same for a side with group scales, whose cache of bytes is int4 or nvfp4.
template <class F>
auto with_group_formats(const TokenPages& p, F&& f) {
  if (p.page_type != ScalarType::Byte) return with_formats(p, f);
  const auto with_format = [&](auto element) {
    return p.group_scale_type == ScalarType::Float ? f(element, Int4{}) : f(element, NvFp4{});
  };
  if (p.token_type == ScalarType::Float) return with_format(float{});
  if (p.token_type == ScalarType::Half) return with_format(c10::Half{});
  return with_format(c10::BFloat16{});
}

// --- checks

inline bool is_wide(const Tensor& tokens) {
  const ScalarType type = tokens.scalar_type();
  return type == ScalarType::Float || type == ScalarType::Half || type == ScalarType::BFloat16;
}

inline bool is_quantized(const Tensor& tokens, const Tensor& cache) {
  const ScalarType to = cache.scalar_type();
  return is_wide(tokens) && (to == ScalarType::Float8_e4m3fn || to == ScalarType::Float8_e5m2 ||
                             to == ScalarType::Char);
}

// Returns whether `scale` contains scales of groups, which are stored in the cache, not given
// scales.
inline bool is_in_pages(const std::optional<Tensor>& scale, const Tensor& cache) {
  return scale && scale->dim() >= 4 && scale->dim() == cache.dim();
}

// Returns whether the cache holds int4 or nvfp4, two elements per byte.
inline bool is_int4(const Tensor& tokens, const Tensor& cache, const std::optional<Tensor>& scale) {
  return is_wide(tokens) && cache.scalar_type() == ScalarType::Byte && is_in_pages(scale, cache);
}

// Checks scales [num_blocks, block_size, num_kv_heads, num_groups], or with num_layers in front.
inline void check_group_scales(const Tensor& scale, const std::string& name, const Tensor& tokens,
                               const std::string& tokens_name, const Tensor& cache) {
  if (cache.scalar_type() == ScalarType::Byte) {
    check_dtype(scale, name.c_str(), {ScalarType::Float, ScalarType::Float8_e4m3fn});
  } else {
    check_dtype(scale, name.c_str(), {ScalarType::Float});
  }
  check_same_device(scale, name.c_str(), cache, (tokens_name + "_cache").c_str());
  const int64_t last = cache.dim() - 1, head_size = tokens.size(tokens.dim() - 1);
  for (int64_t i = 0; i < last; ++i) {
    check_size(scale, name.c_str(), i, cache.size(i), "as in the cache");
  }
  const int64_t groups = scale.size(last), codes = cache.scalar_type() == ScalarType::Byte ? 2 : 1;
  if (groups < 1 || groups > UINT16_MAX || head_size % (groups * codes) != 0) {
    fail(name + " has shape " + shape_of(scale) + ": expected a last dimension that divides the " +
         (codes == 2 ? "bytes per head, " : "head size, ") + std::to_string(head_size / codes));
  }
}

inline void check_scale(const std::optional<Tensor>& scale, const std::string& name,
                        const Tensor& tokens, const std::string& tokens_name, const Tensor& cache) {
  const auto dtypes = [&] {
    return tokens_name + " has dtype " + torch::headeronly::toString(tokens.scalar_type()) +
           " and " + tokens_name + "_cache " + torch::headeronly::toString(cache.scalar_type());
  };
  if (is_in_pages(scale, cache) && (is_quantized(tokens, cache) || is_int4(tokens, cache, scale))) {
    return check_group_scales(*scale, name, tokens, tokens_name, cache);
  }
  if (!is_quantized(tokens, cache)) {
    if (scale) fail(name + " is given: expected None, as " + dtypes());
    return;
  }
  if (!scale && cache.size(cache.dim() - 1) == 0) return;  // there is nothing to divide
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
         std::to_string(heads) + "], or the shape of the cache with groups in the last dimension");
  }
}

// `name` is "key" or "value".
inline TokenPages checked_token_pages(Direction direction, const Tensor& tokens,
                                      const std::string& name, const Tensor& cache,
                                      const std::optional<Tensor>& scale, int64_t scale_rule) {
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
  const bool two_per_byte = is_int4(tokens, cache, scale);
  const bool is_empty = is_wide(tokens) && cache.size(first + 3) == 0;  // such as V of MLA
  if (!is_quantized(tokens, cache) && !two_per_byte && !is_empty) {
    check_same_dtype(tokens, name.c_str(), cache, cache_name.c_str());
  }
  // A GPU reads pages in host memory over the bus (see map_host).
  if (direction == Direction::kWrite || !cache.is_cpu()) {
    check_same_device(tokens, name.c_str(), cache, cache_name.c_str());
  }
  check_size(tokens, name.c_str(), first + 1, cache.size(first + 2), "the heads of the cache");
  const int64_t num_heads = cache.size(first + 2);
  const int64_t head_size = cache.size(first + 3) * (two_per_byte ? 2 : 1);
  check_size(tokens, name.c_str(), first + 2, head_size,
             two_per_byte ? "twice the bytes per head of the cache" : "the head size of the cache");
  check_scale(scale, scale_name, tokens, name, cache);
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
  if (is_in_pages(scale, cache)) {
    if (num_heads * scale->size(first + 3) >
        UINT16_MAX) {  // a launch has one block for four groups
      fail(scale_name + " has shape " + shape_of(*scale) + ": expected fewer groups per token");
    }
    p.group_scales = static_cast<char*>(scale->data_ptr());
    p.group_layer_stride = stride(*scale, first - 1);
    p.group_block_stride = stride(*scale, first);
    p.group_offset_stride = stride(*scale, first + 1);
    p.group_head_stride = stride(*scale, first + 2);
    p.group_stride = stride(*scale, first + 3);
    p.group_size = head_size / scale->size(first + 3);
    p.group_scale_type = scale->scalar_type();
    p.rule = static_cast<ScaleRule>(scale_rule);
  } else if (scale) {
    const int64_t per_layer = scale->dim() == 0 ? 1 : scale->size(first);
    p.scales = scale->const_data_ptr<float>();
    p.scale_layer_stride = per_layer;
    p.scale_head_stride = per_layer > 1;
  }
  return p;
}

// `given`: the other tensors that are read.
inline TokenIo checked_tokens_and_caches(Direction direction, const Tensor& key,
                                         const Tensor& value, const Tensor& key_cache,
                                         const Tensor& value_cache,
                                         const std::optional<Tensor>& k_scale,
                                         const std::optional<Tensor>& v_scale, int64_t scale_rule,
                                         NamedTensors given) {
  if (scale_rule < 0 || scale_rule >= kNumScaleRules) {
    fail("scale_rule is " + std::to_string(scale_rule) + ": expected 0 to " +
         std::to_string(kNumScaleRules - 1));
  }
  const TokenPages k = checked_token_pages(direction, key, "key", key_cache, k_scale, scale_rule);
  const TokenPages v =
      checked_token_pages(direction, value, "value", value_cache, v_scale, scale_rule);
  check_same_device(value, "value", key, "key");
  const bool writes = direction == Direction::kWrite;
  const NamedTensors tokens{{"key", key}, {"value", value}};
  NamedTensors caches{{"key_cache", key_cache}, {"value_cache", value_cache}};
  (is_in_pages(k_scale, key_cache) ? caches : given).push_back({"k_scale", k_scale});
  (is_in_pages(v_scale, value_cache) ? caches : given).push_back({"v_scale", v_scale});
  const NamedTensors& written = writes ? caches : tokens;
  for (size_t i = 0; i < written.size(); ++i) {
    check_no_overlap(*written[i].tensor, written[i].name);
    for (size_t j = 0; j < i; ++j) {
      check_separate(*written[i].tensor, written[i].name, *written[j].tensor, written[j].name);
    }
  }
  check_disjoint(written, writes ? tokens : caches);
  check_disjoint(written, given);

  check_dim(value_cache, "value_cache", key_cache.dim(), "as many dimensions as key_cache");
  const int64_t first = key_cache.dim() - 4;
  if (first)
    check_size(value_cache, "value_cache", 0, key_cache.size(0), "the layers of key_cache");
  const int64_t num_tokens = key.size(first), num_layers = first ? key.size(0) : 1;
  check_size(value, "value", first, num_tokens, "the tokens of key");
  check_size(value_cache, "value_cache", first, key_cache.size(first), "the blocks of key_cache");
  check_size(value_cache, "value_cache", first + 1, key_cache.size(first + 1),
             "the block size of key_cache");
  const int64_t num_blocks = key_cache.size(first), block_size = key_cache.size(first + 1);
  if (num_blocks > 0 && block_size > INT32_MAX / num_blocks) {  // kernels count slots in 31 bits
    fail("key_cache has shape " + shape_of(key_cache) + ": expected fewer than 2^31 slots");
  }
  if (num_tokens > INT32_MAX) fail("key has shape " + shape_of(key) + ": expected fewer tokens");
  if (num_layers > UINT16_MAX) fail("key has shape " + shape_of(key) + ": expected fewer layers");
  return {{k, v}, nullptr, num_layers, num_tokens, num_blocks * block_size, {}};
}

inline TokenIo checked_token_io(Direction direction, const Tensor& key, const Tensor& value,
                                const Tensor& key_cache, const Tensor& value_cache,
                                const Tensor& slot_mapping, const std::optional<Tensor>& k_scale,
                                const std::optional<Tensor>& v_scale, int64_t scale_rule) {
  check_dim(slot_mapping, "slot_mapping", 1, "[num_tokens]");
  check_dtype(slot_mapping, "slot_mapping", {ScalarType::Long});
  check_contiguous(slot_mapping, "slot_mapping");
  check_same_device(slot_mapping, "slot_mapping", key, "key");
  TokenIo io = checked_tokens_and_caches(direction, key, value, key_cache, value_cache, k_scale,
                                         v_scale, scale_rule, {{"slot_mapping", slot_mapping}});
  check_size(slot_mapping, "slot_mapping", 0, io.num_tokens, "the tokens of key");
  io.slots = slot_mapping.const_data_ptr<int64_t>();
  return io;
}
// Returns whether entry r of cu_seq_lens is out of range.
struct BadLength {
  const int32_t* cu_seq_lens;
  int64_t num_tokens;

  KV_HOST_DEVICE bool operator()(int64_t r) const {
    const int64_t end = cu_seq_lens[r];
    return r == 0 ? end != 0 : end < cu_seq_lens[r - 1] || end > num_tokens;
  }
};

[[noreturn]] inline void fail_length(int64_t r, int64_t end, int64_t before, int64_t num_tokens) {
  fail("cu_seq_lens[" + std::to_string(r) + "] is " + std::to_string(end) + ": expected " +
       (r == 0 ? "0" : std::to_string(before) + " to " + std::to_string(num_tokens)));
}

inline TokenIo checked_context_io(const Tensor& key_cache, const Tensor& value_cache,
                                  const Tensor& block_tables, const Tensor& cu_seq_lens,
                                  const Tensor& key, const Tensor& value,
                                  const std::optional<Tensor>& k_scale,
                                  const std::optional<Tensor>& v_scale,
                                  const std::optional<Tensor>& seq_starts,
                                  const std::optional<Tensor>& positions) {
  check_dim(block_tables, "block_tables", 2, "[num_requests, num_columns]");
  check_dim(cu_seq_lens, "cu_seq_lens", 1, "[num_requests + 1]");
  const NamedTensors given{{"block_tables", block_tables},
                           {"cu_seq_lens", cu_seq_lens},
                           {"seq_starts", seq_starts},
                           {"positions", positions}};
  for (const NamedTensor& each : given) {
    if (each.tensor == nullptr) continue;
    check_dtype(*each.tensor, each.name, {ScalarType::Int});
    check_same_device(*each.tensor, each.name, key, "key");
    if (each.tensor != &block_tables) check_contiguous(*each.tensor, each.name);
  }
  const int64_t num_requests = block_tables.size(0), num_columns = block_tables.size(1);
  check_size(cu_seq_lens, "cu_seq_lens", 0, num_requests + 1, "one more than the requests");
  if (seq_starts) {
    check_dim(*seq_starts, "seq_starts", 1, "[num_requests]");
    check_size(*seq_starts, "seq_starts", 0, num_requests, "the requests of block_tables");
  }
  if (num_columns > 1 && block_tables.stride(1) != 1) {
    fail("block_tables has stride " + std::to_string(block_tables.stride(1)) +
         " in its last dimension: expected 1");
  }
  if (num_requests >= INT32_MAX || num_columns > INT32_MAX) {
    fail("block_tables has shape " + shape_of(block_tables) + ": expected fewer entries");
  }
  TokenIo io = checked_tokens_and_caches(Direction::kGather, key, value, key_cache, value_cache,
                                         k_scale, v_scale, 0, given);
  if (positions) {
    check_dim(*positions, "positions", 1, "[num_tokens]");
    check_size(*positions, "positions", 0, io.num_tokens, "the tokens of key");
  }
  io.context = {block_tables.const_data_ptr<int32_t>(),
                cu_seq_lens.const_data_ptr<int32_t>(),
                seq_starts ? seq_starts->const_data_ptr<int32_t>() : nullptr,
                positions ? positions->const_data_ptr<int32_t>() : nullptr,
                num_requests > 1 ? block_tables.stride(0) : 0,
                static_cast<int32_t>(num_requests),
                static_cast<int32_t>(num_columns)};
  return io;
}

// Throws the error for token i. The slot is passed as an argument, because the array may be on a
// device.
[[noreturn]] inline void fail_token_io(const TokenIo& io, int64_t i, int64_t slot) {
  if (io.slots == nullptr) {
    fail("token " + std::to_string(i) + " has no entry in block_tables from 0 to " +
         std::to_string(io.num_slots / io.first_slot() - 1) +
         ": expected cu_seq_lens, seq_starts and positions that the block tables cover");
  }
  fail("slot_mapping[" + std::to_string(i) + "] is " + std::to_string(slot) +
       ": expected -1 (no slot) to " + std::to_string(io.num_slots - 1));
}

}  // namespace kvcache
