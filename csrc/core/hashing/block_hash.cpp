// SPDX-License-Identifier: Apache-2.0
#include "core/hashing/block_hash.h"

#include <algorithm>
#include <stdexcept>

#include "core/hashing/cbor.h"
#include "core/hashing/cbor_ints.h"
#include "core/hashing/long_work.h"
#include "core/hashing/sha256.h"
#include "core/hashing/xxh3.h"

namespace kvcache {

namespace {

struct Named {
  const char* name;
  HashAlgorithm algorithm;
};
constexpr Named kAlgorithms[] = {{"sha256_cbor", HashAlgorithm::kSha256Cbor},
                                 {"xxh3_128_cbor", HashAlgorithm::kXxh3Cbor}};

// `digest` may overwrite this many bytes after the end of the data.
constexpr size_t kDigestOverwritten = kSha256Padding;

Hash digest(HashAlgorithm algorithm, uint8_t* data, size_t size) {
  Hash out{};
  if (algorithm == HashAlgorithm::kSha256Cbor) {
    sha256_in_place(data, size, out.bytes);
  } else {
    xxh3_128(data, size, out.bytes);
  }
  return out;
}

}  // namespace

std::vector<std::string> hash_algorithm_names() {
  std::vector<std::string> out;
  for (const Named& each : kAlgorithms) out.emplace_back(each.name);
  return out;
}

HashAlgorithm hash_algorithm_of(std::string_view name) {
  std::string known;
  for (const Named& each : kAlgorithms) {
    if (name == each.name) return each.algorithm;
    known += (known.empty() ? "" : ", ") + std::string(each.name);
  }
  throw std::invalid_argument("hash algorithm '" + std::string(name) +
                              "' is unknown: expected one of " + known);
}

Hash hash_seed(std::string_view seed, HashAlgorithm algorithm) {
  std::vector<uint8_t> buffer(seed.size() + kBytesWritten + kDigestOverwritten);
  uint8_t* p = write_head(buffer.data(), kText, static_cast<uint32_t>(seed.size()));
  p = std::copy(seed.begin(), seed.end(), p);
  return digest(algorithm, buffer.data(), static_cast<size_t>(p - buffer.data()));
}

Hash BlockHasher::hash(HashAlgorithm algorithm, const Hash& parent, const int32_t* tokens,
                       int64_t num_tokens, std::string_view extra) {
  // The remaining bytes of the encoded block, and the bytes that may be overwritten after its end.
  constexpr size_t kOther = 16 + kDigestOverwritten;
  static_assert(kDigestOverwritten >= kIntsOverwritten);
  const size_t capacity =
      static_cast<size_t>(num_tokens) * kMaxHeadBytes + sizeof(Hash) + extra.size() + kOther;
  if (buffer_.size() < capacity) buffer_.resize(capacity);
  const auto parent_size = static_cast<size_t>(digest_bytes(algorithm));
  uint8_t* p = buffer_.data();
  p = write_head(p, kArray, 3);
  p = write_head(p, kBytes, static_cast<uint32_t>(parent_size));
  std::memcpy(p, parent.bytes, parent_size);
  p = write_head(p + parent_size, kArray, static_cast<uint32_t>(num_tokens));
  p = write_ints(p, tokens, num_tokens);
  if (extra.empty()) {
    *p++ = kCborNull;
  } else {
    p = std::copy(extra.begin(), extra.end(), p);
  }
  return digest(algorithm, buffer_.data(), static_cast<size_t>(p - buffer_.data()));
}

std::vector<Hash> hash_blocks(HashAlgorithm algorithm, const int32_t* tokens, size_t num_tokens,
                              int64_t block_size, const Hash& parent,
                              const std::vector<std::string>& extras) {
  BlockHasher hasher;
  std::vector<Hash> out(num_tokens / static_cast<size_t>(block_size));
  Pieces pieces;
  for (size_t i = 0; i < out.size(); ++i) {
    out[i] = hasher.hash(algorithm, i == 0 ? parent : out[i - 1],
                         tokens + i * static_cast<size_t>(block_size), block_size,
                         extras.empty() ? std::string_view() : extras[i]);
    pieces.pass(block_size);
  }
  return out;
}

}  // namespace kvcache
