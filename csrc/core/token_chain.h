// The tokens of one request and the hashes of its full blocks. Belongs to the request, so that
// hashes computed once survive preemption.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/block_hash.h"

namespace kvcache {

class TokenChain {
 public:
  // `block_extras[i]`: CBOR of the extra keys of block i, empty for none; blocks past its end take
  // `later_extra` (a LoRA adapter marks every block, also those that generation fills).
  // `read_cache`, `write_cache`: whether the request may take hits, and leave some behind.
  TokenChain(int64_t block_size, const Hash& parent, std::vector<std::string> block_extras,
             std::string later_extra, bool read_cache, bool write_cache);

  // Throws std::invalid_argument on a negative id, with nothing appended.
  void append(const int32_t* tokens, int64_t n);

  int64_t block_size() const { return block_size_; }
  bool read_cache() const { return read_cache_; }
  bool write_cache() const { return write_cache_; }
  int64_t num_tokens() const { return static_cast<int64_t>(tokens_.size()); }
  int64_t num_full_blocks() const { return num_tokens() / block_size_; }
  const std::vector<int32_t>& tokens() const { return tokens_; }

  // Hashes of the full blocks; those not hashed yet are hashed now.
  const std::vector<Hash>& hashes();

 private:
  int64_t block_size_;
  Hash parent_;
  std::vector<std::string> block_extras_;
  std::string later_extra_;
  bool read_cache_, write_cache_;
  std::vector<int32_t> tokens_;
  std::vector<Hash> hashes_;
};

}  // namespace kvcache
