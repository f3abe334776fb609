// SPDX-License-Identifier: Apache-2.0
#include "core/manager/row_table.h"

#include "core/groups/kinds.h"
#include "tests/check.h"
#include "tests/core_fixtures.h"

using namespace kvcache;
using namespace kvcache::test;
using Ids = std::vector<BlockId>;

namespace {

std::shared_ptr<TokenChain> chain() {
  return std::make_shared<TokenChain>(std::make_shared<TokenIds>(), 4, Hash{}, ExtraKeys(), true,
                                      true);
}

struct Fixture {
  std::vector<CacheGroup> groups{group_of(std::make_shared<FullAttention>(), 4, 0),
                                 group_of(std::make_shared<SlidingWindow>(4), 2, 1),
                                 group_of(std::make_shared<CrossAttention>(), 4, 2)};
  RowTable rows{&groups, /*max_rows=*/3};

  int32_t take(const Ids& full = {}, const Ids& window = {}, const Ids& encoder = {}) {
    const int32_t row = rows.take();
    rows[row].chain = chain();
    rows.blocks(row)[0].blocks = full;
    rows.blocks(row)[1].blocks = window;
    rows.blocks(row)[2].blocks = encoder;
    return row;
  }
  void check() const {
    PerBlock<int32_t> device(30), host(30);
    rows.check_invariants(&device, &host);
  }
};

TEST(the_smallest_free_row_is_taken_with_a_new_admission_number) {
  Fixture f;
  for (int32_t row : {0, 1, 2}) CHECK_EQ(f.take(), row);
  CHECK(!f.rows.has_free());
  const int64_t before = f.rows[1].admission;
  f.rows.give_up(1);
  f.rows.give_up(0);
  CHECK_EQ(f.rows.num_in_use(), 1);
  CHECK_EQ(f.take(), 0);
  CHECK_EQ(f.take(), 1);
  CHECK(!f.rows.is_still(1, before));
  CHECK(f.rows.is_still(1, f.rows[1].admission));
  f.check();
}

TEST(blocks_later_in_the_sequence_come_first_in_all_groups) {
  Fixture f;
  const int32_t row = f.take({1, 2}, {kNullBlock, 3, 4, 5}, {6, 7});
  f.rows.blocks(row)[1].num_dropped = 1;
  // The blocks are ordered by their first token, highest first: block 5 (token 6), blocks 2 and 4
  // (token 4, in the order of the groups), block 3 (token 2), block 1 (token 0).
  CHECK_EQ(f.rows.tail_first(row, /*with_all=*/false), (Ids{5, 2, 4, 3, 1}));
  CHECK_EQ(f.rows.tail_first(row, /*with_all=*/true), (Ids{7, 6, 5, 2, 4, 3, 1}));
}

TEST(first_token_depends_on_the_kind_of_the_group) {
  const std::vector<CacheGroup> groups{group_of(std::make_shared<SlidingWindow>(4), 2, 0),
                                       group_of(std::make_shared<RecurrentState>(), 4, 1),
                                       group_of(std::make_shared<CrossAttention>(), 4, 2)};
  RowTable rows{&groups, 1};
  const int32_t row = rows.take();
  rows[row].num_computed = 20;
  rows.blocks(row)[1].state_start = 8;
  CHECK_EQ(rows.first_token(row, groups[0], 3), 6);
  CHECK_EQ(rows.first_token(row, groups[1], 4), 8);
  CHECK_EQ(rows.first_token(row, groups[2], 1), 0);
  rows[row].num_computed = 8;  // the row has only a hit, so the next token is the first to read it
  CHECK_EQ(rows.first_token(row, groups[1], 1), 7);
}

TEST(rows_not_in_use_are_rejected) {
  Fixture f;
  f.take();
  f.rows.give_up(0);
  CHECK_THROWS(f.rows.at(0), "row 0 is not in use");
  CHECK_THROWS(f.rows.at(-1), "row -1 is not in use");
  CHECK_THROWS(f.rows.at(7), "row 7 is not in use");
}

TEST(name_reports_a_repeated_row_in_a_call) {
  Fixture f;
  f.take();
  f.rows.begin_call();
  CHECK(f.rows.name(0));
  CHECK(!f.rows.name(0));
  f.rows.begin_call();
  CHECK(f.rows.name(0));
}

TEST(lookahead_blocks_are_not_written) {
  Fixture f;
  const int32_t row = f.take({1, 2, 3}, {0, 4, 5}, {6});
  f.rows.blocks(row)[1].num_dropped = 1;
  f.rows[row].num_computed = 4;
  CHECK_EQ(f.rows.num_written(row, f.groups[0]), 1);
  CHECK_EQ(f.rows.num_written(row, f.groups[1]), 2);
  CHECK_EQ(f.rows.num_written(row, f.groups[2]), 1);
  CHECK(f.rows.written_blocks(row) == Ids({1, 4, 6}));
  f.rows[row].state = RowState::kOnHost;  // on the host, all blocks are written
  CHECK(f.rows.written_blocks(row) == Ids({1, 2, 3, 4, 5, 6}));
  f.check();
}

TEST(tails_come_before_heads_in_every_group) {
  Fixture f;
  const int32_t row = f.take({1, 2}, {0, 3, 4, 5}, {6, 7});
  f.rows.blocks(row)[1].num_dropped = 1;
  CHECK(f.rows.tail_first(row, /*with_all=*/true) == Ids({7, 6, 5, 2, 4, 3, 1}));
  CHECK(f.rows.tail_first(row, /*with_all=*/false) == Ids({5, 2, 4, 3, 1}));
}

TEST(references_are_counted_on_the_tier_of_the_row) {
  Fixture f;
  f.take({1, 2});
  const int32_t out = f.take({1, 3});
  f.rows[out].state = RowState::kOnHost;
  PerBlock<int32_t> device(9), host(9);
  f.rows.check_invariants(&device, &host);
  CHECK(device[1] == 1 && device[2] == 1 && device[3] == 0);
  CHECK(host[1] == 1 && host[2] == 0 && host[3] == 1);
}

TEST(invariant_checks_detect_unexpected_null_blocks) {
  Fixture f;
  f.take({1, 0, 2});
  CHECK_THROWS(f.check(), "row 0 has null blocks");
  f.rows.blocks(0)[0].blocks = {1, 2};
  f.rows.blocks(0)[0].num_dropped = 1;
  CHECK_THROWS(f.check(), "has null blocks that num_dropped does not count");
}

}  // namespace

TEST_MAIN()
