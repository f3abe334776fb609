#include "core/manager/row_swap.h"

#include "core/groups/recurrent_state.h"
#include "core/groups/sliding_window.h"
#include "tests/serving_fixture.h"

using namespace kvcache;
using namespace kvcache::test;
using Ids = std::vector<BlockId>;

namespace {

void leave(Serving* s, int32_t row) {
  const auto departure = s->swap.departure_of(row);
  CHECK(departure.has_value());
  s->swap.move_out(row, *departure);
}

TEST(a_row_leaves_with_what_holds_kv) {
  Serving s;
  const int32_t row = s.add_row(20);
  s.serve(row, 0, 12);
  s.rows[row].num_computed = 6;  // the third block is lookahead
  const Ids blocks = s.ids(row);
  leave(&s, row);
  CHECK(s.rows[row].on_host);
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
  leave(&s, row);
  leave(&s, other);
  CHECK_EQ(s.end().swap_out.size(), 4);
  CHECK(s.ids(row) == s.ids(other));
  CHECK_EQ(s.host.pages().ref_count(s.ids(row)[0]), 2);
}

TEST(what_is_on_the_host_already_is_not_written_again) {
  Serving s;
  const int32_t row = s.add_row(20);
  s.serve(row, 0, 8);
  publish_chain(&s.pool, s.ids(row), hashes_from(1, 2));
  BlockId page;
  s.host.pages().allocate(1, &page);
  publish_chain(&s.host.pages(), {page}, {hash_of(1)});
  s.host.pages().release(&page, 1);
  leave(&s, row);
  CHECK(s.ids(row)[0] == page);
  CHECK_EQ(s.end().swap_out.size(), 2);
  CHECK_EQ(s.host.pages().find(hash_of(2), 0), s.ids(row)[1]);  // found by others, too
}

TEST(a_row_that_does_not_fit_stays) {
  Serving s;
  const int32_t row = s.add_row(40);
  s.serve(row, 0, 40);
  CHECK(!s.swap.departure_of(row).has_value());  // 10 blocks, 9 pages
  CHECK_EQ(s.host.pages().num_free(), 9);
}

TEST(a_row_comes_back_as_far_as_it_still_reads) {
  Serving s({group_of(std::make_shared<SlidingWindow>(4), 4)});
  const int32_t row = s.add_row(20);
  s.serve(row, 0, 12);
  leave(&s, row);
  const Ids pages = s.ids(row);
  s.end();
  s.begin();
  const RowSwap::Return back = s.swap.return_of(row, {12, 13, 0}, s.rules);
  CHECK(back.demand.status == Status::kServed);
  CHECK_EQ(back.first[0], 2);
  s.swap.move_in(row, 12, back);
  CHECK(!s.rows[row].on_host);
  CHECK(s.ids(row)[0] == kNullBlock && s.ids(row)[1] == kNullBlock);
  CHECK(s.end().swap_in == Ids({pages[2], s.ids(row)[2]}));
  CHECK_EQ(s.host.pages().num_free(), 8);  // one is being read
  CHECK_EQ(s.journal.last().swapped.size(), 1);
}

TEST(a_return_that_does_not_fit_waits_behind_the_watermark_unless_the_row_is_alone) {
  ManagerOptions options{};
  options.watermark_blocks = 5;
  Serving s(full_groups(4), options);
  const int32_t row = s.add_row(40);
  s.serve(row, 0, 32);
  leave(&s, row);
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

TEST(a_state_that_moves_on_is_read_into_its_new_page) {
  Serving s({group_of(std::make_shared<RecurrentState>(), 4)});
  const int32_t row = s.add_row(20);
  s.serve(row, 0, 4);
  leave(&s, row);
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

TEST(outside_of_a_step_all_comes_back_at_once) {
  Serving s;
  const int32_t row = s.add_row(20);
  s.serve(row, 0, 8);
  const int32_t other = s.add_twin(row);
  s.end();
  s.plan.begin_direct();
  s.swap.begin();
  leave(&s, row);
  leave(&s, other);
  CHECK_EQ(s.plan.direct_pairs().size(), 4);
  s.host.publish_offloaded();
  s.plan.begin_direct();
  s.swap.begin();
  s.swap.move_in(row);
  s.swap.move_in(other);
  CHECK_EQ(s.plan.direct_pairs().size(), 4);
  CHECK(s.ids(row) == s.ids(other));
  CHECK_EQ(s.host.pages().num_free(), 9);
  CHECK_EQ(s.host.counts().swapped_in_blocks, 2);
}

}  // namespace

TEST_MAIN()
