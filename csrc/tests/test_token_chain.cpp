// SPDX-License-Identifier: Apache-2.0
#include "core/hashing/token_chain.h"

#include <algorithm>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>

#include "core/hashing/long_work.h"
#include "tests/check.h"
#include "tests/core_fixtures.h"

using namespace kvcache;
using namespace kvcache::test;

namespace {

struct Fixture {
  std::shared_ptr<TokenIds> tokens = std::make_shared<TokenIds>();
  TokenChain chain;

  explicit Fixture(int64_t num_tokens, HashAlgorithm algorithm = HashAlgorithm::kSha256Cbor)
      : chain(tokens, 4, hash_of(0), ExtraKeys(), true, true, 0, HashScheme{algorithm, nullptr}) {
    append(num_tokens);
  }
  void append(int64_t n) {
    std::vector<int32_t> ids(static_cast<size_t>(n));
    std::iota(ids.begin(), ids.end(), static_cast<int32_t>(tokens->size()));
    tokens->append(ids.data(), n);
  }
};

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

TEST(every_byte_of_the_input_changes_the_hash) {
  for (size_t i = 0; i < sizeof(Hash); ++i) {
    Hash a{}, b{};
    b.bytes[i] = 1;
    CHECK(HashOf()(a) != HashOf()(b) && tag_of(a) != tag_of(b));
  }
}

}  // namespace

TEST_MAIN()
