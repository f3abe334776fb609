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

void digest(HashAlgorithm algorithm, uint8_t* data, size_t size, Hash* out) {
  if (algorithm == HashAlgorithm::kSha256Cbor) {
    sha256_in_place(data, size, out->bytes);
  } else {
    *out = {};  // clears the bytes after the digest
    xxh3_128(data, size, out->bytes);
  }
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
  Hash out;
  digest(algorithm, buffer.data(), static_cast<size_t>(p - buffer.data()), &out);
  return out;
}

void BlockHasher::hash(const BlockContent& block, Hash* out) {
  const size_t size = encode(block, &buffers_[0]);
  digest(block.algorithm, buffers_[0].data(), size, out);
}

void BlockHasher::hash_two(const BlockContent& first, const BlockContent& second, Hash* out) {
  static const Sha256Implementation& sha256 = sha256_implementations().front();
  const auto is_sha256 = [](const BlockContent& block) {
    return block.algorithm == HashAlgorithm::kSha256Cbor;
  };
  if (sha256.digest_two == nullptr || !is_sha256(first) || !is_sha256(second)) {
    hash(first, &out[0]);
    hash(second, &out[1]);
    return;
  }
  const size_t sizes[] = {encode(first, &buffers_[0]), encode(second, &buffers_[1])};
  uint8_t* const data[] = {buffers_[0].data(), buffers_[1].data()};
  uint8_t* const bytes[] = {out[0].bytes, out[1].bytes};
  const size_t num_chunks[] = {sha256_pad(data[0], sizes[0]), sha256_pad(data[1], sizes[1])};
  if (num_chunks[0] == num_chunks[1]) {
    sha256.digest_two(data, num_chunks[0], bytes);
  } else {
    for (size_t i = 0; i < 2; ++i) sha256.digest(data[i], num_chunks[i], bytes[i]);
  }
}

size_t BlockHasher::encode(const BlockContent& block, Buffer* buffer) {
  // Bytes of the encoded block that are not counted separately below, plus the bytes after its end
  // that may be overwritten.
  constexpr size_t kOther = 16 + kDigestOverwritten;
  static_assert(kDigestOverwritten >= kIntsOverwritten);
  const std::string_view extra = block.extra;
  const size_t capacity =
      static_cast<size_t>(block.num_tokens) * kMaxHeadBytes + sizeof(Hash) + extra.size() + kOther;
  if (buffer->size() < capacity) buffer->resize(capacity);
  const auto parent_size = static_cast<size_t>(digest_bytes(block.algorithm));
  uint8_t* p = buffer->data();
  p = write_head(p, kArray, 3);
  p = write_head(p, kBytes, static_cast<uint32_t>(parent_size));
  std::memcpy(p, block.parent.bytes, parent_size);
  p = write_head(p + parent_size, kArray, static_cast<uint32_t>(block.num_tokens));
  p = write_ints(p, block.tokens, block.num_tokens);
  if (extra.empty()) {
    *p++ = kCborNull;
  } else {
    p = std::copy(extra.begin(), extra.end(), p);
  }
  return static_cast<size_t>(p - buffer->data());
}

std::vector<Hash> hash_blocks(HashAlgorithm algorithm, const int32_t* tokens, size_t num_tokens,
                              int64_t block_size, const Hash& parent,
                              const std::vector<std::string>& extras) {
  BlockHasher hasher;
  std::vector<Hash> out(num_tokens / static_cast<size_t>(block_size));
  Pieces pieces;
  for (size_t i = 0; i < out.size(); ++i) {
    hasher.hash(
        {algorithm, i == 0 ? parent : out[i - 1], tokens + i * static_cast<size_t>(block_size),
         block_size, extras.empty() ? std::string_view() : extras[i]},
        &out[i]);
    pieces.pass(block_size);
  }
  return out;
}

}  // namespace kvcache
