#include "core/hashing/hashed_tokens.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace kvcache {

std::vector<Hash> HashedTokens::hash_behind(const std::vector<int32_t>& tokens,
                                            const std::vector<std::string>& extras) const {
  const std::vector<int32_t>& known = tokens_->ids();
  const auto first = known.begin() + num_blocks() * block_size_;
  const Hash& parent = hashes_.empty() ? parent_ : hashes_.back();
  if (first == known.end()) return hash_blocks(algorithm_, tokens, block_size_, parent, extras);
  std::vector<int32_t> unhashed(first, known.end());
  unhashed.insert(unhashed.end(), tokens.begin(), tokens.end());
  return hash_blocks(algorithm_, unhashed, block_size_, parent, extras);
}

void HashedTokens::append(std::vector<int32_t> tokens, std::vector<Hash> hashes) {
  const size_t num_known = hashes_.size();
  // Chains read them while the tokens are appended.
  if (num_known == 0) {
    hashes_ = std::move(hashes);  // a long prompt's are not copied
  } else {
    hashes_.insert(hashes_.end(), hashes.begin(), hashes.end());
  }
  try {
    tokens_->append(std::move(tokens));
  } catch (...) {
    hashes_.resize(num_known);
    throw;
  }
}

void HashedTokens::truncate(int64_t num_blocks) {
  tokens_->take_back(tokens_->size() - num_blocks * block_size_);
  hashes_.resize(static_cast<size_t>(num_blocks));
}

void HashedTokens::read(int64_t first, int64_t stop, Hash* out) const {
  if (stop > num_blocks()) {
    throw std::invalid_argument("hashes of " + std::to_string(num_blocks()) +
                                " blocks are known: expected " + std::to_string(stop));
  }
  std::copy(hashes_.begin() + first, hashes_.begin() + stop, out);
}

}  // namespace kvcache
