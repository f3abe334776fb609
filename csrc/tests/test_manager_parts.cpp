// SPDX-License-Identifier: Apache-2.0
// What calls of the manager cannot show of its parts: the order in which loads are undone, bounded
// memory, and the clock. The parts are tested through the manager in `tests/allocator`.
#include <cstring>

#include "core/listeners/lost_blocks.h"
#include "core/manager/clock.h"
#include "core/manager/host_tier.h"
#include "core/manager/session_pins.h"
#include "tests/check.h"
#include "tests/core_fixtures.h"

using namespace kvcache;
using namespace kvcache::test;
using Ids = std::vector<BlockId>;

namespace {

TEST(onboards_of_aborted_steps_are_taken_oldest_first) {
  BlockPool device{9};
  const std::vector<CacheGroup> groups = full_groups(4);
  PlanBuilder plan{1, 9};
  HostTier host(std::make_unique<BlockPool>(5), {&device, &groups, &plan}, HostWrites{});
  plan.begin(0);
  const Ids blocks = take(&device, 2), pages = take(&host.pages(), 2);
  host.onboard({/*step_id=*/3, pages[0], blocks[0], /*column=*/0, /*group=*/0, nullptr});
  host.onboard({/*step_id=*/4, pages[1], blocks[1], /*column=*/1, /*group=*/0, nullptr});
  const auto over = host.take_aborted(/*last_issued=*/2);
  CHECK_EQ(over.size(), 2);
  CHECK(over[0].block == blocks[0] && over[1].block == blocks[1]);
  host.finish(over);
  PerBlock<int32_t> references(9), held(5);
  host.check_invariants(&references, &held);
  for (BlockId page = 1; page < 5; ++page) CHECK_EQ(host.pages().ref_count(page), held[page]);
}

TEST(sessions_without_pins_are_removed) {
  BlockPool pool{9};
  const std::vector<CacheGroup> groups = full_groups(4);
  SessionPins pins{&pool};
  const std::vector<Hash> hashes = hashes_from(1, 1);
  publish_chain(&pool, take(&pool, 1), hashes);
  for (const int64_t n : {0, 1}) {  // number of pins of another session
    pins.pin("keeps one", hashes.data(), n, groups);
    for (int i = 0; i < 1000; ++i) pins.pin("session " + std::to_string(i), nullptr, 0, groups);
    CHECK(pins.num_sessions() <= 64);
    CHECK_EQ(pool.num_pinned(), n);
  }
  CHECK_EQ(pins.unpin("keeps one"), 0);
  CHECK_EQ(pool.num_pinned(), 0);
  pins.check_invariants();
}

Hash random_hash(uint64_t number) {
  Hash hash{};
  for (int i = 0; i < 32; i += 8) {
    number = (number + 0x9E3779B97F4A7C15) * 0xBF58476D1CE4E5B9;
    number ^= number >> 29;
    std::memcpy(hash.bytes + i, &number, sizeof(number));
  }
  return hash;
}

TEST(lost_blocks_are_sampled_by_hash) {
  const PoolView view;
  LostBlocks lost(100'000, 8, 0, &view);
  int num_sampled = 0;
  for (uint64_t i = 0; i < 8'000; ++i) {
    const Hash hash = random_hash(i);
    lost.note(hash, 0, /*is_evicted=*/true, /*was_on_host=*/false);
    num_sampled += lost.is_sampled(hash);
    CHECK_EQ(lost.find(hash).has_value(), lost.is_sampled(hash));
  }
  CHECK(num_sampled > 850 && num_sampled < 1'150);
}

TEST(the_oldest_lost_blocks_are_replaced_and_the_memory_does_not_grow) {
  const PoolView view;
  LostBlocks lost(80'000, 1, 0, &view);  // remembers four times as many blocks as the pool has
  const size_t num_bytes = lost.num_bytes();
  const uint64_t n = 1'500'000;
  for (uint64_t i = 0; i < n; ++i) lost.note(random_hash(i), 0, true, false);
  int num_recent = 0, num_old = 0;
  for (uint64_t i = n - 160'000; i < n; ++i) num_recent += lost.find(random_hash(i)).has_value();
  for (uint64_t i = 0; i < 60'000; ++i) num_old += lost.find(random_hash(i)).has_value();
  CHECK(num_recent > 155'000 && num_old < 600);
  CHECK_EQ(lost.num_bytes(), num_bytes);
}

TEST(the_system_clock_is_read_until_a_time_is_set_which_never_goes_back) {
  Clock clock;
  CHECK_EQ(clock.now_ms(), 0);
  CHECK(clock.read() && clock.now_ms() >= 0);
  clock.set(1'000'000);
  CHECK(!clock.read());
  CHECK_THROWS(clock.set(6), "the clock is set to 6 ms: expected 1000000 or more");
  CHECK_EQ(clock.now_ms(), 1'000'000);
}

}  // namespace

TEST_MAIN()
