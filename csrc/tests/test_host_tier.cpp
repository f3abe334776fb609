// SPDX-License-Identifier: Apache-2.0
#include "core/manager/host_tier.h"

#include "tests/check.h"
#include "tests/core_fixtures.h"

using namespace kvcache;
using namespace kvcache::test;
using Ids = std::vector<BlockId>;

namespace {

const HostWrites kBack{}, kThrough{/*is_through=*/true, /*min_gain=*/{}};

// As if these three blocks had been published.
Published published(const Ids& ids) {
  static const Content kContent{};
  return {{ids.data(), 3}, /*group=*/0, /*is_first=*/nullptr, &kContent};
}

struct Fixture {
  BlockPool device{9};
  std::vector<CacheGroup> groups = full_groups(4);
  PlanBuilder plan{1, 9};
  HostTier host;
  std::vector<Hash> hashes = hashes_from(1, 3);
  Ids ids = take(&device, 3);

  explicit Fixture(HostWrites writes, int64_t num_host_blocks = 5)
      : host(std::make_unique<BlockPool>(num_host_blocks), {&device, &groups, &plan}, writes) {
    device.add_listener(&host);
    plan.begin(0);
    publish();
  }
  void publish() { publish_chain(&device, ids, hashes); }
  void check() const {
    PerBlock<int32_t> references(9), pages(host.pages().num_blocks());
    host.check_invariants(&references, &pages);
    for (BlockId page = 1; page < host.pages().num_blocks(); ++page) {
      CHECK_EQ(host.pages().ref_count(page), pages[page]);
    }
  }
};

TEST(write_through_offloads_published_blocks_in_the_next_plan) {
  Fixture f(kThrough);
  f.host.offload_queued(f.host.num_queued(), /*holds_blocks=*/true);
  CHECK_EQ(f.device.ref_count(f.ids[0]), 2);
  CHECK(f.plan.take_held() == Ids({f.ids[2], f.ids[1], f.ids[0]}));  // tails first
  CHECK(f.plan.end().swap_out == Ids({f.ids[2], 1, f.ids[1], 2, f.ids[0], 3}));
  f.host.publish_offloaded();
  f.plan.begin(1);
  f.host.on_publish(published(f.ids));
  // The host already contains these blocks, so offloading them again copies nothing.
  f.host.offload_queued(f.host.num_queued(), false);
  CHECK(f.plan.end().swap_out.empty());
  CHECK(f.host.publish_offloaded().empty());
  f.check();
}

TEST(duplicate_blocks_are_offloaded_once) {
  Fixture f(kThrough);
  const Ids twins = take(&f.device, 3);
  publish_chain(&f.device, twins, f.hashes);
  f.host.on_publish(published(twins));
  f.host.offload_queued(f.host.num_queued(), false);
  CHECK_EQ(f.plan.end().swap_out.size(), 6);
  f.host.publish_offloaded();
  f.check();
}

TEST(an_onboarded_page_and_its_block_are_held_until_arrival) {
  Fixture f(kBack);
  BlockId page, block = take(&f.device, 1)[0];
  f.host.pages().allocate(1, &page);
  f.host.onboard({/*step_id=*/0, page, block, /*column=*/0, /*group=*/0, nullptr});
  CHECK(f.plan.end().swap_in == Ids({page, block}));
  CHECK_EQ(f.device.ref_count(block), 2);
  CHECK_EQ(f.host.num_onboards_into(block), 1);
  f.check();
  CHECK(f.host.take_arrived(0).empty());
  f.host.finish(f.host.take_arrived(1));
  CHECK_EQ(f.device.ref_count(block), 1);
  CHECK_EQ(f.host.pages().num_free(), 4);
  f.check();
}

// Loads a page into each of the returned blocks.
Ids onboard_in_steps_3_and_4(Fixture* f) {
  const Ids blocks = take(&f->device, 2);
  Ids pages(2);
  f->host.pages().allocate(2, pages.data());
  f->host.onboard({3, pages[0], blocks[0], 0, 0, nullptr});
  f->host.onboard({4, pages[1], blocks[1], 1, 0, nullptr});
  return blocks;
}

TEST(onboards_of_aborted_steps_are_taken_oldest_first) {
  Fixture f(kBack);
  const Ids blocks = onboard_in_steps_3_and_4(&f);
  const auto over = f.host.take_aborted(/*last_issued=*/2);
  CHECK_EQ(over.size(), 2);
  CHECK(over[0].block == blocks[0] && over[1].block == blocks[1]);
  f.host.finish(over);
  f.check();
}

TEST(an_onboarded_hit_is_published_unless_its_page_lost_its_hash) {
  Fixture f(kBack);
  auto tokens = std::make_shared<TokenIds>();
  const std::vector<int32_t> ids(4, 7);
  tokens->append(ids.data(), 4);
  auto chain = std::make_shared<TokenChain>(tokens, 4, Hash{}, ExtraKeys(), true, true);
  const BlockId block = take(&f.device, 1)[0];
  BlockId page;
  f.host.pages().allocate(1, &page);
  publish_chain(&f.host.pages(), {page}, {chain->hashes()[0]});
  const HostTier::Onboard hit{0, page, block, 0, 0, chain};
  CHECK(f.host.may_publish(hit));
  HostTier::Onboard of_row = hit;
  of_row.chain = nullptr;
  CHECK(!f.host.may_publish(of_row));
  f.host.pages().evict(&page, 1);
  CHECK(!f.host.may_publish(hit));
}

}  // namespace

TEST_MAIN()
