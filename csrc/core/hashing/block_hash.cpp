// SPDX-License-Identifier: Apache-2.0
#include "core/hashing/block_hash.h"

#include <algorithm>

#include "core/errors.h"
#include "core/hashing/cbor.h"
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

}  // namespace

std::vector<std::string> hash_algorithm_names() {
  std::vector<std::string> out;
  for (const Named& each : kAlgorithms) out.emplace_back(each.name);
  return out;
}

HashAlgorithm hash_algorithm_of(std::string_view name) {
  for (const Named& each : kAlgorithms) {
    if (name == each.name) return each.algorithm;
  }
  std::string known;
  for (const Named& each : kAlgorithms) {
    known += (known.empty() ? "" : ", ") + std::string(each.name);
  }
  throw_invalid("hash algorithm '", name, "' is unknown: expected one of ", known);
}

Hash hash_seed(std::string_view seed, HashAlgorithm algorithm) {
  std::vector<uint8_t> buffer(seed.size() + kBytesWritten);
  uint8_t* p = write_head(buffer.data(), kText, static_cast<uint32_t>(seed.size()));
  p = std::copy(seed.begin(), seed.end(), p);
  const auto size = static_cast<size_t>(p - buffer.data());
  Hash out{};  // clears the bytes after a short digest
  if (algorithm == HashAlgorithm::kSha256Cbor) {
    sha256(buffer.data(), size, out.bytes);
  } else {
    xxh3_128(buffer.data(), size, out.bytes);
  }
  return out;
}

void BlockHasher::Encoded::encode(const BlockContent& block) {
  algorithm = block.algorithm;
  reserve(block);
  const auto parent_size = static_cast<uint32_t>(digest_bytes(algorithm));
  uint8_t* p = write_head(bytes.data(), kArray, 3);
  p = write_head(p, kBytes, parent_size);
  parent_at = static_cast<size_t>(p - bytes.data());
  p += parent_size;  // written by `hash`
  p = write_head(p, kArray, static_cast<uint32_t>(block.num_tokens));
  p = write_ints(p, block.tokens, block.num_tokens);
  if (block.extra.empty()) {
    *p++ = kCborNull;
  } else {
    p = std::copy(block.extra.begin(), block.extra.end(), p);
  }
  size = static_cast<size_t>(p - bytes.data());
  const bool is_sha256 = algorithm == HashAlgorithm::kSha256Cbor;
  num_chunks = is_sha256 ? sha256_pad(bytes.data(), size) : 0;
}

void BlockHasher::Encoded::reserve(const BlockContent& block) {
  constexpr size_t kHeads = 16;  // enough for everything but the parent, the tokens and the keys
  static_assert(kSha256Padding >= kIntsOverwritten);
  const size_t most = kHeads + sizeof(Hash) +
                      static_cast<size_t>(block.num_tokens) * kMaxHeadBytes + block.extra.size() +
                      kSha256Padding;
  if (bytes.size() < most) bytes.resize(most);
}

void BlockHasher::Encoded::hash(const Hash& parent, Hash* out) {
  if (algorithm == HashAlgorithm::kSha256Cbor) {
    static const Sha256Implementation& sha256 = sha256_implementations().front();
    sha256.digest({bytes.data(), out->bytes, parent.bytes}, num_chunks);
    return;
  }
  std::copy_n(parent.bytes, digest_bytes(algorithm), bytes.data() + parent_at);
  *out = {};  // clears the bytes after the digest
  xxh3_128(bytes.data(), size, out->bytes);
}

void BlockHasher::hash_two(const std::array<BlockContent, 2>& blocks,
                           const std::array<const Hash*, 2>& parents, Hash* out) {
  static const Sha256Implementation& sha256 = sha256_implementations().front();
  for (size_t i = 0; i < 2; ++i) encoded_[i].encode(blocks[i]);
  const size_t num_chunks = encoded_[0].num_chunks;
  if (sha256.digest_two == nullptr || num_chunks == 0 || encoded_[1].num_chunks != num_chunks) {
    for (size_t i = 0; i < 2; ++i) encoded_[i].hash(*parents[i], &out[i]);
    return;
  }
  const Sha256Message messages[] = {
      {encoded_[0].bytes.data(), out[0].bytes, parents[0]->bytes},
      {encoded_[1].bytes.data(), out[1].bytes, parents[1]->bytes},
  };
  sha256.digest_two(messages, num_chunks);
}

std::vector<Hash> hash_blocks(HashAlgorithm algorithm, const int32_t* tokens, size_t num_tokens,
                              int64_t block_size, const Hash& parent,
                              const std::vector<std::string>& extras) {
  BlockHasher hasher;
  std::vector<Hash> out(num_tokens / static_cast<size_t>(block_size));
  Pieces pieces;
  for (size_t done = 0; done < out.size();) {
    const size_t n = std::min(out.size() - done, blocks_per_run(block_size));
    const auto content_of = [&](size_t i) -> BlockContent {
      const size_t block = done + i;
      return {algorithm, tokens + block * static_cast<size_t>(block_size), block_size,
              extras.empty() ? std::string_view() : extras[block]};
    };
    hasher.hash_run(done == 0 ? parent : out[done - 1], n, content_of, &out[done]);
    done += n;
    pieces.pass(static_cast<int64_t>(n) * block_size);
  }
  return out;
}

}  // namespace kvcache
