// SPDX-License-Identifier: Apache-2.0
#include "core/hashing/hashed_tokens.h"

#include <utility>

#include "core/errors.h"
#include "core/hashing/cbor.h"

namespace kvcache {

std::vector<Hash> HashedTokens::hash_behind(const std::vector<int32_t>& tokens,
                                            const std::vector<std::string>& extras) const {
  const auto first = kept_.begin() + (num_blocks() * block_size_ - first_kept_);
  const Hash& parent = hashes_.empty() ? parent_ : hashes_.back();
  std::vector<int32_t> unhashed;
  const int32_t* all = tokens.data();
  if (first != kept_.end()) {
    unhashed.assign(first, kept_.end());
    unhashed.insert(unhashed.end(), tokens.begin(), tokens.end());
    all = unhashed.data();
  }
  const int64_t n = std::max(num_filled_by(static_cast<int64_t>(tokens.size())), int64_t{0});
  return hash_blocks(algorithm_, all, static_cast<size_t>(n * block_size_), block_size_, parent,
                     num_lookahead_ == 0 ? extras : extras_with_lookahead(all, n, extras));
}

std::vector<std::string> HashedTokens::extras_with_lookahead(
    const int32_t* tokens, int64_t num_blocks, const std::vector<std::string>& extras) const {
  std::vector<std::string> out(static_cast<size_t>(num_blocks));
  for (size_t i = 0; i < out.size(); ++i) {
    append_head(&out[i], kArray, static_cast<uint32_t>(1 + num_lookahead_));
    if (extras.empty() || extras[i].empty()) {
      out[i].push_back(static_cast<char>(kCborNull));
    } else {
      out[i] += extras[i];
    }
    const int32_t* next = tokens + (static_cast<int64_t>(i) + 1) * block_size_;
    for (int64_t j = 0; j < num_lookahead_; ++j) append_int(&out[i], next[j]);
  }
  return out;
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
    throw_invalid("hashes of ", num_blocks(), " blocks are known: expected ", stop);
  }
  std::copy(hashes_.begin() + first, hashes_.begin() + stop, out);
}

}  // namespace kvcache
