// SPDX-License-Identifier: Apache-2.0
// Tests which blocks the index finds and how far it searches, with known keys.
#include "core/pool/hash_index.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <random>
#include <vector>

#include "core/pool/tags_ahead.h"
#include "tests/check.h"

using namespace kvcache;

namespace {

Hash hash_of(const uint32_t (&words)[8]) {
  Hash hash;
  std::memcpy(hash.bytes, words, sizeof(words));
  return hash;
}

// With the key of zeros, all of these hashes fold to the same value, because each product has a
// factor of 0.
Hash colliding(uint32_t number) { return hash_of({number, 0, 0, number * 77, 1, 0, 0, 0}); }

struct Indexed {
  explicit Indexed(int num_blocks, const SecretKey& key = {})
      : blocks(num_blocks), index(blocks.data(), num_blocks, key) {}
  bool insert(BlockId id, const Hash& hash, uint8_t group = 0) {
    blocks[id].hash = hash;
    blocks[id].group = group;
    return index.insert(id);
  }
  std::vector<Block> blocks;
  HashIndex index;
};

TEST(a_new_key_resolves_collisions_under_a_known_key) {
  constexpr int kNum = 20'000;
  CHECK_EQ(SecretKey().fold(colliding(1)), SecretKey().fold(colliding(2)));
  Indexed all(kNum + 1);
  for (BlockId id = 1; id <= kNum; ++id) {
    CHECK(all.insert(id, colliding(id)));
    CHECK(all.index.longest_walk() <= HashIndex::kLongestWalk);
  }
  for (BlockId id = 1; id <= kNum; ++id) CHECK_EQ(all.index.find(colliding(id), 0), id);
  CHECK_EQ(all.index.find(colliding(kNum + 1), 0), kNullBlock);
  CHECK_EQ(all.index.find(colliding(1), 1), kNullBlock);
  for (BlockId id = 1; id <= kNum; ++id) CHECK(all.index.erase(id));
  CHECK_EQ(all.index.find(colliding(1), 0), kNullBlock);
}

TEST(duplicates_stay_together_when_the_key_changes) {
  constexpr int kNum = 1'000;
  Indexed all(2 * kNum + 1);
  for (BlockId id = 1; id <= kNum; ++id) {
    all.insert(id, colliding(id));
    CHECK(!all.insert(kNum + id, colliding(id)));
  }
  for (BlockId id = 1; id <= kNum; ++id) {
    CHECK_EQ(all.index.find(colliding(id), 0), id);
    CHECK(!all.index.erase(id));
    CHECK_EQ(all.index.find(colliding(id), 0), kNum + id);
    CHECK(all.index.erase(kNum + id));
    CHECK_EQ(all.index.find(colliding(id), 0), kNullBlock);
  }
}

TEST(precomputed_tags_follow_a_key_change) {
  constexpr int kNum = 1'000;
  Indexed all(kNum + 1);
  for (BlockId id = 1; id <= kNum; ++id) all.blocks[id].hash = colliding(id);
  const auto ahead = [&] {
    return tags_ahead<8>(all.index, kNum, [&](int64_t i) -> HashOfGroup {
      return {all.blocks[static_cast<size_t>(i + 1)].hash, 0};
    });
  };
  auto inserting = ahead();
  for (BlockId id = 1; id <= kNum; ++id) CHECK(all.index.insert(inserting.next(id - 1), id));
  CHECK(all.index.num_keys() > 1);
  auto finding = ahead();
  for (BlockId id = 1; id <= kNum; ++id) {
    if (id < kNum) all.index.prefetch_block(finding[id]);
    CHECK_EQ(all.index.find(finding.next(id - 1), colliding(id), 0), id);
  }
  auto erasing = ahead();
  for (BlockId id = 1; id <= kNum; ++id) CHECK(all.index.erase(erasing.next(id - 1), id));
}

TEST(random_hashes_need_short_searches) {
  std::mt19937 random(7);
  for (const int num_blocks : {2, 12, 1'000, 100'000}) {
    Indexed all(num_blocks, SecretKey::drawn());
    for (BlockId id = 1; id < num_blocks; ++id) {
      uint32_t words[8];
      for (uint32_t& word : words) word = random();
      all.insert(id, hash_of(words));
    }
    // For 1,000 secret keys and 100,000 blocks, the longest search visits 6 buckets in the median
    // and at most 12. Each additional bucket is a third as likely.
    CHECK(all.index.longest_walk() <= HashIndex::kLongestWalk);
    CHECK_EQ(all.index.num_keys(), 1);
    all.index.clear();
    CHECK_EQ(all.index.longest_walk(), 1);
  }
}

TEST(every_byte_and_the_group_change_a_fold) {
  const SecretKey key = SecretKey::drawn();
  for (int byte = 0; byte < 32; ++byte) {
    Hash hash{};
    const uint64_t before = key.fold(hash);
    hash.bytes[byte] = 1;
    CHECK(key.fold(hash) != before);
  }
  CHECK(key.fold({}, 0) != key.fold({}, 1));
  CHECK(key.fold({}) != SecretKey::drawn().fold({}));
}

// With few buckets and many insertions and removals, every bucket may have displaced entries. In
// that case, only the bound ends the search for a missing hash.
TEST(any_order_of_insertions_and_removals_agrees_with_a_map) {
  for (uint32_t seed = 1; seed <= 200; ++seed) {
    std::mt19937 random(seed);
    const int num_blocks = 2 + static_cast<int>(random() % 30);
    Indexed all(num_blocks, seed % 2 == 0 ? SecretKey() : SecretKey::drawn());
    std::map<uint32_t, std::vector<BlockId>> model;  // blocks by number of the hash, oldest first
    std::vector<uint32_t> number_of(num_blocks, 0);
    const uint32_t num_hashes = 1 + random() % 40;
    for (int step = 0; step < 300; ++step) {
      const BlockId id = 1 + static_cast<BlockId>(random() % (num_blocks - 1));
      if (number_of[id] == 0) {
        number_of[id] = 1 + random() % num_hashes;
        std::vector<BlockId>& same = model[number_of[id]];
        CHECK_EQ(all.insert(id, colliding(number_of[id])), same.empty());
        same.push_back(id);
      } else {
        std::vector<BlockId>& same = model[number_of[id]];
        same.erase(std::find(same.begin(), same.end(), id));
        CHECK_EQ(all.index.erase(id), same.empty());
        number_of[id] = 0;
      }
      for (uint32_t number = 1; number <= num_hashes + 1; ++number) {
        const std::vector<BlockId>& same = model[number];
        CHECK_EQ(all.index.find(colliding(number), 0), same.empty() ? kNullBlock : same.front());
      }
    }
  }
}

// The hashes collide under a known key, so the entries of an epoch fill many consecutive buckets.
// In the next epoch, searches must not find these entries, and insertions must not count them as
// displaced.
TEST(a_new_epoch_starts_with_an_empty_index) {
  constexpr int kNum = 60;
  Indexed all(kNum + 1);
  std::mt19937 random(5);
  for (int round = 0; round < 50; ++round) {
    const auto n = static_cast<BlockId>(1 + random() % kNum);
    const uint32_t first = random() % 100;
    for (BlockId id = 1; id <= n; ++id) CHECK(all.insert(id, colliding(first + id)));
    for (BlockId id = 1; id <= n; ++id) CHECK_EQ(all.index.find(colliding(first + id), 0), id);
    for (BlockId id = 1; id <= n; id += 2) CHECK(all.index.erase(id));
    for (BlockId id = 2; id <= n; id += 2) CHECK_EQ(all.index.find(colliding(first + id), 0), id);
    all.index.clear();
    for (uint32_t i = 0; i < 200; ++i) CHECK_EQ(all.index.find(colliding(i), 0), kNullBlock);
  }
}

TEST(rekeying_restores_nothing_from_earlier_epochs) {
  constexpr BlockId kNum = 200;
  Indexed all(2 * kNum + 1);
  std::mt19937 random(3);
  std::vector<Hash> old;
  for (BlockId id = kNum + 1; id <= 2 * kNum; ++id) {
    uint32_t words[8];
    for (uint32_t& word : words) word = random();
    old.push_back(hash_of(words));
    all.insert(id, old.back());
  }
  all.index.clear();
  const int64_t num_keys = all.index.num_keys();
  for (BlockId id = 1; id <= kNum; ++id) CHECK(all.insert(id, colliding(id)));
  CHECK(all.index.num_keys() > num_keys);
  for (BlockId id = 1; id <= kNum; ++id) CHECK_EQ(all.index.find(colliding(id), 0), id);
  for (const Hash& hash : old) CHECK_EQ(all.index.find(hash, 0), kNullBlock);
}

}  // namespace

TEST_MAIN()
