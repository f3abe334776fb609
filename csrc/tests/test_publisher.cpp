// SPDX-License-Identifier: Apache-2.0
#include "core/manager/publisher.h"

#include "core/groups/kinds.h"
#include "core/listeners/event_log.h"
#include "tests/check.h"
#include "tests/core_fixtures.h"

using namespace kvcache;
using namespace kvcache::test;
using Ids = std::vector<BlockId>;

namespace {

struct Fixture {
  std::vector<CacheGroup> groups;
  BlockPool pool{30};
  RowTable rows{&groups, 0};
  StepJournal journal;
  CacheStats stats;
  Publisher publisher;
  std::shared_ptr<TokenIds> tokens = std::make_shared<TokenIds>();

  explicit Fixture(std::vector<CacheGroup> of = full_groups(4), const ManagerOptions& options = {},
                   int64_t hash_block_size = 4)
      : groups(std::move(of)),
        stats(std::vector<int64_t>(groups.size(), 4), 10),
        publisher(
            {&groups, hash_block_size, &pool, /*host=*/nullptr, &rows, /*plan=*/nullptr, &journal,
             /*frees=*/nullptr},
            &stats, options) {
    rows.take();
    rows[0].chain =
        std::make_shared<TokenChain>(tokens, hash_block_size, hash_of(0), ExtraKeys(), true, true);
    rows[0].served_by = ServedBy::kSteps;
    publisher.refresh(0);
  }
  // Sets the row's slots to num_computed tokens, of which num_known are known.
  void compute(int64_t num_computed, int64_t num_known) {
    const int64_t more = num_known - tokens->size();
    tokens->append(std::vector<int32_t>(static_cast<size_t>(more), 7).data(), more);
    rows[0].num_computed = num_computed;
    for (const CacheGroup& group : groups) {
      RowBlocks& held = rows.blocks(0)[group.id];
      const int64_t size = ceil_div(num_computed, group.block_size);
      while (held.size() < size) held.blocks.push_back(take(&pool, 1)[0]);
      while (group.rules->traits.updates_in_place && held.num_alive() > 1)
        held[held.num_dropped++] = kNullBlock;
    }
    rows[0].chain->hashes();
  }
  void publish() {
    publisher.publish(0);
    publisher.check_invariants();
  }
  BlockId block(int64_t b, uint8_t group = 0) { return rows.blocks(0)[group][b]; }
};

TEST(full_blocks_of_known_tokens_are_found) {
  Fixture f;
  f.compute(/*num_computed=*/11, /*num_known=*/9);
  f.publish();
  const auto& hashes = f.rows[0].chain->known_hashes();
  CHECK_EQ(hashes.size(), 2);
  CHECK_EQ(f.pool.find(hashes[1], 0), f.block(1));
  CHECK_EQ(f.pool.num_cached(), 2);
  CHECK_EQ(f.stats.groups()[0].stored_blocks, 2);
  CHECK_EQ(f.rows[0].next_publish, 12);
  CHECK(!f.publisher.may_publish(0));
}

TEST(slots_of_unknown_tokens_are_never_found) {
  Fixture f;
  f.compute(8, 3);
  f.publish();
  CHECK_EQ(f.pool.num_cached(), 0);
  f.compute(8, 8);
  f.publish();
  CHECK_EQ(f.pool.num_cached(), 2);
}

TEST(a_row_of_an_earlier_epoch_publishes_nothing) {
  Fixture f;
  f.rows[0].is_stale = true;
  f.publisher.refresh(0);
  f.compute(8, 8);
  f.publish();
  CHECK_EQ(f.pool.num_cached(), 0);
  f.rows[0].next_publish = 4;
  CHECK_THROWS(f.publisher.check_invariants(), "KV of an earlier epoch");
}

TEST(without_caching_nothing_is_published) {
  ManagerOptions options{};
  options.enable_caching = false;
  Fixture f(full_groups(4), options);
  f.compute(8, 8);
  f.publish();
  CHECK_EQ(f.pool.num_cached(), 0);
}

TEST(delayed_blocks_are_published_when_their_tokens_are_marked) {
  Fixture f;
  f.rows[0].served_by = ServedBy::kMarkedCalls;
  f.compute(8, 8);
  f.publish();
  CHECK_EQ(f.pool.num_cached(), 0);
  f.rows.info(0).num_marked = 7;
  f.publish();
  CHECK_EQ(f.pool.num_cached(), 1);
}

TEST(blocks_that_have_left_a_window_are_not_published) {
  Fixture f({group_of(std::make_shared<SlidingWindow>(4), 4)});
  f.compute(12, 12);
  RowBlocks& blocks = f.rows.blocks(0)[0];
  f.pool.release(&blocks[0], 1);
  blocks[0] = kNullBlock;
  blocks.num_dropped = 1;
  f.publish();
  CHECK_EQ(f.pool.num_cached(), 2);
  CHECK_EQ(blocks.num_published, 3);
}

TEST(blocks_that_no_hit_can_read_are_not_published) {
  // Hits end at multiples of 16. After them, a window of 4 tokens reads the last block of 4 tokens.
  CacheGroup group = group_of(std::make_shared<SlidingWindow>(4), 4);
  group.hit_unit = group.retained_every = 16;
  Fixture f({group});
  f.compute(34, 34);
  f.publish();
  CHECK_EQ(f.pool.num_cached(), 2);
  const auto& hashes = f.rows[0].chain->known_hashes();
  CHECK_EQ(f.pool.find(hashes[3], 0), f.block(3));
  CHECK_EQ(f.pool.find(hashes[7], 0), f.block(7));
  CHECK_EQ(f.rows.blocks(0)[0].num_published, 8);

  group.drafts = true;  // the block after a hit is also looked up
  Fixture drafting({group});
  drafting.compute(34, 34);
  drafting.publish();
  CHECK_EQ(drafting.pool.num_cached(), 3);
}

TEST(partial_blocks_are_found_by_their_hash_blocks) {
  CacheGroup group = group_of(std::make_shared<FullAttention>(), 4, 0, 2);
  group.has_partial = true;
  Fixture f({group}, {}, /*hash_block_size=*/2);
  f.compute(6, 6);
  f.publish();
  const auto& hashes = f.rows[0].chain->known_hashes();
  CHECK_EQ(f.pool.find_partial(hashes[0], 0), f.block(0));
  CHECK_EQ(f.pool.find(hashes[1], 0), f.block(0));
  CHECK_EQ(f.pool.find_partial(hashes[2], 0), f.block(1));
  CHECK_EQ(f.rows[0].next_publish, 8);
}

TEST(a_state_is_found_where_a_step_ended_at_a_boundary) {
  Fixture f({group_of(std::make_shared<RecurrentState>(), 4)});
  f.compute(7, 7);
  f.publish();
  CHECK_EQ(f.pool.num_cached(), 0);  // the state after 4 tokens was overwritten
  f.compute(8, 8);
  f.publish();
  CHECK_EQ(f.pool.num_cached(), 1);
  CHECK_EQ(f.pool.find(f.rows[0].chain->known_hashes()[1], 0), f.block(1));
}

TEST(states_after_known_drafts_are_found) {
  Fixture f({group_of(std::make_shared<RecurrentState>(3), 4)});
  f.compute(6, 9);
  RowBlocks& held = f.rows.blocks(0)[0];
  const Ids pages = take(&f.pool, 3);  // the states after 7, 8 and 9 tokens
  f.rows[0].num_drafts = 3;
  f.rows[0].num_computed = 9;
  held.blocks.insert(held.blocks.end(), pages.begin(), pages.end());
  f.publish();
  CHECK_EQ(f.pool.num_cached(), 1);
  CHECK_EQ(f.pool.find(f.rows[0].chain->known_hashes()[1], 0), pages[1]);
}

TEST(a_state_inside_a_block_is_kept_at_a_hash_boundary_of_the_prompt) {
  CacheGroup group = group_of(std::make_shared<RecurrentState>(), 8, 0, 2);
  group.has_partial = true;
  Fixture f({group}, {}, /*hash_block_size=*/2);
  f.rows.info(0).num_prompt = 6;
  f.publisher.refresh(0);
  CHECK_EQ(f.rows[0].next_publish, 2);
  f.compute(3, 6);
  f.publish();
  CHECK(!f.rows.blocks(0)[0].keeps_state);
  f.compute(4, 6);
  f.publish();
  const auto& hashes = f.rows[0].chain->known_hashes();
  CHECK_EQ(f.pool.find_partial(hashes[1], 0), f.block(0));
  CHECK(f.rows.blocks(0)[0].keeps_state);
  f.rows[0].num_computed = 5;
  CHECK_THROWS(f.publisher.check_invariants(), "not at a hash boundary");
  f.rows.blocks(0)[0].keeps_state = false;

  f.pool.publish_partial(take(&f.pool, 1)[0], hashes[2], hashes[0], 0);  // published by another row
  f.compute(6, 6);
  f.publish();
  CHECK(!f.rows.blocks(0)[0].keeps_state);
  // After the prompt, states are published only at block boundaries.
  CHECK_EQ(f.rows[0].next_publish, 8);
}

TEST(events_report_filled_blocks) {
  ManagerOptions options;
  options.record_events = true;
  Fixture f(full_groups(4), options);
  EventLog log;
  EventRecorder recorder(&log, Tier::kDevice);
  f.pool.add_listener(&recorder);
  f.compute(8, 9);
  f.publish();
  const EventLog::Drained stored = log.drain();
  CHECK_EQ(stored.events.size(), 2);
  CHECK_EQ(stored.tokens.size(), 8);
  CHECK_EQ(stored.events[1].first_token, 4);
}

TEST(the_journal_records_published_blocks) {
  Fixture f;
  f.journal.begin();
  f.compute(8, 8);
  f.publish();
  const auto& published = f.journal.last().published;
  CHECK_EQ(published.size(), 2);
  CHECK(published[1].id == f.block(1) && published[1].first_token == 4);
  CHECK_EQ(published[1].generation, f.pool.generation(f.block(1)));
}

}  // namespace

TEST_MAIN()
