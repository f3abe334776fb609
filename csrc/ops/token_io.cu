#include "ops/token_io.h"

#include "ops/device.h"

namespace kvcache {
namespace {

constexpr unsigned kMaxThreads = 256;

template <int kBytes>
struct VectorOf;
template <>
struct VectorOf<16> {
  using type = uint4;
};
template <>
struct VectorOf<8> {
  using type = uint2;
};
template <>
struct VectorOf<4> {
  using type = uint32_t;
};
template <>
struct VectorOf<2> {
  using type = uint16_t;
};
template <>
struct VectorOf<1> {
  using type = uint8_t;
};

// One thread block per token (x) and per K or V (y); its threads share the token's vectors.
template <class Vector, Direction direction>
__global__ void token_io_kernel(TokenIo io) {
  const int64_t i = blockIdx.x;
  if (io(i)) return;  // out of range: skipped, see checked_mode
  const int64_t slot = io.slots[i];
  if (direction == Direction::kWrite && slot < 0) return;
  const TokenPages& p = blockIdx.y == 0 ? io.k : io.v;
  const int per_head = static_cast<int>(p.head_bytes / sizeof(Vector));
  const int total = per_head * static_cast<int>(p.num_heads);
  for (int j = threadIdx.x; j < total; j += blockDim.x) {
    const int head = j / per_head;
    const int offset = j - head * per_head;
    Vector* token = reinterpret_cast<Vector*>(p.token(i, head)) + offset;
    if (direction == Direction::kGather && slot < 0) {
      *token = Vector{};
      continue;
    }
    Vector* page = reinterpret_cast<Vector*>(p.page(slot, head)) + offset;
    if (direction == Direction::kWrite) {
      *page = *token;
    } else {
      *token = *page;
    }
  }
}

template <int kBytes, Direction direction>
void launch(const TokenIo& io, const OnDevice& device) {
  using Vector = typename VectorOf<kBytes>::type;
  const int64_t vectors =
      std::max(io.k.num_heads * io.k.head_bytes, io.v.num_heads * io.v.head_bytes) / kBytes;
  const unsigned threads =
      static_cast<unsigned>(std::min<int64_t>((vectors + 31) / 32 * 32, kMaxThreads));
  KV_LAUNCH((token_io_kernel<Vector, direction>), dim3(unsigned(io.num_tokens), 2), dim3(threads),
            0, device.stream, io);
}

template <Direction direction>
void run(const TokenIo& io, const Tensor& key) {
  if (io.num_tokens == 0 ||
      io.k.num_heads * io.k.head_bytes + io.v.num_heads * io.v.head_bytes == 0)
    return;
  const OnDevice device(key);
  if (checked_mode()) {
    const int64_t i = first_bad_on_device(io, io.num_tokens, device.stream);
    if (i >= 0) fail_token_io(io, i, fetch(io.slots + i, device.stream));
  }
  switch (std::min(vector_bytes(io.k), vector_bytes(io.v))) {
    case 16:
      return launch<16, direction>(io, device);
    case 8:
      return launch<8, direction>(io, device);
    case 4:
      return launch<4, direction>(io, device);
    case 2:
      return launch<2, direction>(io, device);
    default:
      return launch<1, direction>(io, device);
  }
}

void write_kv_cuda(Tensor key, Tensor value, Tensor key_cache, Tensor value_cache,
                   Tensor slot_mapping) {
  run<Direction::kWrite>(
      checked_token_io(Direction::kWrite, key, value, key_cache, value_cache, slot_mapping), key);
}

void gather_kv_cuda(Tensor key_cache, Tensor value_cache, Tensor slot_mapping, Tensor key,
                    Tensor value) {
  run<Direction::kGather>(
      checked_token_io(Direction::kGather, key, value, key_cache, value_cache, slot_mapping), key);
}

}  // namespace

KV_REGISTER_CUDA("write_kv", write_kv_cuda)
KV_REGISTER_CUDA("gather_kv", gather_kv_cuda)

}  // namespace kvcache
