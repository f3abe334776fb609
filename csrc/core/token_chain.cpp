#include "core/token_chain.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace kvcache {

TokenChain::TokenChain(int64_t block_size, const Hash& parent,
                       std::vector<std::string> block_extras, std::string later_extra,
                       bool read_cache, bool write_cache)
    : block_size_(block_size),
      parent_(parent),
      block_extras_(std::move(block_extras)),
      later_extra_(std::move(later_extra)),
      read_cache_(read_cache),
      write_cache_(write_cache) {
  if (block_size < 1) {
    throw std::invalid_argument("block_size is " + std::to_string(block_size) +
                                ": expected 1 or more");
  }
}

void TokenChain::append(const int32_t* tokens, int64_t n) {
  const int32_t* bad = std::find_if(tokens, tokens + n, [](int32_t t) { return t < 0; });
  if (bad != tokens + n) {
    throw std::invalid_argument("token_ids[" + std::to_string(bad - tokens) + "] is " +
                                std::to_string(*bad) + ": expected 0 to 2147483647");
  }
  tokens_.insert(tokens_.end(), tokens, tokens + n);
}

const std::vector<Hash>& TokenChain::hashes() {
  static thread_local BlockHasher hasher;
  const size_t num_full = static_cast<size_t>(num_full_blocks());
  if (hashes_.size() == num_full) return hashes_;
  hashes_.reserve(num_full);
  while (hashes_.size() < num_full) {
    const size_t i = hashes_.size();
    const std::string& extra = i < block_extras_.size() ? block_extras_[i] : later_extra_;
    hashes_.push_back(hasher.hash(hashes_.empty() ? parent_ : hashes_.back(),
                                  tokens_.data() + static_cast<int64_t>(i) * block_size_,
                                  block_size_, extra));
  }
  return hashes_;
}

}  // namespace kvcache
