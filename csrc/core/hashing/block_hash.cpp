#include "core/hashing/block_hash.h"

#include <algorithm>

#include "core/hashing/cbor.h"
#include "core/hashing/sha256.h"

namespace kvcache {

Hash hash_seed(std::string_view seed) {
  std::vector<uint8_t> buffer(seed.size() + kMaxHeadBytes);
  uint8_t* p = write_head(buffer.data(), kText, static_cast<uint32_t>(seed.size()));
  p = std::copy(seed.begin(), seed.end(), p);
  Hash out;
  sha256(buffer.data(), static_cast<size_t>(p - buffer.data()), out.bytes);
  return out;
}

Hash BlockHasher::hash(const Hash& parent, const int32_t* tokens, int64_t num_tokens,
                       std::string_view extra) {
  const size_t capacity =
      static_cast<size_t>(num_tokens) * kMaxHeadBytes + sizeof(Hash) + extra.size() + 16;
  if (buffer_.size() < capacity) buffer_.resize(capacity);
  uint8_t* p = buffer_.data();
  p = write_head(p, kArray, 3);
  p = write_head(p, kBytes, sizeof(Hash));
  std::memcpy(p, parent.bytes, sizeof(Hash));
  p = write_head(p + sizeof(Hash), kArray, static_cast<uint32_t>(num_tokens));
  for (int64_t i = 0; i < num_tokens; ++i) {
    p = write_head(p, kUnsigned, static_cast<uint32_t>(tokens[i]));
  }
  if (extra.empty()) {
    *p++ = kCborNull;
  } else {
    p = std::copy(extra.begin(), extra.end(), p);
  }
  Hash out;
  sha256(buffer_.data(), static_cast<size_t>(p - buffer_.data()), out.bytes);
  return out;
}

std::vector<Hash> hash_blocks(const std::vector<int32_t>& tokens, int64_t block_size,
                              const Hash& parent, const std::vector<std::string>& extras) {
  BlockHasher hasher;
  std::vector<Hash> out(tokens.size() / static_cast<size_t>(block_size));
  for (size_t i = 0; i < out.size(); ++i) {
    out[i] = hasher.hash(i == 0 ? parent : out[i - 1],
                         tokens.data() + i * static_cast<size_t>(block_size), block_size,
                         extras.empty() ? std::string_view() : extras[i]);
  }
  return out;
}

}  // namespace kvcache
