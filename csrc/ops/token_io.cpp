// SPDX-License-Identifier: Apache-2.0
#include "ops/token_io.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <cstring>

#include "ops/cpu_clones.h"
#include "ops/parallel.h"

namespace kvcache {
namespace {

constexpr int64_t kCacheLine = 64;
constexpr int64_t kGrainBytes = 1 << 18;  // minimum bytes per thread; smaller shares do not pay off

// Copies in fixed-size steps, because a single memcpy of 2 KiB is 5 to 30 % slower (AMD EPYC, gcc
// 12, glibc 2.36).
constexpr size_t kCopyBytes = 1024;

void copy(char* to, const char* from, size_t n) {
  for (; n > kCopyBytes; n -= kCopyBytes, to += kCopyBytes, from += kCopyBytes) {
    std::memcpy(to, from, kCopyBytes);
  }
  std::memcpy(to, from, n);
}

template <Direction direction>
void move_bytes(const TokenPages& p, int64_t layer, int64_t i, int64_t slot) {
  const int64_t num_runs = p.is_contiguous() ? 1 : p.num_heads;
  const int64_t heads = p.is_contiguous() ? p.num_heads : 1;
  const auto bytes = static_cast<size_t>(heads * p.head_size * p.token_element);
  char* token = p.token(layer, i);
  char* page = p.page(layer, slot);
  for (int64_t run = 0; run < num_runs; ++run) {
    if constexpr (direction == Direction::kWrite) {
      copy(page, token, bytes);
    } else {
      copy(token, page, bytes);
    }
    token += p.token_head_stride;
    page += p.page_head_stride;
  }
}

template <Direction direction, class Element, class Format>
KV_CLONES void convert(const TokenPages& p, int64_t layer, int64_t i, int64_t slot) {
  const int64_t num_runs = p.is_contiguous() ? 1 : p.num_heads;
  const int64_t n = p.is_contiguous() ? p.width() : p.head_size;
  char* at = p.token(layer, i);
  auto* page = reinterpret_cast<uint8_t*>(p.page(layer, slot));
  // Prefetches a token's heads, which are not contiguous in HND. Without prefetching, gathering
  // takes twice as long.
  for (int64_t run = 0; run < num_runs; ++run) {
    for (int64_t j = 0; j < n; j += kCacheLine) {
      __builtin_prefetch(page + run * p.page_head_stride + j, direction == Direction::kWrite);
    }
  }
  for (int64_t run = 0; run < num_runs; ++run) {
    const float scale = p.scale(layer, run);
    auto* token = reinterpret_cast<Element*>(at);
    for (int64_t j = 0; j < n; ++j) {
      if constexpr (direction == Direction::kWrite) {
        quantize<Format>(token[j], scale, page[j]);
      } else {
        dequantize<Format>(page[j], scale, token[j]);
      }
    }
    at += p.token_head_stride;
    page += p.page_head_stride;
  }
}

template <class Format, class Element>
KV_CLONES void encode_group(const Element* token, int64_t n, ScaleRule rule,
                            typename Group<Format>::Scale* scale, uint8_t* page) {
  typename Group<Format>::Extent extent;
  for (int64_t j = 0; j < n; ++j) extent.add(widen(token[j]));
  const Group<Format> group(extent, rule);
  *scale = group.stored;
  if constexpr (kPerByte<Format> == 2) {
    for (int64_t j = 0; j < n / 2; ++j) {
      page[j] = static_cast<uint8_t>(group.encode(widen(token[2 * j])) |
                                     group.encode(widen(token[2 * j + 1])) << 4);
    }
  } else if (group.multiplies) {
    for (int64_t j = 0; j < n; ++j) {
      page[j] = Format::encode(product(widen(token[j]), group.factor));
    }
  } else {
    for (int64_t j = 0; j < n; ++j) page[j] = Format::encode(widen(token[j]) / group.factor);
  }
}

template <class Format, class Element>
KV_CLONES void decode_group(const uint8_t* page, int64_t n, typename Group<Format>::Scale scale,
                            Element* token) {
  const Group<Format> group(scale);
  if constexpr (kPerByte<Format> == 2) {
    for (int64_t j = 0; j < n / 2; ++j) {
      narrow(group.decode(page[j] & 15), token[2 * j]);
      narrow(group.decode(page[j] >> 4), token[2 * j + 1]);
    }
  } else {
    for (int64_t j = 0; j < n; ++j) narrow(group.decode(page[j]), token[j]);
  }
}

template <Direction direction, class Element, class Format>
void convert_groups(const TokenPages& p, int64_t layer, int64_t i, int64_t slot) {
  const int64_t n = p.group_size, num_groups = p.head_size / n;
  for (int64_t head = 0; head < p.num_heads; ++head) {
    for (int64_t group = 0; group < num_groups; ++group) {
      auto* token = reinterpret_cast<Element*>(p.token(layer, i) + head * p.token_head_stride);
      auto* page = reinterpret_cast<uint8_t*>(p.page(layer, slot) + head * p.page_head_stride);
      token += group * n;
      page += group * n / kPerByte<Format>;
      auto* scale = p.group_scale<typename Group<Format>::Scale>(layer, slot, head, group);
      if constexpr (direction == Direction::kWrite) {
        encode_group<Format>(token, n, p.rule, scale, page);
      } else {
        decode_group<Format>(page, n, *scale, token);
      }
    }
  }
}

template <Direction direction>
TokenMove move_of(const TokenPages& p) {
  if (p.group_scales != nullptr) {
    return with_group_formats(p, [](auto element, auto format) -> TokenMove {
      return convert_groups<direction, decltype(element), decltype(format)>;
    });
  }
  if (p.scales == nullptr) return move_bytes<direction>;
  return with_formats(p, [](auto element, auto format) -> TokenMove {
    return convert<direction, decltype(element), decltype(format)>;
  });
}

void clear_token(const TokenPages& p, int64_t layer, int64_t i) {
  const int64_t num_runs = p.is_contiguous() ? 1 : p.num_heads;
  const auto bytes = static_cast<size_t>(p.width() * p.token_element / num_runs);
  char* token = p.token(layer, i);
  for (int64_t run = 0; run < num_runs; ++run, token += p.token_head_stride) {
    std::memset(token, 0, bytes);
  }
}

template <Direction direction>
void run(const TokenIo& io) {
  // All tokens are checked before the first write, and outside of parallel_for, which would lose
  // the error message.
  for (int64_t i = 0; i < io.num_tokens; ++i) {
    if (io(i)) fail_token_io(io, i, io.slot(i));
  }
  const int64_t token_bytes =
      io.k().width() * io.k().token_element + io.v().width() * io.v().token_element;
  const int64_t grain = std::max<int64_t>(kGrainBytes / (token_bytes + 1), 1);
  const TokenMove move_k = move_of<direction>(io.k()), move_v = move_of<direction>(io.v());
  const auto move = [&](TokenMove function, const TokenPages& p, int64_t layer, int64_t i) {
    const int64_t slot = io.slot_for<direction>(i);
    if (slot >= io.first_slot()) {
      function(p, layer, i, slot);
    } else if (direction != Direction::kWrite) {
      clear_token(p, layer, i);
    }
  };
  const int64_t num_moves = io.num_layers * io.num_tokens;
  parallel_for(0, num_moves, grain, [&](int64_t begin, int64_t end) {
    for (int64_t j = begin; j < end; ++j) {
      const int64_t layer = j / io.num_tokens, i = j % io.num_tokens;
      if (io.k().width() > 0) move(move_k, io.k(), layer, i);
      if (io.v().width() > 0) move(move_v, io.v(), layer, i);
    }
  });
}

void check_lengths(const TokenIo& io) {
  const int32_t* const lens = io.context.cu_seq_lens;
  const BadLength is_bad{lens, io.num_tokens};
  for (int64_t r = 0; r <= io.context.num_requests; ++r) {
    if (is_bad(r)) fail_length(r, lens[r], r == 0 ? 0 : lens[r - 1], io.num_tokens);
  }
}

void write_kv(Tensor key, Tensor value, Tensor key_cache, Tensor value_cache, Tensor slot_mapping,
              std::optional<Tensor> k_scale, std::optional<Tensor> v_scale, int64_t scale_rule) {
  run<Direction::kWrite>(checked_token_io(Direction::kWrite, key, value, key_cache, value_cache,
                                          slot_mapping, k_scale, v_scale, scale_rule));
}

void gather_kv(Tensor key_cache, Tensor value_cache, Tensor slot_mapping, Tensor key, Tensor value,
               std::optional<Tensor> k_scale, std::optional<Tensor> v_scale) {
  run<Direction::kGather>(checked_token_io(Direction::kGather, key, value, key_cache, value_cache,
                                           slot_mapping, k_scale, v_scale, 0));
}

void gather_context(Tensor key_cache, Tensor value_cache, Tensor block_tables, Tensor cu_seq_lens,
                    Tensor key, Tensor value, std::optional<Tensor> k_scale,
                    std::optional<Tensor> v_scale, std::optional<Tensor> seq_starts,
                    std::optional<Tensor> positions) {
  const TokenIo io = checked_context_io(key_cache, value_cache, block_tables, cu_seq_lens, key,
                                        value, k_scale, v_scale, seq_starts, positions);
  check_lengths(io);
  run<Direction::kGatherContext>(io);
}

}  // namespace

TokenMove write_move(const TokenPages& p) { return move_of<Direction::kWrite>(p); }

STABLE_TORCH_LIBRARY_IMPL(kvcache, CPU, m) {
  m.impl("gather_context", TORCH_BOX(&gather_context));
  m.impl("write_kv", TORCH_BOX(&write_kv));
  m.impl("gather_kv", TORCH_BOX(&gather_kv));
}

}  // namespace kvcache
