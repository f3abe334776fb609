// Token io: K and V of single tokens into the paged cache, and back.
//
// Caches are [num_blocks, block_size, num_kv_heads, head_size] with any strides but a dense last
// dimension, so NHD and HND are the same code. Elements are moved, never converted: what matters is
// the number of bytes of a head.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "ops/checks.h"
#include "ops/host_device.h"

namespace kvcache {

// One of K and V: its tokens, and its pages. Strides in bytes.
struct TokenPages {
  char* tokens;  // [num_tokens, num_heads, head_bytes]
  int64_t token_stride;
  char* pages;  // [num_blocks, block_size, num_heads, head_bytes]
  int64_t block_stride, offset_stride, page_head_stride;
  int64_t block_size, num_heads, head_bytes;

  // Heads lie one after the other in `tokens` (checked), so a head's place there is its number.
  KV_HOST_DEVICE char* token(int64_t i, int64_t head) const {
    return tokens + i * token_stride + head * head_bytes;
  }
  KV_HOST_DEVICE char* page(int64_t slot, int64_t head) const {
    const int64_t block = slot / block_size;
    return pages + block * block_stride + (slot - block * block_size) * offset_stride +
           head * page_head_stride;
  }
};

struct TokenIo {
  TokenPages k, v;
  const int64_t* slots;  // [num_tokens]; -1: no slot
  int64_t num_tokens;
  int64_t num_slots;  // num_blocks * block_size

  // Whether token i names a slot that is not there.
  KV_HOST_DEVICE bool operator()(int64_t i) const { return slots[i] < -1 || slots[i] >= num_slots; }
};

// How many bytes every address and stride of this side allows to move at once: 16, 8, 4, 2 or 1.
inline int64_t vector_bytes(const TokenPages& p) {
  const uint64_t all = reinterpret_cast<uint64_t>(p.tokens) | reinterpret_cast<uint64_t>(p.pages) |
                       static_cast<uint64_t>(p.token_stride | p.block_stride | p.offset_stride |
                                             p.page_head_stride | p.head_bytes | 16);
  return static_cast<int64_t>(all & (~all + 1));
}

inline TokenPages checked_token_pages(const Tensor& tokens, const char* tokens_name,
                                      const Tensor& cache, const char* cache_name) {
  check_dim(tokens, tokens_name, 3, "[num_tokens, num_kv_heads, head_size]");
  check_dim(cache, cache_name, 4, "[num_blocks, block_size, num_kv_heads, head_size]");
  check_same_dtype(tokens, tokens_name, cache, cache_name);
  check_same_device(tokens, tokens_name, cache, cache_name);
  check_size(tokens, tokens_name, 1, cache.size(2), "the heads of the cache");
  check_size(tokens, tokens_name, 2, cache.size(3), "the head size of the cache");
  const auto dense = [&](int64_t dim, int64_t stride) {  // a dimension of one element has no stride
    return tokens.size(dim) <= 1 || tokens.stride(dim) == stride;
  };
  if (tokens.numel() > 0 && !(dense(2, 1) && dense(1, tokens.size(2)))) {
    fail(std::string(tokens_name) +
         " is not contiguous within a token: expected strides [any, head_size, 1]");
  }
  if (cache.numel() > 0 && cache.size(3) > 1 && cache.stride(3) != 1) {
    fail(std::string(cache_name) + " has stride " + std::to_string(cache.stride(3)) +
         " in its last dimension: expected 1 (NHD or HND storage)");
  }
  const int64_t element = static_cast<int64_t>(cache.element_size());
  return {static_cast<char*>(tokens.data_ptr()),
          tokens.stride(0) * element,
          static_cast<char*>(cache.data_ptr()),
          cache.stride(0) * element,
          cache.stride(1) * element,
          cache.stride(2) * element,
          cache.size(1),
          cache.size(2),
          cache.size(3) * element};
}

enum class Direction { kWrite, kGather };

inline TokenIo checked_token_io(Direction direction, const Tensor& key, const Tensor& value,
                                const Tensor& key_cache, const Tensor& value_cache,
                                const Tensor& slot_mapping) {
  const TokenPages k = checked_token_pages(key, "key", key_cache, "key_cache");
  const TokenPages v = checked_token_pages(value, "value", value_cache, "value_cache");
  check_same_device(value, "value", key, "key");
  const bool writes = direction == Direction::kWrite;
  check_disjoint(key, "key", key_cache, "key_cache");
  check_disjoint(value, "value", value_cache, "value_cache");
  check_no_overlap(writes ? key_cache : key, writes ? "key_cache" : "key");
  check_no_overlap(writes ? value_cache : value, writes ? "value_cache" : "value");
  check_size(value, "value", 0, key.size(0), "the tokens of key");
  check_size(value_cache, "value_cache", 0, key_cache.size(0), "the blocks of key_cache");
  check_size(value_cache, "value_cache", 1, key_cache.size(1), "the block size of key_cache");
  check_dim(slot_mapping, "slot_mapping", 1, "[num_tokens]");
  check_dtype(slot_mapping, "slot_mapping", {ScalarType::Long});
  check_contiguous(slot_mapping, "slot_mapping");
  check_same_device(slot_mapping, "slot_mapping", key, "key");
  check_size(slot_mapping, "slot_mapping", 0, key.size(0), "the tokens of key");
  if (key.size(0) > INT32_MAX) fail("key has shape " + shape_of(key) + ": expected fewer tokens");
  return {k, v, slot_mapping.const_data_ptr<int64_t>(), key.size(0),
          key_cache.size(0) * key_cache.size(1)};
}

// Throws for token i, whose slot is given (it may have come from a device).
[[noreturn]] inline void fail_token_io(const TokenIo& io, int64_t i, int64_t slot) {
  fail("slot_mapping[" + std::to_string(i) + "] is " + std::to_string(slot) +
       ": expected -1 (no slot) to " + std::to_string(io.num_slots - 1));
}

}  // namespace kvcache
