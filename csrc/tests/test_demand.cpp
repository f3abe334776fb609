// SPDX-License-Identifier: Apache-2.0
#include "core/manager/demand.h"

#include "core/groups/kinds.h"
#include "tests/check.h"
#include "tests/core_fixtures.h"

using namespace kvcache;
using namespace kvcache::test;
using Ids = std::vector<BlockId>;

namespace {

struct Fixture {
  std::vector<CacheGroup> groups;
  BlockPool pool{11};
  StepJournal journal;
  DeferredFrees frees;
  PlanBuilder plan{1, 11};
  RowContext context{&groups,          4,     &pool,    /*host=*/nullptr,
                     /*rows=*/nullptr, &plan, &journal, &frees};
  BlockHolders holders{context};
  DemandRules rules;
  RowBlocks held;

  explicit Fixture(std::vector<CacheGroup> of = full_groups(4), const ManagerOptions& options = {})
      : groups(std::move(of)),
        frees(&pool, &journal.numbers(), options.fence_frees),
        rules(context, options) {}

  Demand running(const Span& span, bool may_share = false) {
    return rules.of_running(&held, span, may_share);
  }
  Demand fresh(const Span& span, int64_t num_tokens, int64_t num_encoder_tokens = 0,
               int64_t num_reserved = 0) {
    NewRow asked = asked_of(num_tokens, num_encoder_tokens);
    asked.num_reserved_blocks = num_reserved;
    return rules.of_new(&held, asked, span);
  }
  static NewRow asked_of(int64_t num_tokens, int64_t num_encoder_tokens = 0) {
    auto tokens = std::make_shared<TokenIds>();
    tokens->append(nullptr, num_tokens);
    NewRow asked;
    asked.chain = std::make_shared<TokenChain>(tokens, 4, Hash{}, ExtraKeys(), true, true,
                                               num_encoder_tokens);
    return asked;
  }
  // Returns the status of a prompt that is computed in chunks like `first`.
  Status whole(const Span& first, int64_t num_tokens) {
    const NewRow asked = asked_of(num_tokens);
    const Demand demand = rules.of_new(&held, asked, first);
    return rules.of_whole(&held, *asked.chain, first, first.stop - first.start, demand);
  }
};

CacheGroup window(int64_t tokens) { return group_of(std::make_shared<SlidingWindow>(tokens), 4); }

TEST(demand_is_the_missing_blocks_for_tokens_and_lookahead) {
  Fixture f;
  f.held.blocks = take(&f.pool, 2);
  CHECK_EQ(f.running({5, 8, 0}).groups[0].num_new, 0);
  CHECK_EQ(f.running({5, 9, 0}).groups[0].num_new, 1);
  CHECK_EQ(f.running({5, 9, 4}).groups[0].num_new, 2);
  f.groups[0].max_blocks = 3;
  CHECK_EQ(f.running({5, 9, 40}).groups[0].num_new, 1);
}

TEST(a_row_that_does_not_fit_waits_or_never_fits) {
  Fixture f;
  f.held.blocks = take(&f.pool, 2);
  take(&f.pool, 6);
  CHECK(f.running({8, 16, 0}).status == Status::kServed);
  CHECK(f.running({8, 17, 0}).status == Status::kWait);
  CHECK(f.running({8, 40, 0}).status == Status::kWait);
  CHECK(f.running({8, 41, 0}).status == Status::kNever);
}

TEST(a_row_that_gives_up_blocks_without_slots_frees_space) {
  Fixture f({group_of(std::make_shared<FullAttention>(), 4, 0),
             group_of(std::make_shared<FullAttention>(), 8, 1)});
  RowBlocks held[2];
  held[0].blocks = take(&f.pool, 9);
  held[1].blocks = take(&f.pool, 1);
  const Span span{8, 12, 0};
  CHECK(f.rules.of_running(held, span, false).status == Status::kWait);
  const Demand demand = f.rules.of_running(held, span, false, /*gives_up=*/true);
  CHECK(demand.status == Status::kServed && demand.gives_up);
  CHECK_EQ(demand.groups[0].num_surplus, 6);
  CHECK_EQ(demand.groups[1].num_surplus, 0);
  CHECK_EQ(demand.num_spare, 0);
}

TEST(a_row_that_gives_up_draft_pages_frees_space) {
  Fixture f({group_of(std::make_shared<FullAttention>(), 4, 0),
             group_of(std::make_shared<RecurrentState>(3), 4, 1)});
  RowBlocks held[2];
  held[0].blocks = take(&f.pool, 4);
  const Ids pages = take(&f.pool, 6);
  held[1].set_pages(2, pages[0], Ids(pages.begin() + 1, pages.end()));
  const Span span{13, 17, 0, 0, 3};  // the drafts have passed the end of a block
  CHECK(f.rules.of_running(held, span, false).status == Status::kWait);
  const Demand demand = f.rules.of_running(held, span, false, /*gives_up=*/true);
  CHECK(demand.status == Status::kServed && demand.gives_up);
  CHECK_EQ(demand.groups[0].num_surplus, 0);
  CHECK_EQ(demand.groups[1].num_surplus, 5);
  CHECK(!demand.groups[1].moves);  // the state continues in its page
  CHECK_EQ(demand.groups[1].num_new, 0);
}

TEST(spare_blocks_exclude_the_watermark) {
  ManagerOptions options{};
  options.watermark_blocks = 3;
  Fixture f(full_groups(4), options);
  CHECK_EQ(f.running({0, 8, 0}).num_spare, 5);
  const Demand all = f.running({0, 36, 0});  // a running row may use blocks below the watermark
  CHECK(all.status == Status::kServed);
  CHECK_EQ(all.num_spare, 0);
  CHECK(f.fresh({0, 28, 0}, 28).status == Status::kServed);
  CHECK(f.fresh({0, 28, 0}, 28, 0, /*num_reserved=*/1).status == Status::kWait);
  CHECK(f.fresh({0, 32, 0}, 32).status == Status::kNever);
}

TEST(blocks_that_leave_a_window_are_free_unless_a_step_may_read_them) {
  for (bool fences : {false, true}) {
    ManagerOptions options{};
    options.fence_frees = fences;
    Fixture f({window(4)}, options);
    f.held.blocks = take(&f.pool, 4);
    take(&f.pool, 6);
    f.journal.begin();
    f.journal.issue({});
    const Demand demand = f.running({16, 20, 0});
    CHECK_EQ(demand.groups[0].drop_to, 3);
    CHECK(demand.status == (fences ? Status::kWait : Status::kServed));
  }
}

TEST(free_hit_blocks_are_not_available_as_new_blocks) {
  Fixture f;
  const Ids ids = take(&f.pool, 4);
  publish_chain(&f.pool, ids, hashes_from(1, 4));
  release(&f.pool, ids);
  f.held.blocks = ids;
  CHECK(f.fresh({16, 40, 0}, 40).status == Status::kServed);
  take(&f.pool, 1);
  CHECK(f.fresh({16, 40, 0}, 40).status == Status::kWait);
  f.held.blocks[3] = kNullBlock;  // on the host, so it needs a free block
  CHECK(f.fresh({16, 36, 0}, 36).status == Status::kServed);
  CHECK(f.fresh({16, 40, 0}, 40).status == Status::kWait);
}

TEST(encoder_blocks_are_allocated_at_admission) {
  Fixture f({group_of(std::make_shared<CrossAttention>(), 4)});
  CHECK_EQ(f.fresh({0, 3, 0}, 3, /*num_encoder_tokens=*/9).groups[0].num_new, 3);
  take(&f.pool, 8);
  CHECK(f.fresh({0, 3, 0}, 3, 9).status == Status::kWait);
  CHECK(f.fresh({0, 3, 0}, 3, 41).status == Status::kNever);
}

TEST(a_state_needs_a_page_when_it_enters_a_block) {
  Fixture f({group_of(std::make_shared<RecurrentState>(), 4)});
  CHECK_EQ(f.running({0, 3, 0}).groups[0].num_new, 1);
  f.held.blocks = take(&f.pool, 1);
  CHECK_EQ(f.running({3, 4, 9}).groups[0].num_new, 0);
  CHECK_EQ(f.running({4, 20, 0}).groups[0].num_new, 1);
}

TEST(each_draft_needs_a_page_for_its_state) {
  Fixture f({group_of(std::make_shared<RecurrentState>(3), 4)});
  f.held.blocks = take(&f.pool, 1);
  CHECK_EQ(f.running({2, 4, 0, 1}).groups[0].num_new, 1);
  CHECK_EQ(f.running({2, 6, 0, 3}).groups[0].num_new, 3);
  // One of the two pages is needed because the state moves.
  CHECK_EQ(f.running({4, 6, 0, 1}).groups[0].num_new, 2);
  const Ids more = take(&f.pool, 3);
  f.held.blocks.insert(f.held.blocks.end(), more.begin(), more.end());
  CHECK_EQ(f.running({3, 7, 0, 3, 1}).groups[0].num_new, 0);  // the pages of the row are reused
  // All pages of the row are reused except the page with the state after 4 tokens.
  CHECK_EQ(f.running({5, 9, 0, 3, 3}).groups[0].num_new, 1);
  // In this step, the row leaves the page with the state after 4 tokens.
  CHECK_EQ(f.running({4, 8, 0, 3, 1}).groups[0].num_new, 1);
}

TEST(shared_blocks_that_a_row_writes_are_replaced) {
  Fixture f;
  f.held.blocks = take(&f.pool, 3);
  f.pool.retain(f.held.blocks.data(), 3);
  CHECK_EQ(f.running({5, 11, 0}).groups[0].num_shared, 0);  // the row is known to share no block
  CHECK_EQ(f.running({5, 11, 0}, /*may_share=*/true).groups[0].num_shared, 2);
  CHECK(f.rules.shares_from(&f.held, 11));
  f.plan.hold(f.held.blocks[2]);  // the other row has released the block in this step
  CHECK(!f.rules.shares_from(&f.held, 11));
  CHECK_EQ(f.holders.num_rows(f.held.blocks[1]), 2);
}

TEST(a_prompt_computed_in_one_step_skips_blocks_outside_its_window) {
  Fixture f({window(4)});
  NewRow asked = Fixture::asked_of(20);
  asked.computes_whole = true;
  const Demand demand = f.rules.of_new(&f.held, asked, {0, 20, 0});
  CHECK_EQ(demand.groups[0].num_skipped, 4);
  CHECK_EQ(demand.groups[0].num_new, 1);
  CHECK_EQ(f.running({0, 20, 0}).groups[0].num_skipped, 0);  // a running row skips no blocks
}

TEST(a_chunk_can_fit_when_the_whole_prompt_does_not) {
  Fixture f;  // 10 blocks
  CHECK(f.fresh({0, 4, 0}, 45).status == Status::kServed);
  CHECK(f.whole({0, 4, 0}, 45) == Status::kNever);
  CHECK(f.whole({0, 4, 0}, 40) == Status::kServed);
  take(&f.pool, 1);
  CHECK(f.whole({0, 4, 0}, 40) == Status::kWait);
  Fixture w({window(8)});
  CHECK(w.fresh({0, 400, 0}, 400).status == Status::kNever);
  CHECK(w.whole({0, 16, 0}, 400) == Status::kServed);  // needs at most 6 blocks at a time
  take(&w.pool, 5);
  CHECK(w.whole({0, 16, 0}, 400) == Status::kWait);
  CHECK(w.whole({0, 40, 0}, 400) == Status::kNever);
  Fixture r({group_of(std::make_shared<RecurrentState>(), 4)});
  take(&r.pool, 9);
  CHECK(r.whole({0, 4, 0}, 400) == Status::kServed);  // a state continues in its page
  take(&r.pool, 1);
  CHECK(r.whole({0, 4, 0}, 400) == Status::kWait);
  CHECK(r.whole({0, 4, 0}, 4) == Status::kWait);
}

TEST(computing_a_demand_changes_nothing) {
  Fixture f;
  f.held.blocks = take(&f.pool, 2);
  const RowBlocks before = f.held;
  f.running({8, 12, 0});
  f.fresh({8, 12, 0}, 12);
  CHECK(f.held.blocks == before.blocks);
  CHECK_EQ(f.pool.num_free(), 8);
}

}  // namespace

TEST_MAIN()
