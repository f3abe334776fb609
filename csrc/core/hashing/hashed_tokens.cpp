#include "core/hashing/hashed_tokens.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace kvcache {

std::vector<Hash> HashedTokens::hash_behind(const std::vector<int32_t>& tokens,
                                            const std::vector<std::string>& extras) const {
  const auto first = kept_.begin() + (num_blocks() * block_size_ - first_kept_);
  const Hash& parent = hashes_.empty() ? parent_ : hashes_.back();
  if (first == kept_.end()) {
    return hash_blocks(algorithm_, tokens.data(), tokens.size(), block_size_, parent, extras);
  }
  std::vector<int32_t> unhashed(first, kept_.end());
  unhashed.insert(unhashed.end(), tokens.begin(), tokens.end());
  return hash_blocks(algorithm_, unhashed.data(), unhashed.size(), block_size_, parent, extras);
}

void HashedTokens::append(std::vector<int32_t> tokens, std::vector<Hash> hashes) {
  if (num_tokens() == 0) {  // moves a long prompt instead of copying it
    hashes_ = std::move(hashes);
    kept_ = std::move(tokens);
    return;
  }
  hashes_.insert(hashes_.end(), hashes.begin(), hashes.end());
  kept_.insert(kept_.end(), tokens.begin(), tokens.end());
  if (first_kept_ > 0) drop_full_blocks();
}

void HashedTokens::truncate(int64_t num_blocks) {
  hashes_.resize(static_cast<size_t>(num_blocks));
  const int64_t stop = num_blocks * block_size_;
  kept_.resize(static_cast<size_t>(std::max(stop - first_kept_, int64_t{0})));
  first_kept_ = std::min(first_kept_, stop);
}

std::vector<int32_t> HashedTokens::take_tokens() {
  if (first_kept_ > 0) return {};
  std::vector<int32_t> all = std::move(kept_);
  first_kept_ = num_blocks() * block_size_;
  kept_.assign(all.begin() + first_kept_, all.end());
  return all;
}

void HashedTokens::drop_full_blocks() {
  const int64_t stop = num_blocks() * block_size_;
  kept_.erase(kept_.begin(), kept_.begin() + (stop - first_kept_));
  first_kept_ = stop;
}

void HashedTokens::read(int64_t first, int64_t stop, Hash* out) const {
  if (stop > num_blocks()) {
    throw std::invalid_argument("hashes of " + std::to_string(num_blocks()) +
                                " blocks are known: expected " + std::to_string(stop));
  }
  std::copy(hashes_.begin() + first, hashes_.begin() + stop, out);
}

}  // namespace kvcache
