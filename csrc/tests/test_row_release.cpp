#include "core/manager/row_release.h"

#include "core/groups/sliding_window.h"
#include "tests/serving_fixture.h"

using namespace kvcache;
using namespace kvcache::test;
using Ids = std::vector<BlockId>;

namespace {

struct Fixture : Serving {
  Clock clock{false};
  RowRelease released{{&groups, 4, &pool, nullptr, &rows, &journal, &frees, &clock}};
  using Serving::Serving;
};

TEST(a_row_releases_all_its_blocks) {
  Fixture f;
  const int32_t row = f.add_row(20);
  f.serve(row, 0, 12);
  f.released.release_row(row, /*with_encoder=*/true);
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
  f.released.release_row(row, true);
  f.end();
  const Ids all = take(&f.pool, 19);
  CHECK(Ids(all.end() - 3, all.end()) == Ids({blocks[2], blocks[1], blocks[0]}));
  release(&f.pool, all);
}

TEST(what_nothing_finds_is_known_to_the_journal) {
  Fixture f;
  const int32_t row = f.add_row(20);
  f.serve(row, 0, 10);
  publish_chain(&f.pool, {f.ids(row)[0], f.ids(row)[1]}, hashes_from(1, 2));
  f.rows.blocks(row)[0].num_published = 2;
  f.pool.evict(&f.ids(row)[0], 1);
  f.released.note_left(row);
  CHECK_EQ(f.journal.last().dropped.size(), 1);  // the block that is not full
  f.released.note_forgotten();
  f.released.note_left(row);
  CHECK_EQ(f.journal.last().dropped.size(), 3);  // and the one that was forgotten
  f.end();
}

TEST(a_row_resumes_where_its_blocks_hold_what_it_reads) {
  Fixture f({group_of(std::make_shared<SlidingWindow>(4), 4)});
  const int32_t row = f.add_row(20);
  f.serve(row, 0, 12);
  f.serve(row, 12, 13);  // the first two blocks have left the window
  CHECK(f.released.can_resume(row, 11));
  CHECK(!f.released.can_resume(row, 10));  // reads token 7
  CHECK(!f.released.can_resume(row, 0));   // the cache may still have something
  f.end();
}

TEST(a_row_is_taken_back) {
  Fixture f;
  const int32_t row = f.add_row(20);
  f.serve(row, 0, 16);
  RowBlocks& blocks = f.rows.blocks(row)[0];
  blocks.num_published = 4;
  blocks.num_hits = 3;
  const Ids before = blocks.blocks;
  f.released.truncate(row, 6);
  CHECK(blocks.blocks == Ids({before[0], before[1]}));
  CHECK(blocks.num_published == 1 && blocks.num_hits == 2);
  CHECK_EQ(f.rows[row].num_computed, 6);
  CHECK_EQ(f.pool.num_free(), 17);
  f.end();
}

}  // namespace

TEST_MAIN()
