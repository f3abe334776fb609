// SPDX-License-Identifier: Apache-2.0
#include "core/manager/row_growth.h"

#include "core/groups/kinds.h"
#include "tests/serving_fixture.h"

using namespace kvcache;
using namespace kvcache::test;
using Ids = std::vector<BlockId>;

namespace {

PrefixHit hit_of(int64_t num_tokens, const Ids& blocks) {
  PrefixHit hit;
  hit.num_tokens = num_tokens;
  hit.blocks = {blocks};
  hit.on_host.resize(1);
  hit.sources = {kNullBlock};
  return hit;
}

TEST(a_row_grows_by_the_blocks_that_it_lacks) {
  Serving s;
  const int32_t row = s.add_row(20);
  s.serve(row, 0, 6);
  const Ids first = s.ids(row);
  CHECK_EQ(first.size(), 2);
  const ServedRow served = s.serve(row, 6, 13);
  CHECK_EQ(s.ids(row).size(), 4);
  CHECK_EQ(served.num_before[0], 2);
  CHECK_EQ(served.safe_start, 6);
  CHECK(Ids(s.ids(row).begin(), s.ids(row).begin() + 2) == first);
  s.end();
}

TEST(preallocation_takes_additional_spare_blocks) {
  Serving s;
  s.groups[0].num_prealloc = 3;
  const int32_t row = s.add_row(20);
  s.serve(row, 0, 4);
  CHECK_EQ(s.ids(row).size(), 4);
  s.serve(row, 4, 16);
  CHECK_EQ(s.ids(row).size(), 4);
  s.groups[0].max_blocks = 6;
  s.serve(row, 16, 17);
  CHECK_EQ(s.ids(row).size(), 6);
  s.end();
}

TEST(blocks_that_leave_a_window_are_released_and_replaced_by_null) {
  Serving s({group_of(std::make_shared<SlidingWindow>(4), 4)});
  const int32_t row = s.add_row(20);
  s.serve(row, 0, 12);
  const Ids before = s.ids(row);
  s.end();
  s.begin();
  s.serve(row, 12, 13);
  CHECK(s.ids(row)[0] == kNullBlock && s.ids(row)[1] == kNullBlock && s.ids(row)[2] == before[2]);
  CHECK_EQ(s.pool.ref_count(before[0]), 0);
  CHECK(s.end().groups[0].replace == Ids({row, 0, kNullBlock, row, 1, kNullBlock}));
  CHECK_EQ(s.journal.last().dropped.size(), 2);
}

TEST(a_written_block_that_another_row_holds_is_copied) {
  Serving s;
  const int32_t row = s.add_row(20);
  s.serve(row, 0, 6);
  s.end();
  s.begin();
  const int32_t other = s.add_twin(row);
  const BlockId shared = s.ids(row)[1];
  const ServedRow served = s.serve(row, 6, 12);
  const BlockId own = s.ids(row)[1];
  CHECK(own != shared);
  CHECK_EQ(served.safe_start, 4);  // tokens 4 and later depend on the copy in this step
  CHECK_EQ(s.plan.num_held(shared), 1);
  const StepPlan& plan = s.end();
  CHECK(plan.copy == Ids({shared, own}));
  CHECK(plan.groups[0].replace == Ids({row, 1, own}));
  CHECK(s.ids(other)[1] == shared);
}

TEST(a_shared_block_without_content_is_replaced_and_not_copied) {
  Serving s;
  const int32_t row = s.add_row(20);
  s.serve(row, 0, 6);
  const int32_t other = s.add_twin(row);
  s.serve(row, 4, 6);  // its last two tokens were rejected
  CHECK(s.end().copy.empty());
  CHECK(s.ids(row)[1] != s.ids(other)[1]);
}

TEST(a_state_moves_to_the_page_of_its_block) {
  Serving s({group_of(std::make_shared<RecurrentState>(), 4)});
  const int32_t row = s.add_row(20);
  s.serve(row, 0, 4);
  const BlockId first = s.ids(row)[0];
  CHECK(s.end().zero == Ids({first}));
  s.begin();
  s.serve(row, 4, 11);
  CHECK_EQ(s.growth.left_states().size(), 1);
  CHECK_EQ(s.growth.left_states()[0].num_tokens, 4);
  CHECK_EQ(s.pool.ref_count(first), 1);  // held until it is published
  s.growth.release_left_states();
  CHECK_EQ(s.pool.ref_count(first), 0);
  const BlockId second = s.ids(row)[2];
  CHECK(s.ids(row) == Ids({kNullBlock, kNullBlock, second}));
  CHECK(s.growth.left_states().empty());
  const StepPlan& plan = s.end();
  CHECK(plan.copy == Ids({first, second}));
  CHECK(plan.groups[0].replace == Ids({row, 0, kNullBlock}));
}

TEST(the_pages_of_an_accepted_draft_and_the_state_swap_places) {
  Serving s({group_of(std::make_shared<RecurrentState>(3), 8)});
  const int32_t row = s.add_row(20);
  s.serve(row, 0, 2);
  s.end();
  s.begin();
  s.serve(row, 2, 6, /*num_drafts=*/3);
  const Ids pages = s.ids(row);
  CHECK_EQ(pages.size(), 4);
  CHECK(s.end().copy.empty());
  s.begin();
  s.rows[row].take_back(1);
  s.serve(row, 5, 7, /*num_drafts=*/1);
  CHECK(s.ids(row) == Ids({pages[2], pages[0], pages[1], pages[3]}));
  const StepPlan& plan = s.end();
  CHECK(plan.copy.empty());
  CHECK(plan.groups[0].replace == Ids({row, 0, pages[2], row, 1, pages[0], row, 2, pages[1]}));
}

TEST(the_row_releases_a_boundary_state_that_drafts_have_passed) {
  Serving s({group_of(std::make_shared<RecurrentState>(3), 4)});
  const int32_t row = s.add_row(20);
  s.serve(row, 0, 6, /*num_drafts=*/3);  // states after 3, 4, 5 and 6 tokens
  const Ids pages = s.ids(row);
  s.end();
  s.begin();
  s.serve(row, 6, 10, /*num_drafts=*/3);
  CHECK_EQ(s.growth.left_states().size(), 1);
  CHECK_EQ(s.growth.left_states()[0].page, pages[1]);
  CHECK_EQ(s.growth.left_states()[0].num_tokens, 4);
  s.growth.release_left_states();
  CHECK_EQ(s.ids(row).size(), 5);
  CHECK(Ids(s.ids(row).begin(), s.ids(row).end() - 1) ==
        Ids({kNullBlock, pages[3], pages[0], pages[2]}));
  CHECK_EQ(s.pool.ref_count(pages[1]), 0);
  CHECK(s.end().copy.empty());
}

TEST(after_a_boundary_the_state_moves_to_a_new_page_and_spare_pages_stay) {
  Serving s({group_of(std::make_shared<RecurrentState>(2), 4)});
  const int32_t row = s.add_row(20);
  s.serve(row, 0, 4, /*num_drafts=*/2);
  const Ids pages = s.ids(row);
  s.end();
  s.begin();
  s.serve(row, 4, 5);
  CHECK_EQ(s.growth.left_states().size(), 1);
  s.growth.release_left_states();
  const BlockId page = s.ids(row)[1];
  CHECK(s.ids(row) == Ids({kNullBlock, page, pages[0], pages[1]}));
  CHECK(s.end().copy == Ids({pages[2], page}));
}

TEST(a_kept_state_stays_in_its_page_if_another_page_is_free) {
  Serving s({group_of(std::make_shared<RecurrentState>(), 8)});
  const int32_t row = s.add_row(20);
  s.serve(row, 0, 4);
  const BlockId first = s.ids(row)[0];
  s.end();
  s.pool.publish_partial(first, hash_of(1), hash_of(1), 0);
  s.rows.blocks(row)[0].keeps_state = true;
  s.begin();
  s.serve(row, 4, 6);
  const BlockId second = s.ids(row)[0];
  CHECK(second != first && s.ids(row).size() == 1);
  CHECK(!s.rows.blocks(row)[0].keeps_state);
  s.growth.release_left_states();
  CHECK(s.ids(row) == Ids({second}));
  CHECK_EQ(s.pool.ref_count(first), 0);
  CHECK_EQ(s.pool.find_partial(hash_of(1), 0), first);
  CHECK(s.plan.end().copy == Ids({first, second}));
  CHECK(s.end().groups[0].replace == Ids({row, 0, second}));

  s.pool.publish_partial(second, hash_of(2), hash_of(1), 0);
  s.rows.blocks(row)[0].keeps_state = true;
  const Ids others = take(&s.pool, s.pool.num_free());
  s.begin();
  s.serve(row, 6, 7);
  CHECK(s.ids(row) == Ids({second}));
  CHECK_EQ(s.pool.find_partial(hash_of(2), 0), kNullBlock);  // the state is overwritten
  CHECK(s.end().copy.empty());
  release(&s.pool, others);
}

TEST(a_hit_on_a_state_inside_a_block_is_copied) {
  Serving s({group_of(std::make_shared<RecurrentState>(), 8)});
  const Ids cached = take(&s.pool, 1);
  s.pool.publish_partial(cached[0], hash_of(1), hash_of(1), 0);
  release(&s.pool, cached);
  const int32_t row = s.add_row(20);
  PrefixHit hit = hit_of(12, {kNullBlock});
  hit.sources = {cached[0]};
  RowGrowth::set_hit(s.rows.blocks(row), s.groups[0], hit, hit.num_tokens);
  ServedRow served;
  served.row = row;
  served.span = {12, 20, 0};
  served.safe_start = 12;
  s.growth.take_hit(&served, hit);
  s.growth.serve(&served, s.rules.of_running(s.rows.blocks(row), served.span, false));
  const BlockId page = s.ids(row)[2];
  CHECK(s.ids(row) == Ids({kNullBlock, kNullBlock, page}));
  CHECK(s.growth.left_states().empty());
  CHECK_EQ(served.safe_start, 8);
  CHECK(s.end().copy == Ids({cached[0], page}));
  CHECK_EQ(s.pool.ref_count(cached[0]), 0);
}

TEST(a_hit_is_held_and_its_partial_block_is_copied) {
  Serving s;
  const Ids cached = take(&s.pool, 3);
  publish_chain(&s.pool, cached, hashes_from(1, 3));
  release(&s.pool, cached);
  const int32_t row = s.add_row(20);
  PrefixHit hit = hit_of(10, {cached[0], cached[1]});
  hit.sources = {cached[2]};
  RowGrowth::set_hit(s.rows.blocks(row), s.groups[0], hit, hit.num_tokens);
  ServedRow served;
  served.row = row;
  served.span = {10, 14, 0};
  served.safe_start = 10;
  s.growth.take_hit(&served, hit);
  CHECK_EQ(s.pool.ref_count(cached[2]), 1);  // held until it is copied
  s.growth.serve(&served, s.rules.of_running(s.rows.blocks(row), served.span, false));
  CHECK_EQ(served.safe_start, 8);
  CHECK(s.end().copy == Ids({cached[2], s.ids(row)[2]}));
  CHECK_EQ(s.pool.ref_count(cached[2]), 0);
  CHECK_EQ(s.rows.blocks(row)[0].num_hits, 2);
}

TEST(the_host_part_of_a_hit_is_onboarded) {
  Serving s;
  const Ids cached = take(&s.pool, 1);
  publish_chain(&s.pool, cached, hashes_from(1, 1));
  release(&s.pool, cached);
  BlockId page;
  s.host.pages().allocate(1, &page);
  publish_chain(&s.host.pages(), {page}, {hash_of(2)});
  s.host.pages().release(&page, 1);
  const int32_t row = s.add_row(20);
  PrefixHit hit = hit_of(8, {cached[0], kNullBlock});
  hit.on_host[0] = {{1, page}};
  hit.num_host_blocks = 1;
  RowGrowth::set_hit(s.rows.blocks(row), s.groups[0], hit, hit.num_tokens);
  ServedRow served;
  served.row = row;
  served.safe_start = 8;
  s.growth.take_hit(&served, hit);
  CHECK_EQ(served.safe_start, 4);
  CHECK(s.end().swap_in == Ids({page, s.ids(row)[1]}));
  CHECK_EQ(s.host.onboards().size(), 1);
  CHECK_EQ(s.host.counts().loaded_blocks, 1);
}

}  // namespace

TEST_MAIN()
