#include "ops/token_io.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <cstring>

namespace kvcache {
namespace {

constexpr int64_t kGrainBytes = 1 << 18;  // per thread: below it a second thread costs more

template <Direction direction>
void move_token(const TokenPages& p, int64_t i, int64_t slot) {
  // Heads that are neighbours in the page too (NHD) move in one piece.
  const bool dense = p.page_head_stride == p.head_bytes;
  const int64_t num_pieces = dense ? 1 : p.num_heads;
  const size_t bytes = static_cast<size_t>(dense ? p.head_bytes * p.num_heads : p.head_bytes);
  for (int64_t head = 0; head < num_pieces; ++head) {
    if constexpr (direction == Direction::kWrite) {
      if (slot >= 0) std::memcpy(p.page(slot, head), p.token(i, head), bytes);
    } else if (slot >= 0) {
      std::memcpy(p.token(i, head), p.page(slot, head), bytes);
    } else {
      std::memset(p.token(i, head), 0, bytes);
    }
  }
}

template <Direction direction>
void run(const TokenIo& io) {
  // All of them before the first write; also before parallel_for, which would lose the message.
  for (int64_t i = 0; i < io.num_tokens; ++i) {
    if (io(i)) fail_token_io(io, i, io.slots[i]);
  }
  const int64_t token_bytes =
      io.k.num_heads * io.k.head_bytes + io.v.num_heads * io.v.head_bytes + 1;
  const int64_t grain = std::max<int64_t>(kGrainBytes / token_bytes, 1);
  torch::stable::parallel_for(0, io.num_tokens, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      move_token<direction>(io.k, i, io.slots[i]);
      move_token<direction>(io.v, i, io.slots[i]);
    }
  });
}

void write_kv(Tensor key, Tensor value, Tensor key_cache, Tensor value_cache, Tensor slot_mapping) {
  run<Direction::kWrite>(
      checked_token_io(Direction::kWrite, key, value, key_cache, value_cache, slot_mapping));
}

void gather_kv(Tensor key_cache, Tensor value_cache, Tensor slot_mapping, Tensor key,
               Tensor value) {
  run<Direction::kGather>(
      checked_token_io(Direction::kGather, key, value, key_cache, value_cache, slot_mapping));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(kvcache, CPU, m) {
  m.impl("write_kv", TORCH_BOX(&write_kv));
  m.impl("gather_kv", TORCH_BOX(&gather_kv));
}

}  // namespace kvcache
