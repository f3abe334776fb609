// SPDX-License-Identifier: Apache-2.0
#include "core/hashing/token_chain.h"

#include <algorithm>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>

#include "core/hashing/hashed_tokens.h"
#include "core/hashing/long_work.h"
#include "core/hashing/xxh3.h"
#include "tests/check.h"
#include "tests/core_fixtures.h"

using namespace kvcache;
using namespace kvcache::test;

namespace {

// The hashes that an engine has computed so far. `num_read` counts how many hashes were read.
struct Given : GivenHashes {
  std::vector<Hash> hashes;
  mutable int64_t num_read = 0;
  void read(int64_t first, int64_t stop, Hash* out) const override {
    if (stop > static_cast<int64_t>(hashes.size())) throw std::invalid_argument("too few");
    std::copy(hashes.begin() + first, hashes.begin() + stop, out);
    num_read += stop - first;
  }
};

struct Fixture {
  std::shared_ptr<TokenIds> tokens = std::make_shared<TokenIds>();
  std::shared_ptr<Given> given = std::make_shared<Given>();
  TokenChain chain;

  explicit Fixture(int64_t num_tokens, HashAlgorithm algorithm = HashAlgorithm::kSha256Cbor)
      : chain(tokens, 4, hash_of(0), ExtraKeys(), true, true, 0, HashScheme{algorithm, nullptr}) {
    append(num_tokens);
  }
  Fixture(int64_t num_tokens, const std::vector<Hash>& hashes)
      : chain(tokens, 4, hash_of(0), ExtraKeys(), true, true, 0,
              HashScheme{HashAlgorithm::kSha256Cbor, given}) {
    given->hashes = hashes;
    append(num_tokens);
  }
  void append(int64_t n) {
    std::vector<int32_t> ids(static_cast<size_t>(n));
    std::iota(ids.begin(), ids.end(), static_cast<int32_t>(tokens->size()));
    tokens->append(ids.data(), n);
  }
};

std::string hex(const uint8_t* bytes, size_t n) {
  std::string out;
  for (size_t i = 0; i < n; ++i) {
    out += "0123456789abcdef"[bytes[i] >> 4];
    out += "0123456789abcdef"[bytes[i] & 15];
  }
  return out;
}

TEST(xxh3_gives_the_known_digests) {
  const auto digest = [](size_t n) {
    std::vector<uint8_t> data(n);
    for (size_t i = 0; i < n; ++i) data[i] = static_cast<uint8_t>((i * i + 7 * i) % 251);
    uint8_t out[16];
    xxh3_128(data.data(), n, out);
    return hex(out, sizeof(out));
  };
  CHECK_EQ(digest(0), "99aa06d3014798d86001c324468d497f");
  CHECK_EQ(digest(3), "381b806921e6d9abf4f33fa3678ce51e");
  CHECK_EQ(digest(8), "6fff8d190f215342dde7ac32c0b383a6");
  CHECK_EQ(digest(16), "fd95fda588959aa50ea39815dfd49e7b");
  CHECK_EQ(digest(128), "9f9353a4370686f52a5f33369e43a345");
  CHECK_EQ(digest(240), "32d4b7037ab8e67e0495bcc2cb65aa1b");
  CHECK_EQ(digest(241), "241dc6b58aba121b905dd607eda3dae7");
  CHECK_EQ(digest(1025), "3ea290fd99ff2468d065a708d7cab970");
  CHECK_EQ(digest(5000), "50f9578bb2cdb83e6cce044fb9d3e753");
}

TEST(generated_blocks_do_not_copy_all_hashes_each_time) {
  Fixture f(4 * 1'000);
  f.chain.hashes();
  int64_t num_moves = 0;
  for (int i = 0; i < 1'000; ++i) {
    const Hash* before = f.chain.known_hashes().data();
    f.append(4);
    num_moves += f.chain.hashes().data() != before;
  }
  CHECK_EQ(f.chain.known_hashes().size(), 2'000);
  CHECK(num_moves <= 1);
}

// Chains of different lengths and algorithms, whose blocks have different numbers of bytes.
std::vector<std::unique_ptr<Fixture>> some_chains() {
  std::vector<std::unique_ptr<Fixture>> out;
  for (const int64_t num_tokens : {0, 3, 4, 9, 400, 41, 4, 2'000, 403}) {
    const bool is_short = num_tokens == 41;
    out.push_back(std::make_unique<Fixture>(
        num_tokens, is_short ? HashAlgorithm::kXxh3Cbor : HashAlgorithm::kSha256Cbor));
  }
  return out;
}

std::vector<TokenChain*> pointers(const std::vector<std::unique_ptr<Fixture>>& fixtures) {
  std::vector<TokenChain*> out;
  for (const auto& each : fixtures) out.push_back(&each->chain);
  return out;
}

bool are_equal(const TokenChain& one, const TokenChain& other) {
  const HashList &a = one.known_hashes(), &b = other.known_hashes();
  return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin());
}

TEST(chains_hashed_together_have_the_same_hashes_as_alone) {
  const auto alone = some_chains(), together = some_chains();
  for (const auto& each : alone) each->chain.hashes();
  std::vector<TokenChain*> chains = pointers(together);
  // The same chain is listed several times.
  chains.insert(chains.begin() + 5, {chains[4], chains[4]});
  TokenChain::hash_all(chains.data(), chains.size());
  TokenChain::hash_all(nullptr, 0);
  for (size_t i = 0; i < alone.size(); ++i) {
    CHECK(!together[i]->chain.has_unhashed_blocks());
    CHECK(are_equal(alone[i]->chain, together[i]->chain));
  }
}

TEST(interrupted_chains_keep_their_hashes_and_continue) {
  static int num_pieces;
  tokens_per_piece = 4;
  between_pieces = [](bool) {
    if (++num_pieces % 7 == 0) throw std::runtime_error("interrupted");
  };
  const auto alone = some_chains(), together = some_chains();
  std::vector<TokenChain*> chains = pointers(together);
  int num_interrupted = 0;
  for (bool is_done = false; !is_done;) {
    try {
      TokenChain::hash_all(chains.data(), chains.size());
      is_done = true;
    } catch (const std::runtime_error& error) {
      CHECK_EQ(std::string(error.what()), "interrupted");
      ++num_interrupted;
    }
  }
  between_pieces = nullptr;
  tokens_per_piece = int64_t{1} << 16;
  CHECK(num_interrupted > 50);
  for (size_t i = 0; i < alone.size(); ++i) {
    alone[i]->chain.hashes();
    CHECK(are_equal(alone[i]->chain, together[i]->chain));
  }
}

TEST(a_chain_that_is_being_hashed_is_rejected) {
  static TokenChain* chain;
  Fixture f(4'000), other(4'000);
  chain = &f.chain;
  tokens_per_piece = 4;
  between_pieces = [](bool) {
    between_pieces = nullptr;
    chain->hashes();
  };
  TokenChain* const chains[] = {&other.chain, &f.chain};
  CHECK_THROWS(TokenChain::hash_all(chains, 2), "are being hashed by a call that has not returned");
  tokens_per_piece = int64_t{1} << 16;
  f.append(4);  // allowed again
  TokenChain::hash_all(chains, 2);
  CHECK_EQ(f.chain.known_hashes().size(), 1'001);
}

TEST(short_digests_are_followed_by_zeros) {
  Fixture f(9, HashAlgorithm::kXxh3Cbor);
  for (const Hash& hash : f.chain.hashes()) {
    for (size_t i = 16; i < 32; ++i) CHECK_EQ(int{hash.bytes[i]}, 0);
  }
  CHECK_EQ(f.chain.known_hashes().size(), 2);
  CHECK_EQ(digest_bytes(HashAlgorithm::kXxh3Cbor), 16);
  CHECK_EQ(digest_bytes(hash_algorithm_of("sha256_cbor")), 32);
  CHECK_THROWS(hash_algorithm_of("md5"), "expected one of sha256_cbor, xxh3_128_cbor");
}

TEST(given_hashes_are_read_once_each) {
  Fixture f(10, hashes_from(50, 2));
  CHECK(f.chain.is_given());
  CHECK(f.chain.known_hashes() == hashes_from(50, 2));
  CHECK(f.chain.hashes() == hashes_from(50, 2));
  f.given->hashes = hashes_from(50, 5);  // one more hash than full blocks
  f.append(7);                           // 17 tokens, 4 blocks
  CHECK(f.chain.known_hashes() == hashes_from(50, 4));
  CHECK_EQ(f.given->num_read, 4);
  f.chain.take_back(5);
  CHECK(f.chain.known_hashes() == hashes_from(50, 3));
}

TEST(tokens_without_given_hashes_are_rejected) {
  Fixture f(10, hashes_from(50, 3));
  // The chain of the same tokens in a second manager has fewer hashes.
  const auto fewer = std::make_shared<Given>();
  fewer->hashes = hashes_from(70, 2);
  TokenChain second(f.tokens, 4, hash_of(0), ExtraKeys(), true, true, 0,
                    HashScheme{HashAlgorithm::kSha256Cbor, fewer});
  f.append(1);
  CHECK_THROWS(f.append(1), "too few");
  CHECK_EQ(f.tokens->size(), 11);
  CHECK(f.chain.known_hashes() == hashes_from(50, 2));
  CHECK(second.known_hashes() == hashes_from(70, 2));
  fewer->hashes = hashes_from(70, 3);
  f.append(1);
  CHECK(second.known_hashes() == hashes_from(70, 3));
}

TEST(creating_a_chain_without_its_given_hashes_fails) {
  Fixture f(9);
  const auto given = std::make_shared<Given>();
  const auto make = [&] {
    TokenChain chain(f.tokens, 4, hash_of(0), ExtraKeys(), true, true, 0,
                     HashScheme{HashAlgorithm::kSha256Cbor, given});
    CHECK_EQ(chain.known_hashes().size(), 2);
  };
  CHECK_THROWS(make(), "too few");
  f.append(3);  // reads no hashes for the failed chain
  f.chain.take_back(3);
  given->hashes = hashes_from(50, 2);
  make();
  f.append(3);  // the chain no longer exists
}

TEST(chains_with_different_given_hashes_do_not_match) {
  Fixture a(10, hashes_from(50, 2)), b(10, {hash_of(50), hash_of(99)});
  CHECK(b.chain.begins_like(a.chain, 7));
  CHECK(!b.chain.begins_like(a.chain, 8));
}

TEST(every_byte_of_the_input_changes_the_hash) {
  for (size_t i = 0; i < sizeof(Hash); ++i) {
    Hash a{}, b{};
    b.bytes[i] = 1;
    CHECK(HashOf()(a) != HashOf()(b) && tag_of(a) != tag_of(b));
  }
}

TEST(negative_ids_require_a_chain_with_placeholders) {
  const int32_t ids[] = {3, -1};
  TokenIds plain, placeholders(/*takes_placeholders=*/true);
  CHECK_THROWS(plain.append(ids, 2), "token_ids[1] is -1: expected 0 to 2147483647");
  CHECK_EQ(plain.size(), 0);
  placeholders.append(ids, 2);
  CHECK_EQ(placeholders.size(), 2);
}

TEST(a_chain_uses_the_hashes_of_hashed_tokens) {
  const auto hashed =
      std::make_shared<HashedTokens>(HashAlgorithm::kSha256Cbor, int64_t{4}, hash_of(0));
  const auto extend = [&](int32_t first, int64_t n) {
    std::vector<int32_t> ids(static_cast<size_t>(n));
    std::iota(ids.begin(), ids.end(), first);
    hashed->append(ids, hashed->hash_behind(ids, {}));
    return ids;
  };
  const auto tokens = std::make_shared<TokenIds>();
  const TokenChain chain(tokens, 4, hash_of(0), ExtraKeys(), true, true, 0,
                         HashScheme{HashAlgorithm::kSha256Cbor, hashed});
  Fixture plain(13);
  extend(0, 6);
  CHECK_EQ(hashed->num_filled_by(7), 2);
  extend(6, 7);
  const std::vector<int32_t> taken = hashed->take_tokens();
  CHECK_EQ(taken.size(), 13);
  CHECK(hashed->take_tokens().empty());
  tokens->append(taken.data(), 8);
  CHECK_EQ(chain.known_hashes().size(), 2);
  hashed->truncate(2);
  CHECK_EQ(hashed->num_tokens(), 8);
  const std::vector<int32_t> others = extend(100, 5);
  CHECK_THROWS(tokens->append(nullptr, 8), "hashes of 3 blocks are known: expected 4");
  tokens->append(others.data(), 5);
  CHECK_EQ(chain.known_hashes().size(), 3);
  CHECK(chain.known_hashes()[1] == plain.chain.hashes()[1]);
  CHECK(!(chain.known_hashes()[2] == plain.chain.hashes()[2]));
}

}  // namespace

TEST_MAIN()
