// SPDX-License-Identifier: Apache-2.0
#include "core/manager/cache_tiers.h"

#include "tests/check.h"
#include "tests/core_fixtures.h"

using namespace kvcache;
using namespace kvcache::test;
using Ids = std::vector<BlockId>;

namespace {

ManagerOptions options_with(int64_t num_host_blocks, const ManagerOptions& more = {}) {
  ManagerOptions options = more;
  options.groups = {{std::make_shared<FullAttention>(), 4}};
  options.num_blocks = 6;
  options.max_model_len = 100;
  options.num_host_blocks = num_host_blocks;
  return options;
}

struct Fixture {
  ManagerSetup setup;
  Steps steps{1, 6};
  CacheTiers tiers{&setup, &steps};
  std::vector<CacheGroup> groups = full_groups(4);
  RowTable rows{&groups, 0};

  explicit Fixture(const ManagerOptions& options = options_with(5)) : setup(options) {}

  // Creates cached blocks that are free.
  Ids cache(int64_t n) {
    const Ids ids = take(&tiers.pool(), n);
    publish_chain(&tiers.pool(), ids, hashes_from(1, ids.size()));
    tiers.pool().release(ids.data(), n);
    return ids;
  }
  void check(const Ids& held = {}) const {
    PerBlock<int32_t> device(6), pages(5);
    for (BlockId id : held) ++device[id];
    tiers.check_invariants(std::move(device), std::move(pages));
  }
};

TEST(blocks_evicted_within_a_step_are_offloaded_to_the_host) {
  Fixture f;
  const Ids ids = f.cache(5);
  f.steps.begin();
  const Ids taken = take(&f.tiers.pool(), 1);
  CHECK(f.steps.plan().end().swap_out == Ids({ids[0], 1}));
  f.tiers.host()->publish_offloaded();
  CHECK_EQ(f.tiers.host_pages()->find(hash_of(1), 0), 1);
  CHECK_EQ(f.tiers.counts().written_blocks, 1);
  f.tiers.clear_counts();
  CHECK_EQ(f.tiers.counts().written_blocks, 0);
  f.check(taken);
}

TEST(without_a_host_tier_there_is_one_pool) {
  Fixture f(options_with(0));
  CHECK(f.tiers.host() == nullptr && f.tiers.host_pages() == nullptr);
  f.cache(5);
  f.steps.begin();
  f.tiers.offload_queued(f.tiers.num_queued());
  const Ids taken = take(&f.tiers.pool(), 5);
  CHECK(f.steps.end(f.rows).swap_out.empty());
  CHECK_EQ(f.tiers.counts().written_blocks, 0);
  f.check(taken);
}

TEST(queued_blocks_are_offloaded_by_the_next_step) {
  for (bool fences : {false, true}) {
    ManagerOptions more{};
    more.host_writes.is_through = true;
    more.fence_frees = fences;
    Fixture f(options_with(5, more));
    const Ids ids = f.cache(1);
    f.steps.begin();
    f.tiers.offload_queued(f.tiers.num_queued());
    // Without fences, the block is released immediately, because the stream order protects it.
    CHECK_EQ(f.tiers.pool().ref_count(ids[0]), fences ? 1 : 0);
    f.tiers.host()->publish_offloaded();
    f.tiers.release_read();
    CHECK_EQ(f.tiers.frees().num_waiting(), fences ? 1 : 0);
    CHECK_EQ(f.steps.end(f.rows).swap_out.size(), 2);
    f.check();
    f.steps.journal().complete_to(0);
    f.tiers.frees().release_completed();
    CHECK(!f.tiers.any_held());
    f.check();
  }
}

TEST(held_blocks_of_both_tiers_are_detected) {
  Fixture f;
  CHECK(!f.tiers.any_held());
  const Ids ids = take(&f.tiers.pool(), 1);
  CHECK(f.tiers.any_held());
  release(&f.tiers.pool(), ids);
  CHECK(!f.tiers.any_held());
  take(f.tiers.host_pages(), 1);
  CHECK(f.tiers.any_held());
}

TEST(leaked_references_are_detected) {
  Fixture f;
  const Ids ids = take(&f.tiers.pool(), 1);
  f.check(ids);
  CHECK_THROWS(f.check(), "block 1 has 1 references, but 0 are held");
  take(f.tiers.host_pages(), 1);
  CHECK_THROWS(f.check(ids), "host page 1 has 1 references, but 0 are held");
}

TEST(both_tiers_share_one_event_log) {
  ManagerOptions more{};
  more.record_events = true;
  Fixture f(options_with(5, more));
  f.cache(1);
  publish_chain(f.tiers.host_pages(), take(f.tiers.host_pages(), 1), hashes_from(2, 1));
  f.tiers.pool().clear();
  f.tiers.host_pages()->clear();
  const EventLog::Drained drained = f.tiers.drain_events();
  CHECK_EQ(drained.events.size(), 4);
  CHECK(drained.events[2].tier == Tier::kDevice && drained.events[3].tier == Tier::kHost);
  CHECK(f.tiers.drain_events().events.empty());
}

TEST(the_clock_cannot_go_back) {
  Fixture f(options_with(5));
  f.tiers.set_now(1700);
  f.tiers.read_clock();  // has no effect, because the caller sets the clock
  CHECK_THROWS(f.tiers.set_now(1699), "the clock is set to 1699 ms: expected 1700");
}

TEST(policies_unsupported_on_the_host_are_rejected) {
  ManagerOptions more{};
  more.host_eviction.policy = "priority";
  CHECK_THROWS(Fixture(options_with(5, more)),
               "host_eviction is 'priority': expected one of learned");
}

}  // namespace

TEST_MAIN()
