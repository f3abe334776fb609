#include "core/hashing/hashed_tokens.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace kvcache {

std::vector<Hash> HashedTokens::hash_behind(const std::vector<int32_t>& tokens,
                                            const std::vector<std::string>& extras) const {
  const auto first = tokens_.begin() + num_blocks() * block_size_;
  const Hash& parent = hashes_.empty() ? parent_ : hashes_.back();
  if (first == tokens_.end()) return hash_blocks(algorithm_, tokens, block_size_, parent, extras);
  std::vector<int32_t> unhashed(first, tokens_.end());
  unhashed.insert(unhashed.end(), tokens.begin(), tokens.end());
  return hash_blocks(algorithm_, unhashed, block_size_, parent, extras);
}

void HashedTokens::append(std::vector<int32_t> tokens, std::vector<Hash> hashes) {
  if (tokens_.empty()) {  // a long prompt is not copied
    hashes_ = std::move(hashes);
    tokens_ = std::move(tokens);
    return;
  }
  hashes_.insert(hashes_.end(), hashes.begin(), hashes.end());
  tokens_.insert(tokens_.end(), tokens.begin(), tokens.end());
}

void HashedTokens::truncate(int64_t num_blocks) {
  hashes_.resize(static_cast<size_t>(num_blocks));
  tokens_.resize(static_cast<size_t>(num_blocks * block_size_));
}

void HashedTokens::read(int64_t first, int64_t stop, Hash* out) const {
  if (stop > num_blocks()) {
    throw std::invalid_argument("hashes of " + std::to_string(num_blocks()) +
                                " blocks are known: expected " + std::to_string(stop));
  }
  std::copy(hashes_.begin() + first, hashes_.begin() + stop, out);
}

}  // namespace kvcache
