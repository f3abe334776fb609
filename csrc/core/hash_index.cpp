#include "core/block_pool.h"

namespace kvcache {

namespace {

int log2_ceil(int64_t n) {
  int bits = 1;
  while ((int64_t{1} << bits) < n) ++bits;
  return bits;
}

}  // namespace

HashIndex::HashIndex(Block* blocks, int64_t num_blocks)
    : blocks_(blocks), log2_size_(log2_ceil(num_blocks)), buckets_(size_t{1} << log2_size_) {}

size_t HashIndex::bucket_of(const Hash& hash, uint16_t group) const {
  uint64_t word;
  std::memcpy(&word, hash.bytes, sizeof(word));
  // Hashes are uniform already; the multiplication also spreads ones that a caller made up.
  word = (word ^ (uint64_t{group} << 48)) * 0x9E3779B97F4A7C15ull;
  return static_cast<size_t>(word >> (64 - log2_size_));
}

BlockId HashIndex::find(const Hash& hash, uint16_t group) const {
  BlockId id = buckets_[bucket_of(hash, group)];
  while (id != kNullBlock && !(blocks_[id].group == group && blocks_[id].hash == hash)) {
    id = blocks_[id].bucket_next;
  }
  return id;
}

void HashIndex::prefetch_bucket(const Hash& hash, uint16_t group) const {
  __builtin_prefetch(&buckets_[bucket_of(hash, group)]);
}

void HashIndex::prefetch_head(const Hash& hash, uint16_t group) const {
  __builtin_prefetch(&blocks_[buckets_[bucket_of(hash, group)]]);
}

void HashIndex::insert(BlockId id) {
  Block& block = blocks_[id];
  const BlockId oldest = find(block.hash, block.group);
  if (oldest == kNullBlock) {
    BlockId& bucket = buckets_[bucket_of(block.hash, block.group)];
    block.bucket_next = bucket;
    block.older = block.younger = id;
    bucket = id;
    return;
  }
  // The ring is circular: what is "older" than the oldest is the youngest, where `id` goes in.
  const BlockId youngest = blocks_[oldest].older;
  block.older = youngest;
  block.younger = oldest;
  blocks_[youngest].younger = id;
  blocks_[oldest].older = id;
}

void HashIndex::erase(BlockId id) {
  Block& block = blocks_[id];
  const BlockId next_oldest = block.younger == id ? kNullBlock : block.younger;
  blocks_[block.older].younger = block.younger;
  blocks_[block.younger].older = block.older;

  // Only the oldest of a ring stands in the bucket's chain; where `id` is not found, it was not it.
  for (BlockId* link = &buckets_[bucket_of(block.hash, block.group)]; *link != kNullBlock;
       link = &blocks_[*link].bucket_next) {
    if (*link != id) continue;
    if (next_oldest == kNullBlock) {
      *link = block.bucket_next;
    } else {
      blocks_[next_oldest].bucket_next = block.bucket_next;
      *link = next_oldest;
    }
    return;
  }
}

}  // namespace kvcache
