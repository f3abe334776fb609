// SPDX-License-Identifier: Apache-2.0
#include "core/manager/row_release.h"

#include "core/groups/kinds.h"
#include "tests/serving_fixture.h"

using namespace kvcache;
using namespace kvcache::test;
using Ids = std::vector<BlockId>;

namespace {

using Fixture = Serving;

TEST(a_row_releases_all_its_blocks) {
  Fixture f;
  const int32_t row = f.add_row(20);
  f.serve(row, 0, 12);
  f.release.release_row(row, /*with_all=*/true);
  CHECK_EQ(f.pool.num_free(), 19);
  CHECK(f.ids(row).empty());
  f.end();
}

TEST(tails_are_evicted_before_heads) {
  Fixture f;
  const int32_t row = f.add_row(20);
  f.serve(row, 0, 12);
  const Ids blocks = f.ids(row);
  publish_chain(&f.pool, blocks, hashes_from(1, 3));
  f.release.release_row(row, true);
  f.end();
  const Ids all = take(&f.pool, 19);
  CHECK(Ids(all.end() - 3, all.end()) == Ids({blocks[2], blocks[1], blocks[0]}));
  release(&f.pool, all);
}

TEST(a_released_row_is_free_and_cleared_by_the_next_plan) {
  Fixture f;
  const int32_t row = f.add_row(20);
  f.serve(row, 0, 12);
  f.end();
  f.plan.resend(row);
  f.release.leave(row, {}, {});
  CHECK_EQ(f.rows.num_in_use(), 0);
  CHECK_EQ(f.pool.num_free(), 19);
  CHECK(!f.plan.must_resend(row));
  f.begin();
  CHECK(f.end().clear_rows == std::vector<int32_t>({row}));
}

TEST(released_blocks_that_cannot_be_found_are_recorded_in_the_journal) {
  for (bool has_forgotten : {false, true}) {
    Fixture f;
    f.context.host = nullptr;
    RowRelease release(f.context, &f.clock);
    const int32_t row = f.add_row(20);
    f.serve(row, 0, 10);
    publish_chain(&f.pool, {f.ids(row)[0], f.ids(row)[1]}, hashes_from(1, 2));
    f.rows.blocks(row)[0].num_published = 2;
    f.pool.evict(&f.ids(row)[0], 1);
    if (has_forgotten) release.note_forgotten();
    f.end();
    release.leave(row, {}, {});
    CHECK_EQ(f.journal.last().dropped.size(), has_forgotten ? 2 : 1);
  }
}

TEST(a_row_can_resume_only_where_it_holds_all_blocks_that_it_reads) {
  Fixture f({group_of(std::make_shared<SlidingWindow>(4), 4)});
  const int32_t row = f.add_row(20);
  f.serve(row, 0, 12);
  f.serve(row, 12, 13);  // the first two blocks have left the window
  CHECK(f.release.can_resume(row, 11));
  CHECK(!f.release.can_resume(row, 10));  // token 10 attends to token 7, which was dropped
  CHECK(!f.release.can_resume(row, 0));   // the cache may contain a hit
  f.end();
}

TEST(a_row_returns_to_fewer_computed_tokens) {
  Fixture f;
  const int32_t row = f.add_row(20);
  f.serve(row, 0, 16);
  RowBlocks& blocks = f.rows.blocks(row)[0];
  blocks.num_published = 4;
  blocks.num_hits = 3;
  const Ids before = blocks.blocks;
  f.release.truncate(row, 6);
  CHECK(blocks.blocks == Ids({before[0], before[1]}));
  CHECK(blocks.num_published == 1 && blocks.num_hits == 2);
  CHECK_EQ(f.rows[row].num_computed, 6);
  CHECK_EQ(f.pool.num_free(), 17);
  f.end();
}

}  // namespace

TEST_MAIN()
