// SPDX-License-Identifier: Apache-2.0
#include "core/manager/recovery.h"

#include "core/groups/kinds.h"
#include "tests/serving_fixture.h"

using namespace kvcache;
using namespace kvcache::test;
using Ids = std::vector<BlockId>;

namespace {

struct Fixture : Serving {
  Recovery recovery{context, &publisher, &release, &server};
  using Serving::Serving;

  Recompute abort_from(int64_t step_id) { return recovery.report(step_id, false, {}, {}); }
  int32_t add_hashed_row() {
    const int32_t row = add_row(20);
    rows[row].chain->hashes();
    publisher.refresh(row);
    return row;
  }
  // Runs one step, in which the row computes the tokens [start, stop) and filled blocks are
  // published.
  void step(int32_t row, int64_t start, int64_t stop) {
    if (journal.numbers().num_steps > 0) begin();  // the first step is already open
    const ServedRow served = serve(row, start, stop);
    journal.note_served(row, rows[row], served.safe_start);
    publisher.publish(row);
    end();
  }
  BlockId found(int32_t row, size_t block) {
    return pool.find(rows[row].chain->known_hashes()[block], 0);
  }
};

TEST(a_row_returns_to_its_state_before_the_aborted_step) {
  Fixture f;
  const int32_t row = f.add_hashed_row();
  f.step(row, 0, 8);
  f.step(row, 8, 16);
  const Ids before = f.ids(row);
  const Recompute recompute = f.abort_from(1);
  CHECK(recompute.rows == std::vector<int32_t>({row}));
  CHECK(recompute.num_computed_tokens == std::vector<int32_t>({8}));
  CHECK_EQ(f.rows[row].num_computed, 8);
  CHECK(f.ids(row) == Ids({before[0], before[1]}));
  CHECK_EQ(f.found(row, 1), before[1]);
  CHECK_EQ(f.found(row, 2), kNullBlock);
  CHECK_EQ(f.found(row, 3), kNullBlock);
  CHECK(f.plan.must_resend(row));
  CHECK(f.abort_from(1).rows.empty());  // the step was already aborted
  CHECK_EQ(f.rows[row].num_computed, 8);
}

TEST(a_receiving_row_continues_after_its_valid_arrived_tokens) {
  for (int64_t num_valid : {int64_t{6}, kUnbounded}) {
    Fixture f;
    const int32_t row = f.add_hashed_row();
    f.rows[row].state = RowState::kReceiving;
    f.publisher.refresh(row);
    f.step(row, 0, 12);
    CHECK_EQ(f.found(row, 0), kNullBlock);
    const Ids before = f.ids(row);
    if (num_valid == 6) {
      // The sender still writes to the row's blocks.
      CHECK(f.recovery.invalidate({before[1]}, {}).rows.empty());
      CHECK_EQ(f.rows[row].num_computed, 12);
    }
    f.recovery.receive(row, 11);
    CHECK(!f.rows[row].is_receiving());
    CHECK_EQ(f.rows[row].num_computed, num_valid == 6 ? 4 : 11);
    CHECK_EQ(f.found(row, 0), before[0]);
    CHECK_EQ(f.found(row, 1), num_valid == 6 ? kNullBlock : before[1]);
    CHECK_EQ(f.found(row, 2), kNullBlock);
    CHECK(f.plan.must_resend(row));
  }
}

TEST(blocks_dropped_in_an_aborted_step_are_not_found) {
  Fixture f;
  const int32_t row = f.add_hashed_row();
  const std::vector<Hash> hashes = hashes_of(f.rows[row].chain->known_hashes());
  f.step(row, 0, 8);
  f.release.release_row(row, /*with_all=*/true);
  f.rows.give_up(row);
  CHECK(f.pool.find(hashes[0], 0) != kNullBlock);
  CHECK(f.abort_from(0).rows.empty());
  CHECK_EQ(f.pool.find(hashes[0], 0), kNullBlock);
  CHECK_EQ(f.pool.find(hashes[1], 0), kNullBlock);
}

TEST(host_pages_written_by_an_aborted_step_are_not_found) {
  Fixture f;
  const Ids pages = take(&f.host.pages(), 1);
  publish_chain(&f.host.pages(), pages, hashes_from(1, 1));
  release(&f.host.pages(), pages);
  f.journal.note_written(pages);
  f.end();
  f.abort_from(0);
  CHECK_EQ(f.host.pages().find(hash_of(1), 0), kNullBlock);
}

TEST(rows_cleared_by_an_aborted_step_are_cleared_by_the_next_plan) {
  Fixture f;
  const int32_t row = f.add_row(20);
  f.rows.give_up(row);
  f.plan.clear(row);
  f.end();
  f.abort_from(0);
  f.begin();
  CHECK(f.end().clear_rows == std::vector<int32_t>({row}));
}

TEST(invalid_content_and_everything_computed_from_it_is_evicted) {
  Fixture f;
  const int32_t row = f.add_hashed_row();
  f.step(row, 0, 12);
  const int32_t twin = f.add_twin(row);
  f.rows[twin].chain->hashes();
  const Ids before = f.ids(row);
  const Recompute recompute = f.recovery.invalidate({before[1]}, {});
  CHECK(recompute.rows == std::vector<int32_t>({row, twin}));
  CHECK(recompute.num_computed_tokens == std::vector<int32_t>({4, 4}));
  CHECK(f.ids(row) == Ids({before[0]}));
  CHECK(f.ids(twin) == Ids({before[0]}));
  CHECK_EQ(f.found(row, 0), before[0]);
  CHECK_EQ(f.found(row, 1), kNullBlock);
  CHECK_EQ(f.found(row, 2), kNullBlock);
  CHECK(f.plan.must_resend(row) && f.plan.must_resend(twin));
}

TEST(a_row_without_the_required_blocks_restarts_from_the_cache) {
  Fixture f({group_of(std::make_shared<SlidingWindow>(4), 4)});
  const int32_t row = f.add_hashed_row();
  f.step(row, 0, 12);
  const Ids before = f.ids(row);
  f.step(row, 12, 13);  // the first two blocks have left the window, and are cached
  CHECK_EQ(f.ids(row)[1], kNullBlock);
  const Recompute recompute = f.recovery.invalidate({before[2]}, {});
  CHECK(recompute.num_computed_tokens == std::vector<int32_t>({8}));
  CHECK(f.ids(row) == Ids({kNullBlock, before[1]}));
  CHECK_EQ(f.pool.ref_count(before[1]), 1);
}

TEST(onboarded_hits_are_found_once_their_step_is_done) {
  Fixture f;
  const int32_t row = f.add_hashed_row();
  const Hash hash = f.rows[row].chain->known_hashes()[0];
  const BlockId page = take(&f.host.pages(), 1)[0], block = take(&f.pool, 1)[0];
  publish_chain(&f.host.pages(), {page}, {hash});
  f.host.onboard({/*step_id=*/0, page, block, /*column=*/0, /*group=*/0, f.rows[row].chain});
  f.pool.release(&block, 1);
  f.end();
  CHECK_EQ(f.pool.find(hash, 0), kNullBlock);
  CHECK(f.recovery.report(0, /*completed=*/true, {}, {}).rows.empty());
  CHECK_EQ(f.pool.find(hash, 0), block);
  CHECK_EQ(f.journal.numbers().num_completed, 1);
  CHECK_EQ(f.host.num_onboards(), 0);
  CHECK_EQ(f.pool.num_free(), 19);
}

TEST(failed_blocks_of_a_completed_step_are_recomputed) {
  Fixture f;
  const int32_t row = f.add_hashed_row();
  f.step(row, 0, 8);
  const Recompute recompute = f.recovery.report(0, /*completed=*/true, {f.ids(row)[1]}, {});
  CHECK(recompute.rows == std::vector<int32_t>({row}));
  CHECK(recompute.num_computed_tokens == std::vector<int32_t>({4}));
  CHECK(f.journal.in_flight().empty());
}

TEST(a_new_epoch_clears_the_cache_and_old_rows_publish_nothing) {
  Fixture f;
  const int32_t row = f.add_hashed_row();
  f.step(row, 0, 8);
  f.recovery.start_epoch();
  CHECK_EQ(f.found(row, 0), kNullBlock);
  CHECK(f.rows[row].is_stale);
  f.step(row, 8, 16);
  CHECK_EQ(f.pool.num_cached(), 0);
  f.recovery.clear_cache();
}

TEST(a_forgotten_adapter_loses_its_blocks_and_its_rows_neither_read_nor_write_the_cache) {
  Fixture f;
  const int32_t plain = f.add_hashed_row(), row = f.add_hashed_row();
  const std::vector<std::string> alpha = {"alpha", "/alpha"};
  auto tokens = std::make_shared<TokenIds>();
  const std::vector<int32_t> ids(16, 7);
  tokens->append(ids.data(), 16);
  f.rows[row].chain =
      std::make_shared<TokenChain>(tokens, f.rows[row].chain->block_size(), Hash{},
                                   ExtraKeys(alpha, {}, std::nullopt, nullptr), true, true);
  f.rows[row].chain->hashes();
  f.step(plain, 0, 8);
  f.step(row, 0, 8);
  CHECK(f.found(plain, 0) != kNullBlock);
  CHECK(f.found(row, 0) != kNullBlock);
  f.recovery.forget_adapter(ExtraKeys::adapter_of("beta"));
  CHECK(f.found(row, 0) != kNullBlock);
  f.recovery.forget_adapter(ExtraKeys::adapter_of("alpha"));
  CHECK(f.found(plain, 0) != kNullBlock);
  CHECK_EQ(f.found(row, 0), kNullBlock);
  const int64_t num_cached = f.pool.num_cached();
  f.step(row, 8, 16);
  CHECK_EQ(f.pool.num_cached(), num_cached);
  CHECK(!f.rows[row].chain->read_cache());
  CHECK(!f.rows[row].chain->write_cache());
  CHECK(!f.rows[plain].is_stale);
  CHECK(f.rows[plain].chain->write_cache());
}

}  // namespace

TEST_MAIN()
