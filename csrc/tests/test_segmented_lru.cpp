// SPDX-License-Identifier: Apache-2.0
// The policy of docs/extensions.md.
#include "tests/segmented_lru.h"

#include <algorithm>
#include <memory>
#include <random>
#include <vector>

#include "core/pool/block_pool.h"
#include "tests/check.h"
#include "tests/core_fixtures.h"

using namespace kvcache;
namespace {

using test::hashes_from;

TEST(blocks_that_were_hit_are_evicted_last) {
  BlockPool pool(5, std::make_unique<SegmentedLru>(5));
  BlockId ids[4], taken[4];
  CHECK(pool.allocate(4, ids));
  const std::vector<Hash> hashes = hashes_from(1, 4);
  for (int i = 0; i < 4; ++i) {
    Content content{&hashes[i], &hashes[i]};
    content.begins_chain = true;
    pool.publish(&ids[i], content, 1, 0);
  }
  pool.release(ids, 4);
  pool.notify(Hit{{ids, 1}, Hit::By::kRequest});
  pool.notify(Hit{{&ids[1], 1}, Hit::By::kExpected});  // not a hit of a request
  pool.retain(ids, 2);
  pool.release(ids, 2);
  CHECK(pool.allocate(4, taken));
  CHECK(std::vector<BlockId>(taken, taken + 4) ==
        std::vector<BlockId>({ids[2], ids[3], ids[1], ids[0]}));
  pool.check_invariants();
}

TEST(the_pool_is_whole_after_random_calls) {
  std::mt19937 random(1);
  const std::vector<Hash> hashes = hashes_from(1, 40);
  BlockPool pool(24, std::make_unique<SegmentedLru>(24));
  std::vector<std::vector<BlockId>> held;
  for (int i = 0; i < 4'000; ++i) {
    if (held.size() > 5 || (!held.empty() && random() % 2 == 0)) {
      std::vector<BlockId> ids = held[random() % held.size()];
      held.erase(std::find(held.begin(), held.end(), ids));
      pool.release(std::vector<BlockId>(ids.rbegin(), ids.rend()).data(), int64_t(ids.size()));
    } else {
      // A chain of up to four blocks, of which the first may be cached.
      const size_t first = 4 * (random() % 10), n = 1 + random() % 4;
      std::vector<BlockId> ids(n);
      const auto num_hit = pool.lookup(&hashes[first], int64_t(n), 0, true, ids.data());
      pool.notify(Hit{{ids.data(), num_hit}, Hit::By::kRequest});
      pool.retain(ids.data(), num_hit);
      if (!pool.allocate(int64_t(n) - num_hit, ids.data() + num_hit)) {
        pool.release(ids.data(), num_hit);
        continue;
      }
      Content content{&hashes[first + size_t(num_hit)],
                      &hashes[first + size_t(num_hit) - (num_hit > 0)]};
      content.begins_chain = num_hit == 0;
      pool.publish(ids.data() + num_hit, content, int64_t(n) - num_hit, 0);
      held.push_back(ids);
    }
    pool.check_invariants();
  }
  CHECK(pool.num_evicted() > 100);
}

}  // namespace

TEST_MAIN()
