// SPDX-License-Identifier: Apache-2.0
#include "core/hashing/token_chain.h"

#include <array>
#include <stdexcept>

#include "core/errors.h"
#include "core/hashing/long_work.h"

namespace kvcache {

void TokenIds::append_any(const int32_t* tokens, int64_t n) {
  if (num_hashing_ > 0) {
    throw std::runtime_error(
        "token_ids were appended while blocks of the same request are being hashed: "
        "append them after that call has returned");
  }
  if (ids_.capacity() == 0) reserve(static_cast<size_t>(n));
  if (tokens == nullptr) {
    ids_.resize(ids_.size() + static_cast<size_t>(n));
  } else {
    if (!takes_placeholders_) {
      const int32_t* negative = std::find_if(tokens, tokens + n, [](int32_t t) { return t < 0; });
      if (negative != tokens + n) fail_negative(negative - tokens, *negative);
    }
    ids_.append(tokens, static_cast<size_t>(n));
  }
  try {
    for (TokenChain* chain : readers_) chain->read_given();
  } catch (...) {
    take_back(n);
    throw;
  }
}

// Reserves space for generated tokens, so that appending the first one does not copy a long prompt.
// Requests that are admitted together get different capacities. With equal capacities, all of them
// would grow in the same step.
void TokenIds::reserve(size_t num_prompt_tokens) {
  constexpr size_t kLeast = 256, kStride = 37;  // odd, so that kLeast requests differ
  static thread_local size_t num_requests = 0;
  ids_.reserve(num_prompt_tokens + kLeast + kStride * num_requests++ % kLeast);
}

void TokenIds::take_back(int64_t n) {
  ids_.resize(ids_.size() - static_cast<size_t>(n));
  for (TokenChain* chain : readers_) chain->forget_removed();
}

void TokenIds::fail_negative(int64_t i, int32_t id) {
  throw_invalid(
      "token_ids[", i, "] is ", id,
      ": expected 0 to 2147483647 (below 0 only where extra keys or given hashes identify it)");
}

TokenChain::TokenChain(std::shared_ptr<TokenIds> tokens, int64_t block_size, const Hash& parent,
                       ExtraKeys extra_keys, bool read_cache, bool write_cache,
                       int64_t num_encoder_tokens, HashScheme scheme, EventLabels labels)
    : tokens_(std::move(tokens)),
      block_size_(checked_size("block_size", block_size, 1)),
      parent_(parent),
      extra_keys_(std::move(extra_keys)),
      read_cache_(read_cache),
      write_cache_(write_cache),
      num_encoder_tokens_(checked_size("num_encoder_tokens", num_encoder_tokens, 0)),
      scheme_(std::move(scheme)),
      labels_(std::move(labels)) {
  if (!is_given()) return;
  read_given();
  tokens_->readers_.push_back(this);
}

TokenChain::~TokenChain() {
  std::vector<TokenChain*>& readers = tokens_->readers_;
  readers.erase(std::remove(readers.begin(), readers.end(), this), readers.end());
}

bool TokenChain::begins_like(const TokenChain& other, int64_t num_tokens) const {
  const int64_t num_begun = (num_tokens + block_size_ - 1) / block_size_;
  if (std::min(this->num_tokens(), other.num_tokens()) < num_tokens ||
      num_encoder_tokens_ != other.num_encoder_tokens_ ||
      !extra_keys_.begins_like(other.extra_keys_, num_begun) ||
      !std::equal(tokens(), tokens() + num_tokens, other.tokens())) {
    return false;
  }
  if (!(parent_ == other.parent_)) return true;  // their hashes cannot be compared
  const auto num_full = static_cast<size_t>(num_tokens / block_size_);
  const auto num_both = std::min({num_full, hashes_.size(), other.hashes_.size()});
  return std::equal(hashes_.begin(), hashes_.begin() + num_both, other.hashes_.begin());
}

void TokenChain::adopt_hashes(const TokenChain& other, int64_t num_tokens) {
  const auto n = std::min(static_cast<size_t>(num_tokens / block_size_), other.hashes_.size());
  if (is_hashing_ || hashes_.size() >= n || !(parent_ == other.parent_)) return;
  if (!other.variants_.empty()) {
    variants_.assign(other.variants_.data(), n);
  }
  hashes_.assign(other.hashes_.data(), n);
}

std::shared_ptr<TokenChain> TokenChain::uncached() const {
  auto chain =
      std::make_shared<TokenChain>(tokens_, block_size_, parent_, extra_keys_, /*read_cache=*/false,
                                   /*write_cache=*/false, num_encoder_tokens_, scheme_, labels_);
  chain->adopt_hashes(*this, num_tokens());
  return chain;
}

void TokenChain::forget_removed() {
  const auto num_full = static_cast<size_t>(num_hashable());
  if (hashes_.size() > num_full) hashes_.resize(num_full);
  if (variants_.size() > num_full) variants_.resize(num_full);
}

// Marks a chain whose missing hashes are being computed. The chain's tokens cannot change while
// this object exists.
class TokenChain::Hashing {
 public:
  explicit Hashing(TokenChain* chain) : chain_(chain) {
    if (chain->is_hashing_) {
      throw std::runtime_error(
          "the blocks of this request are being hashed by a call that has not returned: "
          "use a request in one call at a time");
    }
    // The hashes grow with the capacity of the tokens, so that most generated blocks cause no copy.
    chain->hashes_.reserve(static_cast<size_t>(chain->tokens_->capacity() / chain->block_size_));
    chain->is_hashing_ = true;
    ++chain->tokens_->num_hashing_;
  }
  ~Hashing() {
    chain_->is_hashing_ = false;
    --chain_->tokens_->num_hashing_;
  }
  Hashing(const Hashing&) = delete;

  const TokenChain* chain() const { return chain_; }

  bool is_done() const { return !chain_->has_unhashed_blocks(); }
  // The number of blocks to hash in one run. With items, it is one, because `put` needs the extra
  // keys of the block for which `content` was called last. With embeddings, it is one, because
  // reading them may run Python code, which may use the same hasher.
  size_t run_length() const {
    if (chain_->extra_keys_.has_items() || chain_->extra_keys_.has_embeds()) return 1;
    const auto num_left = static_cast<size_t>(chain_->num_hashable()) - chain_->hashes_.size();
    return std::min(num_left, blocks_per_run(chain_->block_size_));
  }
  // The hash of the last hashed block, or the parent of the chain if no block is hashed yet.
  const Hash& last() const {
    return chain_->hashes_.empty() ? chain_->parent_ : chain_->hashes_.back();
  }
  // Returns the content of a block. `following` counts from the first block that is not hashed yet.
  BlockContent content(size_t following) const {
    const auto i = static_cast<int64_t>(chain_->hashes_.size() + following);
    return {chain_->scheme_.algorithm, chain_->tokens_->data() + i * chain_->block_size_,
            chain_->block_size_, chain_->extra_keys_.of_block(i, chain_->block_size_)};
  }
  void put(const Hash* hashes, size_t n) {
    if (chain_->extra_keys_.has_items()) {  // n is 1
      GrowingArray<uint64_t>& variants = chain_->variants_;
      // An earlier attempt that threw may have left an extra entry.
      variants.resize(chain_->hashes_.size());
      variants.push_back(
          chain_->extra_keys_.variant_behind(variants.empty() ? 0 : variants.back()));
    }
    chain_->hashes_.append(hashes, n);
  }

 private:
  TokenChain* chain_;
};

const HashList& TokenChain::hashes() {
  TokenChain* const chain = this;
  hash_all(&chain, 1);
  return hashes_;
}

// One or two of the given chains, which are hashed together until one of them is done.
class TokenChain::HashingPair {
 public:
  HashingPair(TokenChain* const* chains, size_t n) : chains_(chains), num_left_(n) {}

  // Replaces chains that are done. Returns whether any chain is left.
  bool fill() {
    for (std::optional<Hashing>& each : pair_) {
      if (each && each->is_done()) each.reset();
      for (; !each && num_left_ > 0; --num_left_) {
        TokenChain* const chain = *chains_++;
        const auto is_in_pair = [&](const auto& h) { return h && h->chain() == chain; };
        if (std::any_of(pair_.begin(), pair_.end(), is_in_pair)) continue;  // listed twice
        if (chain->is_hashing_ || chain->has_unhashed_blocks()) each.emplace(chain);
      }
    }
    return pair_[0] || pair_[1];
  }
  Hashing& first() { return pair_[0] ? *pair_[0] : *pair_[1]; }
  Hashing* second() { return pair_[0] && pair_[1] ? &*pair_[1] : nullptr; }  // null: none is left

 private:
  TokenChain* const* chains_;
  size_t num_left_;
  std::array<std::optional<Hashing>, 2> pair_;
};

void TokenChain::hash_all(TokenChain* const* chains, size_t n) {
  if (n == 0) return;  // most decode steps fill no block
  static thread_local BlockHasher hasher;
  Pieces pieces;
  HashingPair pair(chains, n);
  while (pair.fill()) {
    Hashing& first = pair.first();
    const int64_t block_size = first.chain()->block_size_;
    if (Hashing* second = pair.second(); second != nullptr) {
      Hash hashes[2];
      hasher.hash_two({first.content(0), second->content(0)}, {&first.last(), &second->last()},
                      hashes);
      first.put(&hashes[0], 1);
      second->put(&hashes[1], 1);
      pieces.pass(block_size + second->chain()->block_size_);
      continue;
    }
    // Local, because reading embeddings may run Python code that calls this function.
    Hash run[kMostBlocksPerRun];
    const size_t num_run = first.run_length();
    hasher.hash_run(first.last(), num_run, [&](size_t i) { return first.content(i); }, run);
    first.put(run, num_run);
    pieces.pass(static_cast<int64_t>(num_run) * block_size);
  }
}

void TokenChain::read_given() {
  const size_t num_known = hashes_.size();
  const auto num_full = static_cast<size_t>(num_hashable());
  if (num_full <= num_known) return;
  hashes_.resize(num_full);  // removed with the tokens if `read` throws
  scheme_.given->read(static_cast<int64_t>(num_known), static_cast<int64_t>(num_full),
                      hashes_.data() + num_known);
}

}  // namespace kvcache
