// SPDX-License-Identifier: Apache-2.0
// Compares the leaves among cached blocks with a count of children for each hash.
#include "core/pool/candidates.h"

#include <cstring>
#include <random>
#include <utility>
#include <vector>

#include "core/pool/hash_index.h"
#include "core/secret_key.h"
#include "tests/check.h"

using namespace kvcache;

namespace {

Hash hash_of(uint32_t number) {
  Hash hash{};
  std::memcpy(hash.bytes, &number, sizeof(number));
  hash.bytes[31] = 1;
  return hash;
}

struct NoOrder : EvictionOrder {
  void insert(BlockId) override {}
  void remove(BlockId) override {}
  BlockId victim() override { return kNullBlock; }
};

// Blocks whose hashes are numbers. The parent of number k is k / 2. Number 1 has no parent.
struct Cached {
  explicit Cached(int num_blocks)
      : blocks(num_blocks), numbers(num_blocks), index(blocks.data(), num_blocks) {}

  void add(BlockId id, uint32_t number) {
    blocks[id].hash = hash_of(number);
    index.insert(key_of(blocks[id]), id);
    numbers[id] = number;
    const Candidates::Parent parent{parent_of(id), index.find(parent_of(id))};
    tree.add(id, key_of(blocks[id]), number == 1 ? nullptr : &parent, &changed);
    check_changes();
  }
  void remove(BlockId id) {
    tree.remove(id, parent_of(id), &changed);
    index.erase(key_of(blocks[id]), id);
    numbers[id] = 0;
    check_changes();
  }
  uint64_t parent_of(BlockId id) const { return key_of(hash_of(numbers[id] / 2), 0); }
  bool is_needed(BlockId id) const {
    int num_twins = 0, num_children = 0;
    for (size_t other = 1; other < blocks.size(); ++other) {
      num_twins += numbers[other] == numbers[id];
      num_children += numbers[other] > 1 && numbers[other] / 2 == numbers[id];
    }
    return num_twins == 1 && num_children > 0;
  }
  // Checks that every block that became a leaf, or is no longer a leaf, was reported as changed.
  void check_changes() {
    std::vector<bool> now(blocks.size());
    for (size_t id = 1; id < blocks.size(); ++id) {
      if (numbers[id] == 0) continue;
      const auto block = static_cast<BlockId>(id);
      now[id] = tree.is_leaf(block);
      CHECK_EQ(now[id], !is_needed(block));
    }
    for (BlockId id : changed) known[id] = now[id];
    for (size_t id = 1; id < blocks.size(); ++id) {
      if (was_there[id] && numbers[id] != 0) CHECK_EQ(known[id], now[id]);
      was_there[id] = numbers[id] != 0;
    }
    known = now;
    changed.clear();
    std::vector<BlockId> indexed;
    for (size_t id = 1; id < blocks.size(); ++id) {
      if (numbers[id] != 0) indexed.push_back(static_cast<BlockId>(id));
    }
    tree.check_invariants(indexed, [&](BlockId id) { return parent_of(id); });
  }

  std::vector<Block> blocks;
  std::vector<uint32_t> numbers;  // number of each block; 0: not cached
  HashIndex index;
  Candidates tree{std::make_unique<NoOrder>(), &index, blocks.data(),
                  static_cast<int64_t>(blocks.size())};
  std::vector<BlockId> changed;
  std::vector<bool> known = std::vector<bool>(blocks.size());
  std::vector<bool> was_there = std::vector<bool>(blocks.size());
};

// Random operations include duplicates, parents that are removed before their children and added
// again, and parent ids that are reused for other hashes.
TEST(a_block_is_a_leaf_unless_it_is_the_only_path_to_a_child) {
  for (uint32_t seed = 1; seed <= 400; ++seed) {
    std::mt19937 random(seed);
    const int num_blocks = 2 + static_cast<int>(random() % 14);
    const uint32_t num_hashes = 1 + random() % 12;
    Cached cached(num_blocks);
    for (int step = 0; step < 300; ++step) {
      const BlockId id = 1 + static_cast<BlockId>(random() % (num_blocks - 1));
      if (cached.numbers[id] == 0) {
        cached.add(id, 1 + random() % num_hashes);
      } else {
        cached.remove(id);
      }
    }
  }
}

TEST(a_chain_needs_no_map_entry) {
  Cached cached(60);
  const size_t before = cached.tree.num_bytes();
  for (BlockId id = 1; id < 30; ++id) cached.add(id, uint32_t{1} << id >> 1);
  for (BlockId id = 29; id > 0; --id) cached.remove(id);
  CHECK_EQ(cached.tree.num_bytes(), before);
}

}  // namespace

TEST_MAIN()
