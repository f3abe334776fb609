// SPDX-License-Identifier: Apache-2.0
#include "core/manager/row_server.h"

#include "core/groups/kinds.h"
#include "tests/serving_fixture.h"

using namespace kvcache;
using namespace kvcache::test;
using Ids = std::vector<BlockId>;
using Statuses = std::vector<uint8_t>;

namespace {

constexpr auto kServed = static_cast<uint8_t>(Status::kServed);
constexpr auto kWait = static_cast<uint8_t>(Status::kWait);
constexpr auto kNever = static_cast<uint8_t>(Status::kNever);

// Returns a chain of tokens 0 with known hashes, because blocks of earlier steps can be published
// only if their hashes are known.
std::shared_ptr<TokenChain> hashed_chain(int64_t num_tokens) {
  auto chain = Serving::chain_of(num_tokens);
  chain->hashes();
  return chain;
}

struct Fixture : Serving {
  using Serving::Serving;

  // Serves the requests and publishes the blocks that they compute.
  void admit(const std::vector<NewRow>& requests) {
    StepRequest request;
    request.new_rows = requests;
    server.serve_new(request);
    server.publish_served();
  }
  // Serves more tokens of the row in an open step.
  void extend(int32_t row, int32_t num_tokens) {
    StepRequest request;
    request.rows = &row;
    request.num_tokens = &num_tokens;
    request.num_rows = 1;
    server.serve_rows(request);
    server.publish_served();
  }
  Status fits(int64_t num_tokens, int64_t chunk, bool whole = false) {
    return server.would_fit({hashed_chain(num_tokens), chunk}, whole);
  }
  // Caches blocks 1 to n under the hashes of a chain of tokens 0, and leaves them free.
  Ids cache(int64_t n) {
    const Ids ids = take(&pool, n);
    publish_chain(&pool, ids, hashes_of(hashed_chain(4 * n)->known_hashes()));
    kvcache::test::release(&pool, ids);
    return ids;
  }
};

TEST(a_row_without_new_tokens_gets_no_blocks) {
  Fixture f;
  const int32_t row = f.add_row(20);
  f.serve(row, 0, 8);
  f.end();
  f.begin();
  const int32_t none = 0, rejected = 1;
  StepRequest request;
  request.rows = &row;
  request.num_tokens = &none;
  request.num_rows = 1;
  request.num_rejected = &rejected;
  request.num_lookahead = 9;
  f.server.serve_rows(request);
  const StepPlan& plan = f.end();
  CHECK(plan.status == Statuses({kServed}) && plan.num_tokens == Ids({0}));
  CHECK(plan.num_computed_tokens == Ids({7}) && plan.is_empty());
  CHECK_EQ(f.rows[row].num_computed, 7);
  CHECK_EQ(f.ids(row).size(), 2);
}

// Returns the row's quiet_until, after checking that serving up to this number of tokens does not
// change its blocks.
int64_t served_to_its_quiet_end(Fixture* f, int32_t row) {
  const int64_t until = f->rows.quiet_until(row);
  const Ids before = f->ids(row);
  f->end();
  f->begin();
  f->extend(row, static_cast<int32_t>(until - f->rows[row].num_computed));
  CHECK(f->ids(row) == before);
  CHECK_EQ(f->rows[row].start, f->journal.last().rows.back().start);
  f->check();
  return until;
}

TEST(a_row_is_quiet_up_to_its_last_slot) {
  Fixture f;
  f.admit({{hashed_chain(5), 5}});
  CHECK_EQ(served_to_its_quiet_end(&f, 0), 8);
  CHECK(f.end().is_empty());
  f.begin();
  f.extend(0, 1);
  CHECK_EQ(f.ids(0).size(), 3);
  CHECK_EQ(served_to_its_quiet_end(&f, 0), 12);
}

TEST(a_row_is_quiet_until_a_block_leaves_its_window) {
  CacheGroup window = group_of(std::make_shared<SlidingWindow>(6), 4);
  window.num_prealloc = 2;
  Fixture f({window});
  f.admit({{hashed_chain(10), 6}});
  // The token at position 9 attends to positions 4 and later.
  CHECK_EQ(served_to_its_quiet_end(&f, 0), 9);
  f.end();
  f.begin();
  f.extend(0, 1);
  CHECK(f.ids(0)[0] == kNullBlock && f.ids(0)[1] != kNullBlock);
  f.rows[0].take_back(3);
  CHECK_EQ(f.rows.quiet_until(0), 13);
}

TEST(a_window_is_kept_while_tokens_of_the_last_step_are_unknown) {
  const CacheGroup window = group_of(std::make_shared<SlidingWindow>(2), 4);
  Fixture f({window});
  const std::shared_ptr<TokenChain> chain = hashed_chain(4);
  f.admit({{chain, 4}});
  f.extend(0, 5);  // one token that is not known yet, and four drafts
  f.end();
  f.begin();
  f.extend(0, 1);  // any of the drafts may still be rejected, so token 5 may be next
  CHECK_EQ(f.rows.blocks(0)[0].num_dropped, 1);
  const int32_t known[6] = {};
  chain->append(known, 6);
  f.end();
  f.begin();
  f.extend(0, 1);
  CHECK_EQ(f.rows.blocks(0)[0].num_dropped, 2);
}

TEST(a_row_that_shares_blocks_is_not_quiet) {
  Fixture f;
  f.admit({{hashed_chain(6), 6}});
  CHECK_EQ(f.rows.quiet_until(0), 8);
  f.server.fork(0, hashed_chain(6));
  CHECK_EQ(f.rows.quiet_until(0), 0);
  CHECK_EQ(f.rows.quiet_until(1), 0);
  f.rows.set_quiet_until(1, 8);
  CHECK_THROWS(f.check(), "row 1 would miss a change of its blocks");
  f.rows.disturb(1);
}

TEST(a_request_gets_its_hit_and_blocks_for_the_remaining_tokens) {
  Fixture f;
  const Ids cached = f.cache(2);
  f.admit({{hashed_chain(14), 100}});
  const StepPlan& plan = f.end();
  CHECK(plan.rows == Ids({0}) && plan.status == Statuses({kServed}));
  CHECK(plan.num_computed_tokens == Ids({8}) && plan.num_tokens == Ids({6}));
  CHECK(plan.clear_rows == Ids({0}) && plan.append_rows == Ids({0}));
  CHECK_EQ(f.ids(0).size(), 4);
  CHECK(f.ids(0)[0] == cached[0] && f.ids(0)[1] == cached[1]);
  CHECK(plan.groups[0].append_ids == f.ids(0));
  CHECK_EQ(f.rows[0].num_computed, 14);
  CHECK(f.rows[0].by_step());
  CHECK_EQ(f.stats.total().hit_tokens, 8);
  // Tokens 0 to 7 stay valid even if the step is aborted.
  CHECK_EQ(f.journal.last().rows[0].start, 8);
  f.server.check_invariants();
}

TEST(external_tokens_have_slots_after_the_hit) {
  Fixture f;
  f.cache(2);
  NewRow asked{hashed_chain(18), 3};
  asked.external.num_tokens = 6;
  NewRow later{hashed_chain(18), 0};
  later.external.num_tokens = 9;
  later.external.is_delayed = true;
  StepRequest request;
  request.new_rows = {asked, later, asked};
  f.server.serve_new(request, {8, 8, 4});
  f.server.publish_served();
  const StepPlan& plan = f.end();
  // The last request assumed a hit of 4 tokens.
  CHECK(plan.status == Statuses({kServed, kServed, kWait}));
  CHECK(plan.num_computed_tokens == Ids({14, 17, 14}));
  CHECK_EQ(f.rows[0].num_computed, 17);
  CHECK_EQ(f.ids(0).size(), 5);
  CHECK_EQ(f.ids(1).size(), 5);
  CHECK(f.rows[1].is_receiving());
  CHECK_EQ(f.journal.last().rows[0].start, 8);   // loaded within the step
  CHECK_EQ(f.journal.last().rows[1].start, 17);  // arrives even if the step is aborted
}

TEST(a_request_does_not_hit_blocks_of_its_own_step) {
  Fixture f;
  f.admit({{hashed_chain(9), 9}, {hashed_chain(9), 9}});
  CHECK(f.end().num_computed_tokens == Ids({0, 0}));
  CHECK(f.pool.find(hashed_chain(9)->known_hashes()[1], 0) != kNullBlock);
}

TEST(a_request_that_does_not_fit_changes_nothing) {
  Fixture f;
  f.cache(2);
  const Ids others = take(&f.pool, 15);  // 4 are free, 2 of them cached
  f.admit({{hashed_chain(17), 17}, {hashed_chain(80), 80}});
  const StepPlan& plan = f.end();
  CHECK(plan.status == Statuses({kWait, kNever}));
  CHECK(plan.rows == Ids({-1, -1}));
  CHECK(plan.append_rows.empty() && plan.clear_rows.empty());
  CHECK_EQ(f.rows.num_in_use(), 0);
  CHECK_EQ(f.pool.num_free(), 4);
  CHECK_EQ(f.stats.total().num_requests, 0);
  CHECK(f.journal.last().rows.empty());
  kvcache::test::release(&f.pool, others);
}

TEST(a_request_waits_for_a_free_row) {
  ManagerOptions options{};
  options.max_num_reqs = 1;
  Fixture f(full_groups(4), options);
  f.admit({{hashed_chain(4), 4}, {hashed_chain(4), 4}});
  CHECK(f.end().status == Statuses({kServed, kWait}));
  CHECK(f.fits(4, 4) == Status::kWait);
  CHECK(f.server.fork(0, hashed_chain(4)).status == Status::kWait);
}

TEST(would_fit_changes_nothing) {
  Fixture f;
  const Ids cached = f.cache(2);
  const Ids others = take(&f.pool, 15);
  CHECK(f.fits(17, 17) == Status::kWait);
  CHECK(f.fits(17, 8) == Status::kServed);  // needs two blocks after the hit
  CHECK(f.fits(80, 1) == Status::kServed);  // only the next chunk must fit
  CHECK(f.fits(80, 1, /*whole=*/true) == Status::kNever);
  CHECK(f.fits(80, 80) == Status::kNever);
  CHECK_EQ(f.pool.ref_count(cached[0]), 0);
  CHECK_EQ(f.rows.num_in_use(), 0);
  kvcache::test::release(&f.pool, others);
  f.end();
}

TEST(running_rows_get_the_blocks_that_they_lack) {
  Fixture f;
  f.admit({{hashed_chain(20), 6}});
  f.end();
  f.begin();
  f.extend(0, 7);
  const StepPlan& plan = f.end();
  CHECK(plan.num_computed_tokens == Ids({6}));
  CHECK(plan.groups[0].append_ids == Ids({f.ids(0)[2], f.ids(0)[3]}));
  CHECK(f.rows[0].start == 6 && f.rows[0].num_computed == 13);
  CHECK_EQ(f.pool.num_cached(), 3);
}

TEST(rejected_tokens_are_computed_again) {
  Fixture f;
  f.admit({{hashed_chain(20), 7}});
  f.end();
  f.begin();
  const int32_t row = 0, count = 2, rejected = 2;
  StepRequest request;
  request.rows = &row;
  request.num_tokens = &count;
  request.num_rejected = &rejected;
  request.num_rows = 1;
  f.server.serve_rows(request);
  CHECK(f.end().num_computed_tokens == Ids({5}));
  CHECK_EQ(f.rows[0].num_computed, 7);
  CHECK_EQ(f.ids(0).size(), 2);
}

TEST(token_ids_of_a_waiting_row_are_removed_again) {
  Fixture f;
  f.admit({{hashed_chain(8), 8}});
  f.end();
  const Ids others = take(&f.pool, 17);
  f.begin();
  const int32_t row = 0, count = 1, id = 7;
  StepRequest request;
  request.rows = &row;
  request.num_tokens = &count;
  request.num_rows = 1;
  request.token_ids = &id;
  request.num_ids = 1;
  f.intake.take_in(request);
  CHECK_EQ(f.rows[0].chain->num_tokens(), 9);
  f.server.serve_rows(request);
  CHECK(f.end().status == Statuses({kWait}));
  CHECK_EQ(f.rows[0].chain->num_tokens(), 8);
  CHECK_EQ(f.rows[0].num_computed, 8);
  kvcache::test::release(&f.pool, others);
}

TEST(a_swapped_row_returns_when_it_is_served) {
  Fixture f;
  f.admit({{hashed_chain(20), 8}});
  f.end();
  CHECK(f.swap.swap_out({0}).has_value());
  f.begin();
  f.extend(0, 1);
  CHECK(!f.rows[0].is_on_host());
  CHECK(f.plan.must_resend(0));
  CHECK_EQ(f.journal.last().rows[0].start, 0);  // loaded blocks depend on this step
  CHECK_EQ(f.end().swap_in.size(), 4);
}

TEST(states_leave_their_pages_after_all_rows_are_served) {
  Fixture f({group_of(std::make_shared<RecurrentState>(), 4)});
  f.admit({{hashed_chain(20), 4}});
  f.end();
  const BlockId first = f.ids(0)[0];
  f.begin();
  const int32_t row = 0, count = 4;
  StepRequest request;
  request.rows = &row;
  request.num_tokens = &count;
  request.num_rows = 1;
  f.server.serve_rows(request);
  CHECK_THROWS(f.server.check_invariants(),
               "a step has not processed a state that leaves its page");
  f.server.publish_served();
  f.server.check_invariants();
  CHECK(f.ids(0) == Ids({kNullBlock, f.ids(0)[1]}));
  CHECK(f.end().copy == Ids({first, f.ids(0)[1]}));
}

TEST(allocate_and_append_return_the_new_blocks) {
  Fixture f;
  f.end();
  const Ids cached = f.cache(2);
  const Slots slots = f.server.allocate({hashed_chain(14), 3}, PrefixHit::of_device(8, {cached}));
  CHECK(slots.status == Status::kServed && slots.row == 0);
  CHECK(slots.new_blocks == std::vector<Ids>({{f.ids(0)[2]}}));
  CHECK(!f.rows[0].by_step());
  CHECK_EQ(f.rows.info(0).num_marked, 8);
  const Slots more = f.server.serve({0, 3, /*num_lookahead=*/4});
  CHECK(more.new_blocks == std::vector<Ids>({{f.ids(0)[3], f.ids(0)[4]}}));
  CHECK(more.copies.empty());
  CHECK_EQ(f.pool.num_cached(), 3);
}

TEST(a_fork_shares_blocks_until_one_row_writes) {
  Fixture f;
  f.end();
  f.server.allocate({hashed_chain(6), 6}, PrefixHit::of_device(0, {{}}));
  const Slots child = f.server.fork(0, hashed_chain(6));
  CHECK(child.status == Status::kServed && child.row == 1);
  CHECK(f.ids(0) == f.ids(1));
  CHECK_EQ(f.server.num_common_prefix_blocks(0, 2, 0), 2);
  CHECK_EQ(f.server.num_common_prefix_blocks(0, 1, 0), 0);
  const BlockId shared = f.ids(0)[1];
  const Slots slots = f.server.serve({1, 1});
  CHECK(slots.copies == Ids({shared, f.ids(1)[1]}));
  CHECK(f.ids(0)[1] == shared && f.ids(1)[1] != shared);
  CHECK(f.server.serve({0, 1}).copies.empty());  // the row no longer shares the block
  CHECK_EQ(f.server.num_common_prefix_blocks(0, 2, 0), 1);
}

TEST(aborting_a_step_in_flight_affects_the_fork_too) {
  Fixture f;
  f.admit({{hashed_chain(20), 6}});
  f.end();
  f.server.fork(0, hashed_chain(20));
  CHECK(f.plan.must_resend(1));
  CHECK_EQ(f.journal.last().rows.size(), 2);
  CHECK_EQ(f.journal.last().rows[1].row, 1);
  CHECK_EQ(f.journal.last().rows[1].admission, f.rows[1].admission);
}

TEST(a_row_restarts_from_its_cached_prefix) {
  Fixture f;
  f.admit({{hashed_chain(20), 10}});
  f.end();
  const Ids before = f.ids(0);
  f.rows[0].is_stale = true;
  f.rows[0].sharing = Sharing::kNext;
  f.release.release_row(0, /*with_all=*/false);
  f.server.restart(0, 0);
  CHECK(f.ids(0) == Ids({before[0], before[1]}));
  CHECK_EQ(f.rows[0].num_computed, 8);
  CHECK(!f.rows[0].is_stale && !f.rows[0].has_forked());
  CHECK_EQ(f.rows[0].next_publish, 12);
}

TEST(hits_on_the_host_are_counted_from_their_first_token) {
  Fixture f;
  f.cache(1);
  const std::vector<Hash> hashes = hashes_of(hashed_chain(12)->known_hashes());
  const Ids pages = take(&f.host.pages(), 1);
  publish_chain(&f.host.pages(), pages, {hashes[1]});
  kvcache::test::release(&f.host.pages(), pages);
  f.admit({{hashed_chain(12), 12}});
  CHECK_EQ(f.stats.total().hit_tokens, 8);
  CHECK_EQ(f.stats.total().host_hit_tokens, 4);
  CHECK(f.end().swap_in == Ids({pages[0], f.ids(0)[1]}));
}

TEST(a_request_takes_no_more_from_the_host_than_it_allows) {
  Fixture f;
  f.cache(1);
  const std::vector<Hash> hashes = hashes_of(hashed_chain(12)->known_hashes());
  const Ids pages = take(&f.host.pages(), 1);
  publish_chain(&f.host.pages(), pages, {hashes[1]});
  kvcache::test::release(&f.host.pages(), pages);
  f.admit({{hashed_chain(12), 12, /*max_host_blocks=*/0}});
  CHECK_EQ(f.stats.total().hit_tokens, 4);
  CHECK(f.end().swap_in.empty());
}

}  // namespace

TEST_MAIN()
