// SPDX-License-Identifier: Apache-2.0
#include "core/listeners/lost_blocks.h"

#include <random>

#include "tests/check.h"

using namespace kvcache;
namespace {

Hash hash_of(uint64_t number) {
  Hash hash{};
  std::mt19937_64 words(number);
  for (int i = 0; i < 32; i += 8) {
    const uint64_t word = words();
    std::memcpy(hash.bytes + i, &word, sizeof(word));
  }
  return hash;
}

TEST(a_record_states_when_why_and_for_whom_a_block_left_the_cache) {
  PoolView view;
  LostBlocks lost(100, 1, 0, &view);
  CHECK(!lost.find(hash_of(1)));
  view.clock.now_ms = 700;
  view.taker = Taker::kRunning;
  lost.note(hash_of(1), 0, /*is_evicted=*/true, /*was_on_host=*/false);
  CHECK(lost.find(hash_of(1))->is_evicted);
  CHECK(lost.find(hash_of(1))->taker == Taker::kRunning);
  view.clock.now_ms = 1'250;
  CHECK_EQ(lost.find(hash_of(1))->ms_ago, 500);  // rounded
  lost.note(hash_of(3), 0, /*is_evicted=*/true, /*was_on_host=*/false);
  lost.note(hash_of(1), 0, /*is_evicted=*/false, /*was_on_host=*/false);  // replaces the record
  CHECK(!lost.find(hash_of(1))->is_evicted);
  CHECK_EQ(lost.find(hash_of(1))->ms_ago, 0);
  CHECK(lost.find(hash_of(3))->is_evicted);
  lost.note(hash_of(2), 1, /*is_evicted=*/true,
            /*was_on_host=*/false);  // a block of another group is not recorded
  CHECK(!lost.find(hash_of(2)));
}

TEST(blocks_are_sampled_by_hash) {
  const PoolView view;
  LostBlocks lost(100'000, 8, 0, &view);
  int num_sampled = 0;
  for (uint64_t i = 0; i < 8'000; ++i) {
    lost.note(hash_of(i), 0, /*is_evicted=*/true, /*was_on_host=*/false);
    num_sampled += lost.is_sampled(hash_of(i));
    CHECK_EQ(lost.find(hash_of(i)).has_value(), lost.is_sampled(hash_of(i)));
  }
  CHECK(num_sampled > 850 && num_sampled < 1'150);
}

TEST(the_oldest_records_are_replaced_and_the_memory_does_not_grow) {
  const PoolView view;
  LostBlocks lost(80'000, 1, 0, &view);  // remembers four times as many blocks as the pool has
  const size_t num_bytes = lost.num_bytes();
  const uint64_t n = 1'500'000;
  for (uint64_t i = 0; i < n; ++i)
    lost.note(hash_of(i), 0, /*is_evicted=*/true, /*was_on_host=*/false);
  int num_recent = 0, num_old = 0;
  for (uint64_t i = n - 160'000; i < n; ++i) num_recent += lost.find(hash_of(i)).has_value();
  for (uint64_t i = 0; i < 60'000; ++i) num_old += lost.find(hash_of(i)).has_value();
  CHECK(num_recent > 155'000);
  CHECK(num_old < 600);
  CHECK_EQ(lost.num_bytes(), num_bytes);
}

}  // namespace

TEST_MAIN()
