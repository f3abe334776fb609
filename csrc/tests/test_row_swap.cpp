// SPDX-License-Identifier: Apache-2.0
#include "core/manager/row_swap.h"

#include "core/groups/kinds.h"
#include "tests/serving_fixture.h"

using namespace kvcache;
using namespace kvcache::test;
using Ids = std::vector<BlockId>;

namespace {

// Moves the rows to the host within the step. Returns whether the last row has moved.
bool leave(Serving* s, const std::vector<int32_t>& rows) {
  StepRequest request;
  request.swap_out_rows = rows.data();
  request.num_swap_out_rows = static_cast<int64_t>(rows.size());
  const std::vector<bool> have_left = s->swap.leave(request);
  s->swap.answer(request, have_left);
  return have_left.back();
}

TEST(only_blocks_with_kv_are_swapped_out) {
  Serving s;
  const int32_t row = s.add_row(20);
  s.serve(row, 0, 12);
  s.rows[row].num_computed = 6;  // the third block is lookahead
  const Ids blocks = s.ids(row);
  leave(&s, {row});
  CHECK(s.rows[row].is_on_host());
  CHECK_EQ(s.ids(row).size(), 2);
  CHECK_EQ(s.pool.num_free(), 19);
  CHECK(s.end().swap_out == Ids({blocks[0], s.ids(row)[0], blocks[1], s.ids(row)[1]}));
  CHECK_EQ(s.host.counts().swapped_out_blocks, 2);
}

TEST(shared_blocks_move_once) {
  Serving s;
  const int32_t row = s.add_row(20);
  s.serve(row, 0, 8);
  const int32_t other = s.add_twin(row);
  CHECK_EQ(s.swap.num_unique_blocks({row, other}), 2);
  leave(&s, {row, other});
  CHECK_EQ(s.end().swap_out.size(), 4);
  CHECK(s.ids(row) == s.ids(other));
  CHECK_EQ(s.host.pages().ref_count(s.ids(row)[0]), 2);
}

TEST(blocks_already_on_the_host_are_not_written_again) {
  Serving s;
  const int32_t row = s.add_row(20);
  s.serve(row, 0, 8);
  publish_chain(&s.pool, s.ids(row), hashes_from(1, 2));
  BlockId page;
  s.host.pages().allocate(1, &page);
  publish_chain(&s.host.pages(), {page}, {hash_of(1)});
  s.host.pages().release(&page, 1);
  leave(&s, {row});
  CHECK(s.ids(row)[0] == page);
  CHECK_EQ(s.end().swap_out.size(), 2);
  // The page can be found by other rows.
  CHECK_EQ(s.host.pages().find(hash_of(2), 0), s.ids(row)[1]);
}

TEST(a_row_that_does_not_fit_stays_on_the_device) {
  Serving s;
  const int32_t row = s.add_row(40);
  s.serve(row, 0, 40);
  CHECK(!leave(&s, {row}));  // 10 blocks do not fit into 9 pages
  CHECK(!s.rows[row].is_on_host());
  CHECK_EQ(s.host.pages().num_free(), 9);
  const StepPlan& plan = s.end();
  CHECK(plan.status == std::vector<uint8_t>({static_cast<uint8_t>(Status::kWait)}));
  CHECK(s.journal.last().swapped.empty());
}

TEST(only_pages_that_a_row_still_reads_are_swapped_in) {
  Serving s({group_of(std::make_shared<SlidingWindow>(4), 4)});
  const int32_t row = s.add_row(20);
  s.serve(row, 0, 12);
  leave(&s, {row});
  const Ids pages = s.ids(row);
  s.end();
  s.begin();
  const RowSwap::Return back = s.swap.return_of(row, {12, 13, 0}, s.rules);
  CHECK(back.demand.status == Status::kServed);
  CHECK_EQ(back.first[0], 2);
  s.swap.move_in(row, 12, back);
  CHECK(!s.rows[row].is_on_host());
  CHECK(s.ids(row)[0] == kNullBlock && s.ids(row)[1] == kNullBlock);
  CHECK(s.end().swap_in == Ids({pages[2], s.ids(row)[2]}));
  CHECK_EQ(s.host.pages().num_free(), 8);  // one page is being read
  CHECK_EQ(s.journal.last().swapped.size(), 1);
}

TEST(swap_in_respects_the_watermark_unless_nothing_else_is_held) {
  ManagerOptions options{};
  options.watermark_blocks = 5;
  Serving s(full_groups(4), options);
  const int32_t row = s.add_row(40);
  s.serve(row, 0, 32);
  leave(&s, {row});
  s.end();
  s.begin();
  CHECK(s.swap.return_of(row, {32, 33, 0}, s.rules).demand.status == Status::kServed);
  Ids others = take(&s.pool, 5);
  CHECK(s.swap.return_of(row, {32, 33, 0}, s.rules).demand.status == Status::kServed);
  others.push_back(take(&s.pool, 1)[0]);
  CHECK(s.swap.return_of(row, {32, 33, 0}, s.rules).demand.status == Status::kWait);
  CHECK(s.swap.return_of(row, {32, 100, 0}, s.rules).demand.status == Status::kNever);
  release(&s.pool, others);
}

TEST(a_state_that_continues_in_a_new_page_is_loaded_there) {
  Serving s({group_of(std::make_shared<RecurrentState>(), 4)});
  const int32_t row = s.add_row(20);
  s.serve(row, 0, 4);
  leave(&s, {row});
  const BlockId page = s.ids(row)[0];
  s.end();
  s.begin();
  const RowSwap::Return back = s.swap.return_of(row, {4, 5, 0}, s.rules);
  s.swap.move_in(row, 4, back);
  CHECK(s.ids(row) == Ids({kNullBlock}));
  ServedRow served;
  served.row = row;
  served.span = {4, 5, 0};
  s.growth.serve(&served, back.demand);
  CHECK(s.end().swap_in == Ids({page, s.ids(row)[1]}));
}

TEST(outside_of_a_step_rows_are_swapped_together) {
  Serving s;
  const int32_t row = s.add_row(20);
  s.serve(row, 0, 8);
  const int32_t other = s.add_twin(row);
  s.end();
  const auto out = s.swap.swap_out({row, other});
  CHECK_EQ(out->size(), 4);
  const auto in = s.swap.swap_in({row, other});
  CHECK_EQ(in->size(), 4);
  CHECK(s.ids(row) == s.ids(other));
  CHECK_EQ(s.host.pages().num_free(), 9);
  CHECK_EQ(s.host.counts().swapped_in_blocks, 2);
}

TEST(a_return_does_not_share_pages_of_earlier_calls) {
  Serving s;
  const int32_t row = s.add_row(20);
  s.serve(row, 0, 8);
  s.end();
  CHECK(s.swap.swap_out({row}).has_value());  // the pages have the ids of the blocks that have left
  const Ids others = take(&s.pool, 18);
  CHECK(s.swap.return_of(row, {8, 9, 0}, s.rules).demand.status == Status::kWait);
  release(&s.pool, others);
  CHECK(s.swap.return_of(row, {8, 9, 0}, s.rules).demand.status == Status::kServed);
}

TEST(num_blocks_back_counts_shared_blocks_once) {
  Serving s;
  const int32_t row = s.add_row(20);
  s.serve(row, 0, 6);
  const int32_t other = s.add_twin(row);
  s.end();
  s.swap.swap_out({row, other});
  CHECK_EQ(s.swap.num_blocks_back({row, other}, {0, 0}).num_taken, 2);
  CHECK_EQ(s.swap.num_blocks_back({row, other}, {1, 0}).num_taken,
           3);  // a copy of a shared block
  // The last row keeps the shared block.
  CHECK_EQ(s.swap.num_blocks_back({row, other}, {1, 1}).num_taken, 3);
  CHECK_EQ(s.swap.num_blocks_back({row, other}, {2, 3}).num_taken, 4);
  CHECK_EQ(s.swap.num_blocks_back({row}, {2}).num_taken, 2);
  CHECK_EQ(s.swap.num_blocks_back({row}, {3}).num_taken, 3);
}

TEST(blocks_that_leave_a_window_make_room_for_a_swap_in) {
  Serving s({group_of(std::make_shared<SlidingWindow>(4), 4)});
  const int32_t row = s.add_row(40);
  s.serve(row, 0, 12);
  s.end();
  s.swap.swap_out({row});
  CHECK_EQ(s.swap.num_blocks_back({row}, {0}).num_taken, 3);
  // Two blocks are dropped, and two blocks are added.
  CHECK_EQ(s.swap.num_blocks_back({row}, {8}).num_taken, 3);
  CHECK_EQ(s.swap.num_blocks_back({row}, {12}).num_taken, 4);
}

TEST(rows_that_return_share_blocks_still_cached_on_the_device) {
  Serving s;
  const int32_t row = s.add_row(20);
  const HashList& hashes = s.rows[row].chain->hashes();
  s.publisher.refresh(row);
  s.serve(row, 0, 14);
  const Ids before = s.ids(row);
  s.end();
  s.swap.swap_out({row});
  CHECK(s.pool.find(hashes[2], 0) == before[2]);
  s.pool.evict(&before[1], 1);  // the third block is cached, but cannot be used without the second
  CHECK_EQ(s.swap.num_blocks_back({row}, {0}).num_taken, 4);
  const auto pairs = s.swap.swap_in({row});
  CHECK_EQ(pairs->size(), 6);
  CHECK_EQ(s.ids(row)[0], before[0]);
  CHECK(s.pool.find(hashes[1], 0) == s.ids(row)[1]);  // the moved block is published again
  CHECK_EQ(s.host.pages().num_free(), 9);
  s.swap.swap_out({row});
  s.pool.retain(before.data(), 1);
  const RowSwap::BlocksBack back = s.swap.num_blocks_back({row}, {3});
  CHECK_EQ(back.num_taken, 4);  // another row holds the first block
  CHECK_EQ(back.alone, 5);
  s.pool.release(before.data(), 1);
  const Ids others = take(&s.pool, 16);  // all blocks except the three cached ones
  CHECK(!s.swap.swap_in({row}));
  release(&s.pool, others);
}

// Regression found with 3 groups, blocks of 2 and 4 tokens, and seed 1000116 of soak_manager. The
// pages of the second group were published as device blocks after the first group had been loaded.
TEST(groups_swapped_in_outside_of_a_step_are_published_when_all_are_loaded) {
  Serving s({group_of(std::make_shared<FullAttention>(), 4, 0),
             group_of(std::make_shared<FullAttention>(), 4, 1)});
  const int32_t row = s.add_row(20);
  const HashList& hashes = s.rows[row].chain->hashes();
  s.publisher.refresh(row);
  s.serve(row, 0, 14);
  s.end();
  s.swap.swap_out({row});
  s.pool.reset();
  CHECK(s.swap.swap_in({row}).has_value());
  for (uint8_t group : {0, 1}) {
    for (size_t b = 0; b < 3; ++b) CHECK_EQ(s.pool.find(hashes[b], group), s.ids(row, group)[b]);
  }
}

TEST(rows_that_do_not_all_fit_stay_on_the_device) {
  Serving s;
  const int32_t row = s.add_row(40), other = s.add_row(40);
  s.serve(row, 0, 20);
  s.serve(other, 0, 20);
  s.end();
  CHECK(!s.swap.swap_out({row, other}));  // 10 blocks do not fit into 9 pages
  CHECK(!s.rows[row].is_on_host() && !s.rows[other].is_on_host());
  CHECK_EQ(s.host.pages().num_free(), 9);
  CHECK(s.swap.swap_out({row}).has_value());
  const Ids others = take(&s.pool, 10);  // 4 are free
  CHECK(!s.swap.swap_in({row}));
  CHECK(s.rows[row].is_on_host());
  release(&s.pool, others);
}

TEST(a_row_publishes_filled_blocks_before_it_is_swapped_out) {
  Serving s;
  const int32_t row = s.add_row(20);
  const HashList& hashes = s.rows[row].chain->hashes();
  s.publisher.refresh(row);
  s.serve(row, 0, 8);
  leave(&s, {row});
  CHECK(s.pool.find(hashes[0], 0) != kNullBlock);
  s.end();
  CHECK_EQ(s.host.pages().find(hashes[0], 0), s.ids(row)[0]);
}

}  // namespace

TEST_MAIN()
