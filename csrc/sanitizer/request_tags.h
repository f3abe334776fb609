// SPDX-License-Identifier: Apache-2.0
// The tags of the tokens of each observed request.
//
// The KV of a token depends on all tokens up to it, so a tag identifies a prefix. The tag of a
// token is the tag before it plus `token_hash` of the token and its position, modulo 2^64. A
// request's seed is the tag before its first token.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "sanitizer/shadow.h"

namespace kvcache::sanitizer {

// Returns a pseudo-random number for a value and its position (splitmix64).
uint64_t token_hash(uint64_t value, uint64_t position);

// A range of new or accessed tokens per request. `rows` are indices of requests, or -1.
struct TokenRanges {
  const int64_t* rows;
  const int64_t* starts;
  const int64_t* counts;
  int64_t size;
};

class RequestTags {
 public:
  // Adds a request without tokens and returns its row. Rows are reused.
  int64_t add(int64_t serial, uint64_t seed);
  void remove(int64_t row);
  // Drops all tokens.
  void restart(int64_t row, uint64_t seed);

  int64_t serial(int64_t row) const { return at(row).serial; }
  uint64_t seed(int64_t row) const { return at(row).tags.front(); }
  int64_t num_tokens(int64_t row) const { return static_cast<int64_t>(at(row).tags.size()) - 1; }
  // Number of tokens before the first unknown one.
  int64_t num_in_sequence(int64_t row) const { return at(row).num_in_sequence; }
  int64_t num_rows() const { return static_cast<int64_t>(requests_.size()); }

  // Sets the tokens of requests, starting at positions `starts`. All tokens after the new ones are
  // dropped. `hashes`: `token_hash` of each new token. If a start is beyond `num_in_sequence`, the
  // tokens in between are unknown and get tags that no slot has.
  void put(const TokenRanges& ranges, const uint64_t* hashes);

  // The tags of a request's tokens.
  const uint64_t* tags(int64_t row) const { return at(row).tags.data() + 1; }

 private:
  struct Request {
    int64_t serial = kNobody;
    int64_t num_in_sequence = 0;
    std::vector<uint64_t> tags;  // the seed, and one tag per token
  };

  Request& at(int64_t row) { return requests_[static_cast<size_t>(row)]; }
  const Request& at(int64_t row) const { return requests_[static_cast<size_t>(row)]; }

  std::vector<Request> requests_;
  std::vector<int64_t> free_;
  uint64_t num_unknown_ = 0;
};

// Hashes new tokens. `values`: their ids, to which `key` is added before hashing.
void token_hashes(const TokenRanges& ranges, const int64_t* values, uint64_t key, uint64_t* out);

}  // namespace kvcache::sanitizer
