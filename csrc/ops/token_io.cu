#include "ops/token_io.h"

#include "ops/device.h"
#include "ops/fast_divisor.h"
#include "ops/vector.h"

namespace kvcache {
namespace {

constexpr int64_t kVectorBytes = 16;
constexpr unsigned kThreads = 128;  // of a thread block, for 1 to 128 tokens
constexpr unsigned kInFlight = 4;   // vectors that a thread loads before it stores the first

// What a thread moves at once: a vector in the tokens, one in the page, and what lies between.
template <class Vector>
struct MoveBytes {
  using Token = Vector;
  using Page = Vector;
  static constexpr bool kScaled = false;
  static KV_HOST_DEVICE Page to_page(const Token& token, float) { return token; }
  static KV_HOST_DEVICE Token to_token(const Page& page, float) { return page; }
};

template <class Element, class Format, int n>
struct Convert {
  struct alignas(n * sizeof(Element)) Token {
    Element elements[n];
  };
  struct alignas(n) Page {
    uint8_t elements[n];
  };
  static constexpr bool kScaled = true;
  static KV_HOST_DEVICE Page to_page(const Token& token, float scale) {
    Page page;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      quantize<Format>(token.elements[i], scale, page.elements[i]);
    }
    return page;
  }
  static KV_HOST_DEVICE Token to_token(const Page& page, float scale) {
    Token token;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      dequantize<Format>(page.elements[i], scale, token.elements[i]);
    }
    return token;
  }
};

// The vectors of a token, and of a piece of it that is dense in the page.
struct Vectors {
  uint32_t total;
  FastDivisor per_piece;
};

template <class Mover>
Vectors vectors_of(const TokenPages& p) {
  constexpr auto kBytes = static_cast<int64_t>(sizeof(typename Mover::Token));
  const auto count = [&](int64_t elements) {
    return static_cast<uint32_t>(elements * p.token_element / kBytes);
  };
  const uint32_t total = count(p.width());
  return {total, fast_divisor(std::max(p.in_one_piece() ? total : count(p.head_size), 1u))};
}

// One thread's part of one token of one layer, K or V.
template <class Mover, Direction direction>
__device__ __forceinline__ void move_token(const TokenPages& p, const Vectors& vectors,
                                           int64_t layer, int64_t i, int64_t slot) {
  using Token = typename Mover::Token;
  using Page = typename Mover::Page;
  Token* const token = reinterpret_cast<Token*>(p.token(layer, i));
  if (slot < 0) {
    if constexpr (direction == Direction::kGather) {
      for (uint32_t j = threadIdx.x; j < vectors.total; j += blockDim.x) token[j] = Token{};
    }
    return;
  }
  char* const pages = p.page(layer, slot);
  for (uint32_t first = threadIdx.x; first < vectors.total; first += kInFlight * blockDim.x) {
    Token in_token[kInFlight];
    Page in_page[kInFlight];
    Page* place[kInFlight];
    float scale[kInFlight];
#pragma unroll
    for (unsigned u = 0; u < kInFlight; ++u) {
      const uint32_t j = first + u * blockDim.x;
      if (j < vectors.total) {
        const uint32_t piece = vectors.per_piece.divide(j);
        place[u] = reinterpret_cast<Page*>(pages + piece * p.page_head_stride) +
                   (j - piece * vectors.per_piece.divisor);
        scale[u] = Mover::kScaled ? p.scale(layer, piece) : 1.0f;
        if constexpr (direction == Direction::kWrite) {
          in_token[u] = token[j];
        } else {
          in_page[u] = *place[u];
        }
      }
    }
#pragma unroll
    for (unsigned u = 0; u < kInFlight; ++u) {
      const uint32_t j = first + u * blockDim.x;
      if (j < vectors.total) {
        if constexpr (direction == Direction::kWrite) {
          *place[u] = Mover::to_page(in_token[u], scale[u]);
        } else {
          token[j] = Mover::to_token(in_page[u], scale[u]);
        }
      }
    }
  }
}

// Grid: groups of tokens, K and V, layers. Thread block: x share a token, y are its tokens.
template <class Mover, Direction direction>
__global__ void token_io_kernel(TokenIo io, Vectors of_k, Vectors of_v) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  if (i >= io.num_tokens || io(i)) return;  // out of range: skipped, see checked_mode
  if (blockIdx.y == 0) {
    move_token<Mover, direction>(io.k, of_k, blockIdx.z, i, io.slots[i]);
  } else {
    move_token<Mover, direction>(io.v, of_v, blockIdx.z, i, io.slots[i]);
  }
}

using Launch = void (*)(const TokenIo& io, const OnDevice& device);

template <class Mover, Direction direction>
void launch(const TokenIo& io, const OnDevice& device) {
  const Vectors of_k = vectors_of<Mover>(io.k), of_v = vectors_of<Mover>(io.v);
  const uint32_t most = std::max(of_k.total, of_v.total);
  unsigned sharing = 1;
  while (sharing < kThreads && sharing * kInFlight < most) sharing *= 2;
  const dim3 block(sharing, kThreads / sharing);
  const dim3 grid(unsigned((io.num_tokens + block.y - 1) / block.y), of_v.total > 0 ? 2 : 1,
                  unsigned(io.num_layers));
  KV_LAUNCH((token_io_kernel<Mover, direction>), grid, block, 0, device.stream, io, of_k, of_v);
}

// What all of these bytes are a multiple of: 16, 8, 4, 2 or 1.
int64_t alignment_of(const char* address, std::initializer_list<int64_t> strides) {
  uint64_t all = reinterpret_cast<uintptr_t>(address);
  for (int64_t stride : strides) all |= static_cast<uint64_t>(stride);
  return common_vector_bytes(all);
}

// The launch with the widest vectors that addresses and strides of this side allow.
template <Direction direction>
Launch launch_of(const TokenPages& p) {
  const int64_t piece = p.in_one_piece() ? p.width() : p.head_size;
  const int64_t of_token =
      alignment_of(p.tokens, {p.token_layer_stride, p.token_stride, piece * p.token_element});
  const int64_t of_page =
      alignment_of(p.pages, {p.page_layer_stride, p.block_stride, p.offset_stride,
                             p.in_one_piece() ? 0 : p.page_head_stride, piece * p.page_element});
  if (p.scales != nullptr) {
    return with_formats(p, [&](auto element, auto format) -> Launch {
      using Element = decltype(element);
      constexpr int kWide = kVectorBytes / sizeof(Element);
      if (of_token == kVectorBytes && of_page >= kWide) {
        return launch<Convert<Element, decltype(format), kWide>, direction>;
      }
      return launch<Convert<Element, decltype(format), 1>, direction>;
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
    if (i >= 0) fail_token_io(io, i, fetch(io.slots + i, device.stream));
  }
  const Launch launch_k = launch_of<direction>(io.k), launch_v = launch_of<direction>(io.v);
  if (io.k.width() > 0 && io.v.width() > 0 && launch_k == launch_v) {
    return launch_k(io, device);
  }
  TokenIo k = io, v = io;
  k.v.num_heads = v.k.num_heads = 0;
  if (io.k.width() > 0) launch_k(k, device);
  if (io.v.width() > 0) launch_v(v, device);
}

void write_kv_cuda(Tensor key, Tensor value, Tensor key_cache, Tensor value_cache,
                   Tensor slot_mapping, std::optional<Tensor> k_scale,
                   std::optional<Tensor> v_scale) {
  run<Direction::kWrite>(checked_token_io(Direction::kWrite, key, value, key_cache, value_cache,
                                          slot_mapping, k_scale, v_scale),
                         key);
}

void gather_kv_cuda(Tensor key_cache, Tensor value_cache, Tensor slot_mapping, Tensor key,
                    Tensor value, std::optional<Tensor> k_scale, std::optional<Tensor> v_scale) {
  run<Direction::kGather>(checked_token_io(Direction::kGather, key, value, key_cache, value_cache,
                                           slot_mapping, k_scale, v_scale),
                          key);
}

}  // namespace

KV_REGISTER_CUDA("write_kv", write_kv_cuda)
KV_REGISTER_CUDA("gather_kv", gather_kv_cuda)

}  // namespace kvcache
