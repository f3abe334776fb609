// SPDX-License-Identifier: Apache-2.0
// Tests which blocks the index finds, also if keys are equal.
#include "core/pool/hash_index.h"

#include <algorithm>
#include <map>
#include <random>
#include <vector>

#include "tests/check.h"
#include "tests/core_fixtures.h"

using namespace kvcache;
using namespace kvcache::test;

namespace {

// The key under which these tests insert all hashes, so that all entries have one home bucket.
constexpr uint64_t kKey = 0x0123456789ABCDEF;

struct Indexed {
  explicit Indexed(int num_blocks) : blocks(num_blocks), index(blocks.data(), num_blocks) {}
  // Returns whether the block is the first under its hash.
  bool insert(BlockId id, uint32_t number) {
    blocks[id].hash = hash_of(number);
    return index.insert(kKey, id) == id;
  }
  bool erase(BlockId id) { return index.erase(kKey, id); }
  BlockId find(uint32_t number, uint8_t group = 0) const {
    return index.find(kKey, hash_of(number), group);
  }
  std::vector<Block> blocks;
  HashIndex index;
};

TEST(a_block_is_found_by_its_key_alone) {
  constexpr int kNum = 1'000;
  Indexed all(kNum + 1);
  for (BlockId id = 1; id <= kNum; ++id) {
    all.blocks[id].hash = hash_of(id / 2);
    all.blocks[id].group = id % 2;
    all.index.insert(key_of(all.blocks[id]), id);
  }
  for (BlockId id = 1; id <= kNum; ++id) {
    CHECK_EQ(all.index.find(key_of(hash_of(id / 2), id % 2)), id);
    CHECK_EQ(all.index.find(hash_of(id / 2), id % 2), id);
  }
  CHECK_EQ(all.index.find(key_of(hash_of(1), 2)), kNullBlock);
}

TEST(keys_are_computed_ahead) {
  constexpr int kNum = 100;
  Indexed all(kNum + 1);
  auto keys = keys_ahead<8>(all.index, kNum, [](int64_t i) { return static_cast<uint64_t>(i); });
  for (int64_t i = 0; i < kNum; ++i) {
    for (int64_t next = i; next < std::min<int64_t>(i + 8, kNum); ++next) {
      CHECK_EQ(keys[next], static_cast<uint64_t>(next));
    }
    CHECK_EQ(keys.next(i), static_cast<uint64_t>(i));
  }
}

TEST(every_byte_and_the_group_change_a_key) {
  for (int byte = 0; byte < 32; ++byte) {
    Hash hash{};
    const uint64_t before = key_of(hash, 0);
    hash.bytes[byte] = 1;
    CHECK(key_of(hash, 0) != before);
  }
  CHECK(key_of({}, 0) != key_of({}, 1));
  CHECK(SecretKey::drawn().fold({}) != SecretKey::drawn().fold({}));
}

// With few buckets and many insertions and removals, every bucket may have displaced entries. In
// that case, only the bound ends the search for a missing hash.
TEST(any_order_of_insertions_and_removals_agrees_with_a_map) {
  for (uint32_t seed = 1; seed <= 200; ++seed) {
    std::mt19937 random(seed);
    const int num_blocks = 2 + static_cast<int>(random() % 30);
    Indexed all(num_blocks);
    std::map<uint32_t, std::vector<BlockId>> model;  // blocks by number of the hash, oldest first
    std::vector<uint32_t> number_of(num_blocks, 0);
    const uint32_t num_hashes = 1 + random() % 40;
    const auto key = [&](uint32_t number) {  // seeds differ in how many keys are equal
      return seed % 2 == 0 ? kKey : key_of(hash_of(number), 0);
    };
    for (int step = 0; step < 300; ++step) {
      const BlockId id = 1 + static_cast<BlockId>(random() % (num_blocks - 1));
      if (number_of[id] == 0) {
        number_of[id] = 1 + random() % num_hashes;
        std::vector<BlockId>& same = model[number_of[id]];
        same.push_back(id);
        all.blocks[id].hash = hash_of(number_of[id]);
        CHECK_EQ(all.index.insert(key(number_of[id]), id), same.front());
      } else {
        std::vector<BlockId>& same = model[number_of[id]];
        same.erase(std::find(same.begin(), same.end(), id));
        CHECK_EQ(all.index.erase(key(number_of[id]), id), same.empty());
        number_of[id] = 0;
      }
      for (uint32_t number = 1; number <= num_hashes + 1; ++number) {
        const std::vector<BlockId>& same = model[number];
        CHECK_EQ(all.index.find(key(number), hash_of(number), 0),
                 same.empty() ? kNullBlock : same.front());
      }
    }
  }
}

// The keys are equal, so the entries of an epoch fill many consecutive buckets. In the next epoch,
// searches must not find these entries, and insertions must not count them as displaced.
TEST(a_new_epoch_starts_with_an_empty_index) {
  constexpr int kNum = 60;
  Indexed all(kNum + 1);
  std::mt19937 random(5);
  for (int round = 0; round < 50; ++round) {
    const auto n = static_cast<BlockId>(1 + random() % kNum);
    const uint32_t first = random() % 100;
    for (BlockId id = 1; id <= n; ++id) CHECK(all.insert(id, first + id));
    for (BlockId id = 1; id <= n; ++id) CHECK_EQ(all.find(first + id), id);
    for (BlockId id = 1; id <= n; id += 2) CHECK(all.erase(id));
    for (BlockId id = 2; id <= n; id += 2) CHECK_EQ(all.find(first + id), id);
    all.index.clear();
    for (uint32_t i = 0; i < 200; ++i) CHECK_EQ(all.find(i), kNullBlock);
  }
}

}  // namespace

TEST_MAIN()
