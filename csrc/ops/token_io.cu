// SPDX-License-Identifier: Apache-2.0
#include "ops/token_io.h"

#include <type_traits>

#include "ops/dependent_launch.h"
#include "ops/device.h"
#include "ops/launch_ids.h"
#include "ops/mapped_host.h"
#include "ops/scale_divisor.h"
#include "ops/vector.h"
#include "ops/warp_extent.h"
#include "worker/fast_divisor.h"

namespace kvcache {
namespace {

constexpr int64_t kVectorBytes = 16;
constexpr unsigned kThreads = 128;  // maximum threads per thread block
// Maximum number of thread blocks per token; grid.y includes those for K and those for V.
constexpr uint32_t kMaxShares = 32767;

// A mover converts vectors between tokens and pages. `Token` and `Page` are the vector types. Each
// thread loads the vectors of `kInFlight` tokens before the first store. A mover applies a single
// quantization scale to all of its vectors.
template <class Vector>
struct MoveBytes {
  using Token = Vector;
  using Page = Vector;
  static constexpr unsigned kInFlight = 4;
  static constexpr bool kScaled = false;

  KV_HOST_DEVICE explicit MoveBytes(float) {}
  KV_HOST_DEVICE bool is_exact() const { return true; }
  KV_HOST_DEVICE Vector to_page(const Vector& token) const { return token; }
  KV_HOST_DEVICE Vector to_token(const Vector& page) const { return page; }
};

// Converts n elements between a token and a page of fp8 or int8.
template <class Element_, int n>
struct CodeVectors {
  using Element = Element_;
  static constexpr int kElements = n;
  struct alignas(n * sizeof(Element)) Token {
    Element elements[n];
  };
  // If n > 1, codes are converted in pairs, because extracting a single byte costs an instruction.
  struct alignas(n) Page {
    std::conditional_t<n == 1, uint8_t, uint16_t> codes[(n + 1) / 2];
  };
  static constexpr bool kScaled = true;
};

template <class Element, class Format_, int n>
struct ToCodes : CodeVectors<Element, n> {
  using typename CodeVectors<Element, n>::Token;
  using typename CodeVectors<Element, n>::Page;
  using Format = Format_;
  // Converting a wide vector takes many registers. With two vectors in flight, more warps fit.
  static constexpr unsigned kInFlight = n == 1 ? 4 : 2;

  // For integers, the quotient must be the true one, as for float32.
  using Divisor = ScaleDivisor<std::conditional_t<std::is_same_v<Format, Int8>, float, Element>>;

  KV_HOST_DEVICE explicit ToCodes(float scale) : divisor(scale) {}
  KV_HOST_DEVICE bool is_exact() const { return divisor.is_exact(); }
  KV_HOST_DEVICE Page to_page(const Token& token) const {
    Page page;
    if constexpr (n == 1) {
      page.codes[0] = encode_one<Format>(divisor.divide(widen(token.elements[0])));
    } else {
#pragma unroll
      for (int i = 0; i < n; i += 2) {
        page.codes[i / 2] = encode_pair<Format>(divisor.divide(widen(token.elements[i])),
                                                divisor.divide(widen(token.elements[i + 1])));
      }
    }
    return page;
  }

  Divisor divisor;
};

template <class Element, class Format, int n>
struct FromCodes : CodeVectors<Element, n> {
  using typename CodeVectors<Element, n>::Token;
  using typename CodeVectors<Element, n>::Page;
  static constexpr unsigned kInFlight = 4;

  KV_HOST_DEVICE explicit FromCodes(float scale) : scale(scale) {}
  KV_HOST_DEVICE bool is_exact() const { return true; }
  KV_HOST_DEVICE Token to_token(const Page& page) const {
    Token token;
    if constexpr (n == 1) {
      dequantize<Format>(page.codes[0], scale, token.elements[0]);
    } else {
#pragma unroll
      for (int i = 0; i < n; i += 2) {
        float first, second;
        decode_pair<Format>(page.codes[i / 2], first, second);
        narrow(first * scale, token.elements[i]);
        narrow(second * scale, token.elements[i + 1]);
      }
    }
    return token;
  }

  float scale;
};

// The number of vectors per token, and the number of vectors that are contiguous in the page.
struct Vectors {
  uint32_t total;
  FastDivisor per_run;
};

// K and V, and the number of thread blocks per token for K. The rest of grid.y is for V.
struct TokenLaunch {
  TokenIo io;
  Vectors vectors[2];
  uint32_t k_blocks;
};

template <class Mover>
Vectors vectors_of(const TokenPages& p) {
  constexpr auto kBytes = static_cast<int64_t>(sizeof(typename Mover::Token));
  const auto count = [&](int64_t elements) {
    return static_cast<uint32_t>(elements * p.token_element / kBytes);
  };
  const uint32_t total = count(p.width());
  return {total, fast_divisor(std::max(p.is_contiguous() ? total : count(p.head_size), 1u))};
}

constexpr int64_t kNoSlot = -1, kSkipped = -2;

// Returns the offset of token i, which has this slot, within a layer's pages, or one of the
// constants above.
__device__ __forceinline__ int64_t place_of(const TokenIo& io, const TokenPages& p, uint32_t i,
                                            int64_t slot) {
  if (i >= io.num_tokens || slot < -1 || slot >= io.num_slots) {
    return kSkipped;  // see checked_mode
  }
  return slot < io.first_slot() ? kNoSlot : p.page_place(slot);
}

// Sets `place` to the offsets of tokens `first`, `first + blockDim.y`, ... All slots are loaded
// before the first slot is checked, so that the loads overlap.
template <Direction direction, unsigned n>
__device__ __forceinline__ void find_places(const TokenIo& io, const TokenPages& p, uint32_t first,
                                            int64_t (&place)[n]) {
  const auto last = static_cast<uint32_t>(io.num_tokens - 1);
  int64_t slots[n];
#pragma unroll
  for (unsigned u = 0; u < n; ++u)
    slots[u] = io.slot_for<direction>(min(first + u * blockDim.y, last));
#pragma unroll
  for (unsigned u = 0; u < n; ++u) place[u] = place_of(io, p, first + u * blockDim.y, slots[u]);
}

// Divides the elements of Mover::kInFlight vectors by the scale. Used only for the rare scales that
// require a true division.
template <class Mover>
__device__ void write_by_division(const TokenIo& io, const TokenPages& p, float scale,
                                  uint32_t first, const char* tokens, char* pages) {
  using Element = typename Mover::Element;
#pragma unroll 1
  for (unsigned n = 0; n < Mover::kInFlight * Mover::kElements; ++n) {
    const unsigned u = n / Mover::kElements, e = n % Mover::kElements;
    const uint32_t i = first + u * blockDim.y;
    const int64_t place = i < io.num_tokens ? place_of(io, p, i, io.slots[i]) : kSkipped;
    if (place < 0) continue;
    const auto* token = reinterpret_cast<const Element*>(tokens + i * p.token_stride);
    quantize<typename Mover::Format>(token[e], scale, reinterpret_cast<uint8_t*>(pages + place)[e]);
  }
}

// The grid dimensions are groups of tokens (x), shares of the K and V vectors (y), and layers (z).
// The thread block dimensions are a token's vectors (x) and tokens (y). Each thread moves the same
// vector of Mover::kInFlight tokens, so all of them share one scale and the values derived from it.
template <class Mover, Direction direction>
__global__ void __launch_bounds__(kThreads) token_io_kernel(KV_PARAMETER TokenLaunch launch) {
  begin_after_previous_kernel();
  using Token = typename Mover::Token;
  using Page = typename Mover::Page;
  constexpr unsigned kInFlight = Mover::kInFlight;
  const TokenIo& io = launch.io;
  const bool is_v = blockIdx.y >= launch.k_blocks;
  const TokenPages& p = io.sides[is_v];
  const Vectors& vectors = launch.vectors[is_v];
  const int64_t layer = blockIdx.z;
  const uint32_t first = blockIdx.x * (kInFlight * blockDim.y) + threadIdx.y;
  int64_t place[kInFlight];
  find_places<direction>(io, p, first, place);

  const uint32_t share = is_v ? blockIdx.y - launch.k_blocks : blockIdx.y;
  const uint32_t shares = is_v ? gridDim.y - launch.k_blocks : launch.k_blocks;
  for (uint32_t j = share * blockDim.x + threadIdx.x; j < vectors.total; j += shares * blockDim.x) {
    const uint32_t run = vectors.per_run.divide(j);
    const uint32_t column = j - run * vectors.per_run.divisor;
    char* const tokens = p.tokens + layer * p.token_layer_stride +
                         uint64_t{run} * p.token_head_stride + int64_t{column} * sizeof(Token);
    char* const pages = p.pages + layer * p.page_layer_stride + run * p.page_head_stride +
                        int64_t{column} * sizeof(Page);
    const Mover mover(Mover::kScaled ? p.scale(layer, run) : 1.0f);
    if constexpr (direction == Direction::kWrite) {
      if constexpr (Mover::kScaled) {
        if (!mover.is_exact()) {
          write_by_division<Mover>(io, p, p.scale(layer, run), first, tokens, pages);
          continue;
        }
      }
      Token in[kInFlight];
#pragma unroll
      for (unsigned u = 0; u < kInFlight; ++u) {
        if (place[u] < 0) continue;
        in[u] = *reinterpret_cast<const Token*>(tokens +
                                                int64_t{first + u * blockDim.y} * p.token_stride);
      }
#pragma unroll
      for (unsigned u = 0; u < kInFlight; ++u) {
        if (place[u] < 0) continue;
        *reinterpret_cast<Page*>(pages + place[u]) = mover.to_page(in[u]);
      }
    } else {
      Page in[kInFlight];
#pragma unroll
      for (unsigned u = 0; u < kInFlight; ++u) {
        if (place[u] >= 0) in[u] = *reinterpret_cast<const Page*>(pages + place[u]);
      }
#pragma unroll
      for (unsigned u = 0; u < kInFlight; ++u) {
        if (place[u] == kSkipped) continue;
        auto* const token =
            reinterpret_cast<Token*>(tokens + int64_t{first + u * blockDim.y} * p.token_stride);
        *token = place[u] >= 0 ? mover.to_token(in[u]) : Token{};
      }
    }
  }
}

using Launch = void (*)(const TokenIo& io, const OnDevice& device);

template <class Mover, Direction direction>
void launch(const TokenIo& io, const OnDevice& device) {
  TokenLaunch launch{io, {vectors_of<Mover>(io.k()), vectors_of<Mover>(io.v())}, 0};
  const auto shares_of = [](uint32_t total) {
    return std::min((total + kThreads - 1) / kThreads, kMaxShares);
  };
  const uint32_t k_total = launch.vectors[0].total, v_total = launch.vectors[1].total;
  const uint32_t most = std::max(k_total, v_total), shares = (most + kThreads - 1) / kThreads;
  const unsigned x = (most + shares - 1) / shares;
  const dim3 block(x, kThreads / x);
  launch.k_blocks = shares_of(k_total);
  const unsigned tokens = block.y * Mover::kInFlight;
  const dim3 grid(unsigned((io.num_tokens + tokens - 1) / tokens),
                  launch.k_blocks + shares_of(v_total), unsigned(io.num_layers));
  KV_LAUNCH_DEPENDENT((token_io_kernel<Mover, direction>), grid, block, device, launch);
}

// The lanes of one group load its elements in vectors of `n`, and derive the scale from all of
// them.
template <class Element_, class Format, int n>
struct GroupVectors {
  using Element = Element_;
  static constexpr unsigned kBytes = n / kPerByte<Format>;
  // Narrow vectors are only as aligned as their elements.
  struct alignas(n > 2 ? n * sizeof(Element) : sizeof(Element)) Token {
    Element elements[n];
  };
  struct alignas(kBytes) Page {
    uint8_t codes[kBytes];
  };

  KV_HOST_DEVICE static Page encode(const Token& token, const Group<Format>& group) {
    Page page;
    if constexpr (kPerByte<Format> == 2) {
#pragma unroll
      for (int i = 0; i < n; i += 2) {
        page.codes[i / 2] = static_cast<uint8_t>(group.encode(widen(token.elements[i])) |
                                                 group.encode(widen(token.elements[i + 1])) << 4);
      }
    } else if constexpr (std::is_same_v<Format, Int8> || n == 1) {
#pragma unroll
      for (int i = 0; i < n; ++i) page.codes[i] = group.encode(widen(token.elements[i]));
    } else {
#pragma unroll
      for (int i = 0; i < n; i += 2) {
        const uint16_t codes = encode_pair<Format>(group.divide(widen(token.elements[i])),
                                                   group.divide(widen(token.elements[i + 1])));
        page.codes[i] = static_cast<uint8_t>(codes);
        page.codes[i + 1] = static_cast<uint8_t>(codes >> 8);
      }
    }
    return page;
  }

  KV_HOST_DEVICE static Token decode(const Page& page, const Group<Format>& group) {
    Token token;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      if constexpr (kPerByte<Format> == 2) {
        narrow(group.decode(i % 2 ? page.codes[i / 2] >> 4 : page.codes[i / 2] & 15),
               token.elements[i]);
      } else {
        narrow(group.decode(page.codes[i]), token.elements[i]);
      }
    }
    return token;
  }
};

// The lanes per group: a warp, or for the 16 elements of nvfp4 a part of it.
template <class Format>
constexpr unsigned kLanes = std::is_same_v<Format, NvFp4> ? 4 : kWarp;

// K and V, the number of groups per head and per token, and the number of thread blocks for K in
// grid.y.
struct GroupLaunch {
  TokenIo io;
  FastDivisor per_head[2];
  uint32_t num_groups[2], k_blocks;
};

// The grid dimensions are tokens (x), a token's groups in K and then in V (y), and layers (z). The
// thread block dimensions are lanes (x) and groups (y).
template <class Element, class Format, int n, Direction direction>
__global__ void __launch_bounds__(kThreads) group_io_kernel(KV_PARAMETER GroupLaunch launch) {
  begin_after_previous_kernel();
  using Vectors = GroupVectors<Element, Format, n>;
  using Token = typename Vectors::Token;
  using Page = typename Vectors::Page;
  using Scale = typename Group<Format>::Scale;
  constexpr unsigned kStep = kLanes<Format>;
  const TokenIo& io = launch.io;
  const bool is_v = blockIdx.y >= launch.k_blocks;
  const TokenPages& p = io.sides[is_v];
  const uint32_t at = (is_v ? blockIdx.y - launch.k_blocks : blockIdx.y) * blockDim.y + threadIdx.y;
  const bool is_group = at < launch.num_groups[is_v];
  // Without a group, lanes of a warp in which others have one still take part in its merges.
  if (!is_group && (kStep == kWarp || direction != Direction::kWrite)) return;
  const uint32_t i = blockIdx.x, head = launch.per_head[is_v].divide(at);
  const uint32_t which = at - head * launch.per_head[is_v].divisor;
  const int64_t layer = blockIdx.z, slot = io.slot_for<direction>(i),
                place = place_of(io, p, i, slot);
  if (place == kSkipped || (place == kNoSlot && direction == Direction::kWrite)) return;

  const auto size = static_cast<uint32_t>(p.group_size);
  char* const tokens = p.tokens + layer * p.token_layer_stride + int64_t{i} * p.token_stride +
                       int64_t{head} * p.token_head_stride;
  Token* const token = reinterpret_cast<Token*>(tokens + int64_t{which} * size * sizeof(Element));
  char* const pages = p.pages + layer * p.page_layer_stride + head * p.page_head_stride;
  const uint32_t num_vectors = is_group ? size / n : 0;
  Page* const page =
      reinterpret_cast<Page*>(pages + place + int64_t{which} * num_vectors * sizeof(Page));
  if constexpr (direction == Direction::kWrite) {
    typename Group<Format>::Extent extent;
#pragma unroll 1
    for (uint32_t j = threadIdx.x; j < num_vectors; j += kStep) {
      const Token in = token[j];
#pragma unroll
      for (int k = 0; k < n; ++k) extent.add(widen(in.elements[k]));
    }
    merge_lanes<kStep>(extent);
    const Group<Format> group(extent, p.rule);
    if (threadIdx.x == 0 && is_group) {
      *p.group_scale<Scale>(layer, slot, head, which) = group.stored;
    }
    // Most groups have one vector per lane, which is still in the cache.
#pragma unroll 1
    for (uint32_t j = threadIdx.x; j < num_vectors; j += kStep) {
      page[j] = Vectors::encode(token[j], group);
    }
  } else if (place == kNoSlot) {
    for (uint32_t j = threadIdx.x; j < num_vectors; j += kStep) token[j] = Token{};
  } else {
    const Group<Format> group(*p.group_scale<Scale>(layer, slot, head, which));
    for (uint32_t j = threadIdx.x; j < num_vectors; j += kStep) {
      token[j] = Vectors::decode(page[j], group);
    }
  }
}

template <class Element, class Format, int n, Direction direction>
void launch_groups(const TokenIo& io, const OnDevice& device) {
  GroupLaunch launch{io, {}, {}, 0};
  constexpr unsigned kGroups = kThreads / kLanes<Format>;
  const auto blocks_of = [](uint32_t groups) { return (groups + kGroups - 1) / kGroups; };
  for (const int side : {0, 1}) {
    const TokenPages& p = io.sides[side];
    const int64_t per_head = p.num_heads > 0 ? p.head_size / p.group_size : 1;
    launch.per_head[side] = fast_divisor(per_head);
    launch.num_groups[side] = static_cast<uint32_t>(p.num_heads * per_head);
  }
  launch.k_blocks = blocks_of(launch.num_groups[0]);
  const dim3 grid(unsigned(io.num_tokens), launch.k_blocks + blocks_of(launch.num_groups[1]),
                  unsigned(io.num_layers));
  KV_LAUNCH_DEPENDENT((group_io_kernel<Element, Format, n, direction>), grid,
                      dim3(kLanes<Format>, kGroups), device, launch);
}

// Returns the largest of 16, 8, 4, 2 and 1 that divides all of these byte counts.
int64_t alignment_of(const char* address, std::initializer_list<int64_t> strides) {
  uint64_t all = reinterpret_cast<uintptr_t>(address);
  for (int64_t stride : strides) all |= static_cast<uint64_t>(stride);
  return common_vector_bytes(all);
}

// Returns the launch function for the widest vectors that addresses and strides allow.
template <Direction direction>
Launch launch_of(const TokenPages& p) {
  const int64_t run = p.is_contiguous() ? p.width() : p.head_size;
  const int64_t of_token =
      alignment_of(p.tokens, {p.token_layer_stride, p.token_stride,
                              p.is_contiguous() ? 0 : p.token_head_stride, run * p.token_element});
  const int64_t of_page =
      alignment_of(p.pages, {p.page_layer_stride, p.block_stride, p.offset_stride,
                             p.is_contiguous() ? 0 : p.page_head_stride, run * p.page_element});
  if (p.group_scales != nullptr) {
    return with_group_formats(p, [&](auto element, auto format) -> Launch {
      using Element = decltype(element);
      using Format = decltype(format);
      constexpr int kCodes = kPerByte<Format>;
      const int64_t bytes = p.group_size * p.token_element;
      const int64_t token_bytes = alignment_of(
          p.tokens, {p.token_layer_stride, p.token_stride, p.token_head_stride, bytes});
      const int64_t page_bytes =
          alignment_of(p.pages, {p.page_layer_stride, p.block_stride, p.offset_stride,
                                 p.page_head_stride, p.group_size / kCodes});
      const bool wide = token_bytes >= 4 * p.token_element && page_bytes * kCodes >= 4;
      return wide ? launch_groups<Element, Format, 4, direction>
                  : launch_groups<Element, Format, kCodes, direction>;
    });
  }
  if (p.scales != nullptr) {
    return with_formats(p, [&](auto element, auto format) -> Launch {
      using Element = decltype(element);
      using Format = decltype(format);
      constexpr int kWide = kVectorBytes / sizeof(Element);
      const bool wide = of_token == kVectorBytes && of_page >= kWide;
      if constexpr (direction == Direction::kWrite) {
        return wide ? launch<ToCodes<Element, Format, kWide>, direction>
                    : launch<ToCodes<Element, Format, 1>, direction>;
      } else {
        return wide ? launch<FromCodes<Element, Format, kWide>, direction>
                    : launch<FromCodes<Element, Format, 1>, direction>;
      }
    });
  }
  switch (std::min(of_token, of_page)) {
    case 16:
      return launch<MoveBytes<uint4>, direction>;
    case 8:
      return launch<MoveBytes<uint2>, direction>;
    case 4:
      return launch<MoveBytes<uint32_t>, direction>;
    case 2:
      return launch<MoveBytes<uint16_t>, direction>;
    default:
      return launch<MoveBytes<uint8_t>, direction>;
  }
}

template <Direction direction>
void run(const TokenIo& io, const Tensor& key) {
  if (io.num_tokens == 0 || io.num_layers == 0) return;
  const OnDevice device(key);
  if (checked_mode()) {
    const int64_t i = first_bad_on_device(io, io.num_tokens, device.stream);
    if (i >= 0) {
      const int64_t slot = io.slots == nullptr ? -1 : fetch(io.slots + i, device.stream);
      fail_token_io(io, i, slot);
    }
  }
  const Launch launch_k = launch_of<direction>(io.k()), launch_v = launch_of<direction>(io.v());
  if (io.k().width() > 0 && io.v().width() > 0 && launch_k == launch_v) {
    return launch_k(io, device);
  }
  TokenIo only_k = io, only_v = io;
  only_k.sides[1].num_heads = only_v.sides[0].num_heads = 0;
  if (io.k().width() > 0) launch_k(only_k, device);
  if (io.v().width() > 0) launch_v(only_v, device);
}

// Replaces the addresses of caches in host memory with those that the device uses.
void map_host(TokenIo& io, const Tensor& key, const Tensor& key_cache, const Tensor& value_cache,
              const std::optional<Tensor>& k_scale, const std::optional<Tensor>& v_scale) {
  const OnDevice device(key);
  const auto shift = [&](const Tensor& t, const char* name) -> int64_t {
    const ByteSpan span = span_of(t);
    if (!t.is_cpu() || span.begin == span.end) return 0;
    const auto of_first = shift_to_device(device.index, reinterpret_cast<const char*>(span.begin));
    const auto of_last = shift_to_device(device.index, reinterpret_cast<const char*>(span.end - 1));
    if (!of_first || of_first != of_last) {
      fail(std::string(name) +
           " is host memory that is not pinned: expected one range of pinned "
           "memory, or memory on " +
           device_of(key));
    }
    return *of_first;
  };
  TokenPages &k = io.sides[0], &v = io.sides[1];
  k.pages += shift(key_cache, "key_cache");
  v.pages += shift(value_cache, "value_cache");
  if (k.group_scales != nullptr) k.group_scales += shift(*k_scale, "k_scale");
  if (v.group_scales != nullptr) v.group_scales += shift(*v_scale, "v_scale");
}

void write_kv_cuda(Tensor key, Tensor value, Tensor key_cache, Tensor value_cache,
                   Tensor slot_mapping, std::optional<Tensor> k_scale,
                   std::optional<Tensor> v_scale, int64_t scale_rule) {
  run<Direction::kWrite>(checked_token_io(Direction::kWrite, key, value, key_cache, value_cache,
                                          slot_mapping, k_scale, v_scale, scale_rule),
                         key);
}

void gather_kv_cuda(Tensor key_cache, Tensor value_cache, Tensor slot_mapping, Tensor key,
                    Tensor value, std::optional<Tensor> k_scale, std::optional<Tensor> v_scale) {
  TokenIo io = checked_token_io(Direction::kGather, key, value, key_cache, value_cache,
                                slot_mapping, k_scale, v_scale, 0);
  map_host(io, key, key_cache, value_cache, k_scale, v_scale);
  run<Direction::kGather>(io, key);
}

void check_lengths(const TokenIo& io, const Tensor& key) {
  const OnDevice device(key);
  const int32_t* const lens = io.context.cu_seq_lens;
  const BadLength is_bad{lens, io.num_tokens};
  const int64_t r = first_bad_on_device(is_bad, io.context.num_requests + 1, device.stream);
  if (r < 0) return;
  const int64_t before = r == 0 ? 0 : fetch(lens + r - 1, device.stream);
  fail_length(r, fetch(lens + r, device.stream), before, io.num_tokens);
}

void gather_context_cuda(Tensor key_cache, Tensor value_cache, Tensor block_tables,
                         Tensor cu_seq_lens, Tensor key, Tensor value,
                         std::optional<Tensor> k_scale, std::optional<Tensor> v_scale,
                         std::optional<Tensor> seq_starts, std::optional<Tensor> positions) {
  TokenIo io = checked_context_io(key_cache, value_cache, block_tables, cu_seq_lens, key, value,
                                  k_scale, v_scale, seq_starts, positions);
  map_host(io, key, key_cache, value_cache, k_scale, v_scale);
  if (checked_mode()) check_lengths(io, key);
  run<Direction::kGatherContext>(io, key);
}

}  // namespace

KV_REGISTER_CUDA("gather_context", gather_context_cuda)
KV_REGISTER_CUDA("write_kv", write_kv_cuda)
KV_REGISTER_CUDA("gather_kv", gather_kv_cuda)

}  // namespace kvcache
