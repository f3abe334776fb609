// SPDX-License-Identifier: Apache-2.0
#include "core/manager/invalidation.h"

#include "tests/check.h"
#include "tests/core_fixtures.h"

using namespace kvcache;
using namespace kvcache::test;
using Ids = std::vector<BlockId>;

namespace {

// Rows of one group with blocks of 4 tokens, and the component that publishes their blocks.
struct Fixture {
  BlockPool pool{30};
  std::vector<CacheGroup> groups = full_groups(4);
  PlanBuilder plan{1, 30};
  HostTier host{std::make_unique<BlockPool>(9), {&pool, &groups, &plan}, {}};
  RowTable rows{&groups, 0};
  StepJournal journal;

  // Adds a row whose first num_hits blocks are hits. The row has computed all later blocks. All of
  // its tokens are `token`.
  int32_t add(int32_t token, int64_t num_tokens, const Ids& ids, int64_t num_hits = 0) {
    auto tokens = std::make_shared<TokenIds>();
    const std::vector<int32_t> all(static_cast<size_t>(num_tokens), token);
    tokens->append(all.data(), num_tokens);
    const int32_t row = rows.take();
    rows[row].chain = std::make_shared<TokenChain>(tokens, 4, hash_of(0), ExtraKeys(), true, true);
    rows[row].chain->hashes();
    rows[row].num_computed = num_tokens;
    rows[row].served_by = ServedBy::kSteps;
    rows.blocks(row)[0].blocks = ids;
    rows.blocks(row)[0].num_hits = num_hits;
    return row;
  }
  Invalidation invalidation(bool by_hash) {
    return {{&groups, 4, &pool, &host, &rows, &plan, &journal, /*frees=*/nullptr}, by_hash};
  }
  Invalidation failed(const Ids& blocks, const Ids& pages = {}) {
    Invalidation invalid = invalidation(/*by_hash=*/true);
    invalid.add_failed(blocks, pages);
    invalid.spread();
    return invalid;
  }
};

using Limits = Invalidation::Limits;

TEST(a_row_recomputes_from_its_invalid_block_on) {
  Fixture f;
  const Ids ids = take(&f.pool, 4);
  f.add(1, 15, ids);
  f.add(2, 4, take(&f.pool, 1));
  const Invalidation invalid = f.failed({ids[2]});
  CHECK(invalid.limits() == Limits({{0, 8}}));
  CHECK(invalid.blocks() == Ids({ids[2], ids[3]}));  // the block and the block computed from it
}

TEST(a_block_that_no_row_holds_affects_no_row) {
  Fixture f;
  f.add(1, 8, take(&f.pool, 2));
  const Invalidation invalid = f.failed({29});
  CHECK(invalid.limits().empty());
  CHECK(invalid.blocks() == Ids({29}));
}

TEST(rows_with_the_same_tokens_are_affected_by_hash) {
  Fixture f;
  const Ids ids = take(&f.pool, 2), copy = take(&f.pool, 2);
  const int32_t row = f.add(1, 8, ids);
  f.add(1, 8, copy);
  publish_chain(&f.pool, ids, hashes_of(f.rows[row].chain->known_hashes()));
  CHECK(f.failed({ids[1]}).limits() == Limits({{0, 4}, {1, 4}}));
  Invalidation by_block = f.invalidation(/*by_hash=*/false);
  by_block.add_block(ids[1], 0);
  by_block.spread();
  CHECK(by_block.limits() == Limits({{0, 4}}));
}

TEST(invalidation_spreads_through_hits_to_other_rows) {
  Fixture f;
  const Ids ids = take(&f.pool, 3);
  f.add(1, 4, {ids[0]});
  f.add(1, 8, {ids[0], ids[1]}, /*num_hits=*/1);
  f.add(1, 12, {ids[0], ids[1], ids[2]}, /*num_hits=*/2);
  Invalidation invalid = f.invalidation(/*by_hash=*/false);
  invalid.limit_row(1, 6);
  invalid.spread();
  // Row 1 can continue inside its own block. Row 2 also holds that block, and the last tokens in
  // the block are invalid.
  CHECK(invalid.limits() == Limits({{1, 6}, {2, 4}}));
  CHECK(invalid.blocks() == Ids({ids[1], ids[2]}));
}

TEST(drafts_that_may_be_rejected_do_not_count_as_valid) {
  Fixture f;
  const int32_t row = f.add(1, 8, take(&f.pool, 3));
  f.rows[row].start = 7;
  f.rows[row].num_computed = 11;  // one token and three drafts
  Invalidation invalid = f.invalidation(/*by_hash=*/false);
  invalid.limit_row(row, 10);
  invalid.spread();
  CHECK(invalid.limits() == Limits({{row, 7}}));
}

TEST(dropped_blocks_are_found_through_the_journal) {
  Fixture f;
  const Ids ids = take(&f.pool, 3);
  const int32_t row = f.add(1, 12, {0, ids[1], ids[2]});
  f.rows.blocks(row)[0].num_dropped = 1;
  f.journal.begin();
  f.journal.note_dropped(row, f.rows[row], /*first_token=*/0, ids[0]);
  f.journal.issue({});
  CHECK(f.failed({ids[0]}).limits() == Limits({{row, 0}}));
}

TEST(blocks_of_a_freed_row_are_found_by_hash) {
  Fixture f;
  const Ids ids = take(&f.pool, 2);
  const int32_t row = f.add(1, 8, ids);
  const auto hashes = hashes_of(f.rows[row].chain->known_hashes());
  publish_chain(&f.pool, ids, hashes);
  f.journal.begin();
  f.journal.note_dropped(row, f.rows[row], 0, /*id=*/20);
  f.journal.issue({});
  f.rows.give_up(row);
  const Invalidation invalid = f.failed({20});
  CHECK(invalid.limits().empty());
  CHECK(invalid.blocks() == Ids({ids[0], ids[1], 20}));
  CHECK_EQ(invalid.chains().roots.count(short_tag_of(hashes[0])), 1);
}

TEST(an_onboard_from_a_failed_page_and_into_a_failed_block_is_invalid) {
  Fixture f;
  const Ids ids = take(&f.pool, 2);
  Ids pages(2);
  f.host.pages().allocate(2, pages.data());
  publish_chain(&f.host.pages(), pages, hashes_from(50, 2));
  f.add(1, 8, ids);
  f.plan.begin(0);
  f.host.onboard({0, pages[0], ids[0], 0, 0, nullptr});
  f.host.onboard({0, pages[1], ids[1], 1, 0, nullptr});
  CHECK(f.failed({}, {pages[1]}).limits() == Limits({{0, 4}}));
  const Invalidation invalid = f.failed({ids[0]});
  CHECK(invalid.limits() == Limits({{0, 0}}));
  // The hash of the page is invalid as well, so the page is not onboarded again.
  CHECK_EQ(invalid.chains().hashes.count(tag_of(hash_of(50))), 1);
}

TEST(a_swapped_row_with_an_invalid_page_restarts) {
  Fixture f;
  const int32_t row = f.add(1, 8, {3, 4});
  f.rows[row].state = RowState::kOnHost;
  CHECK(f.failed({3, 4}).limits().empty());  // device blocks with these ids are not affected
  CHECK(f.failed({}, {4}).limits() == Limits({{row, 0}}));
}

}  // namespace

TEST_MAIN()
