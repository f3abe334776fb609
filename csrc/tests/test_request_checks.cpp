// SPDX-License-Identifier: Apache-2.0
#include "core/manager/request_checks.h"

#include "core/groups/kinds.h"
#include "tests/serving_fixture.h"

using namespace kvcache;
using namespace kvcache::test;

namespace {

ManagerOptions options() {
  ManagerOptions options{};
  options.max_model_len = 20;
  return options;
}

struct Fixture : Serving {
  explicit Fixture(std::vector<CacheGroup> of = full_groups(4)) : Serving(of, options()) {}
};

TEST(invalid_requests_are_rejected_by_name) {
  Fixture f;
  f.checks.check_new(*f.chain_of(20));
  CHECK_THROWS(f.checks.check_new(*f.chain_of(21)),
               "a new request would have 21 tokens: expected at");
  CHECK_THROWS(f.checks.check_new(*f.chain_of(0)), "the number of tokens of a new request is 0");
  CHECK_THROWS(f.checks.check_new(*f.chain_of(8, 8)), "passed to a manager with block_size 4");
  CHECK_THROWS(f.checks.check_group(1), "group is 1: expected 0 to 0");
  CHECK_THROWS(f.checks.check_has_host("swap_out was called"), "but there is no host tier");
}

TEST(reports_with_unknown_steps_or_blocks_are_rejected) {
  Fixture f;
  CHECK_THROWS(f.checks.check_report(0, true, {}, {}), "step_id is 0: no step has been made");
  f.end();
  f.checks.check_report(0, true, {19}, {});
  CHECK_THROWS(f.checks.check_report(1, true, {}, {}), "step_id is 1: expected 0 to 0");
  CHECK_THROWS(f.checks.check_report(0, true, {20}, {}), "failed_pages holds block 20");
  CHECK_THROWS(f.checks.check_report(0, true, {}, {1}), "failed_host_pages contains pages, but");
  f.journal.complete_to(0);
  CHECK_THROWS(f.checks.check_report(0, false, {}, {}), "but it was reported as done");
}

TEST(steps_with_repeated_or_foreign_rows_are_rejected) {
  Fixture f;
  f.add_row(3), f.add_row(3);
  f.rows[1].served_by = ServedBy::kCalls;
  const int32_t twice[] = {0, 0}, counts[] = {1, 1};
  StepRequest request;
  request.rows = twice;
  request.num_tokens = counts;
  request.num_rows = 2;
  CHECK_THROWS(f.checks.check_step(request), "rows contains row 0 twice");
  request.num_rows = 1;
  f.checks.check_step(request);
  const int32_t other = 1, absent = 9;
  request.rows = &other;
  CHECK_THROWS(f.checks.check_step(request), "row 1 was admitted by admit");
  request.rows = &absent;
  CHECK_THROWS(f.checks.check_step(request), "row 9 is not in use");
  CHECK_THROWS(f.checks.check_driver(0, /*by_step=*/false), "row 0 was admitted by step");
}

TEST(freeing_a_row_twice_is_rejected) {
  Fixture f;
  f.add_row(3), f.add_row(3);
  const int32_t rows[] = {1, 0, 1, 7};
  f.checks.check_leaving(rows, 0, {});
  f.checks.check_leaving(rows, 2, {});
  f.checks.check_leaving(rows, 2, {});  // a second call
  CHECK_THROWS(f.checks.check_leaving(rows, 3, {}), "row 1 would be freed twice");
  CHECK_THROWS(f.checks.check_leaving(rows + 2, 2, {}), "row 7 is not in use");
}

TEST(only_uncached_tokens_of_the_last_step_can_be_rejected) {
  Fixture f;
  const int32_t row = f.add_row(20);
  f.serve(row, 0, 11);
  f.rows[row].start = 5;
  f.checks.check_rejected(row, 6);
  f.rows.blocks(row)[0].num_published = 2;
  f.checks.check_rejected(row, 3);
  CHECK_THROWS(f.checks.check_rejected(row, 4), "expected at most 3, the number of uncached");
  f.end();
}

TEST(tokens_of_a_state_without_speculative_blocks_cannot_be_rejected) {
  Fixture f({group_of(std::make_shared<RecurrentState>(), 4)});
  const int32_t row = f.add_row(20);
  CHECK_THROWS(f.checks.check_rejected(row, 1), "a recurrent state cannot undo tokens");
  CHECK_THROWS(f.checks.check_rejected(row, 1), "without num_speculative_blocks");
  CHECK_THROWS(f.checks.check_has_no_state("admit"), "with a recurrent group");
}

TEST(the_number_of_rejected_drafts_is_limited_by_state_pages) {
  Fixture f({group_of(std::make_shared<RecurrentState>(2), 4)});
  const int32_t row = f.add_row(20);
  f.checks.check_drafts(row, 20, 3, 20);
  f.checks.check_drafts(row, 20, 5, 23);
  CHECK_THROWS(f.checks.check_drafts(row, 20, 4, 20),
               "num_tokens of row 0 is 4: expected at most 3: 1 known or sampled tokens");
  CHECK_THROWS(f.checks.check_drafts(row, 18, 6, 21), "is 6: expected at most 5: 3 known");
  f.serve(row, 0, 12, /*num_drafts=*/2);
  f.checks.check_rejected(row, 2);
  CHECK_THROWS(f.checks.check_rejected(row, 3), "expected at most 2, the drafts of its last step");
  f.end();
}

TEST(computed_blocks_must_contain_the_tokens_of_the_request) {
  Fixture f;
  const auto chain = f.chain_of(9);
  const std::vector<BlockId> ids = take(&f.pool, 2);
  publish_chain(&f.pool, ids, hashes_of(chain->hashes()));
  CHECK_EQ(f.checks.check_computed(*chain, {ids}), 8);
  CHECK_EQ(f.checks.check_computed(*chain, {{}}), 0);
  CHECK_THROWS(f.checks.check_computed(*chain, {{ids[1]}}),
               "does not, or no longer, contain block 0");
  CHECK_THROWS(f.checks.check_computed(*chain, {}), "computed_blocks has 0 groups: expected 1");
  CHECK_THROWS(f.checks.check_computed(*f.chain_of(8), {ids}),
               "because the last token must be computed");
  release(&f.pool, ids);
  ManagerOptions off = options();
  off.enable_caching = false;
  const Serving without(full_groups(4), off);
  CHECK_THROWS(without.checks.check_computed(*chain, {ids}), "caching is off");
}

TEST(a_child_must_start_with_the_tokens_of_its_parent) {
  Fixture f;
  const int32_t row = f.add_row(6);
  f.rows[row].num_computed = 6;
  f.checks.check_fork(row, *f.chain_of(6));
  CHECK_THROWS(f.checks.check_fork(row, *f.chain_of(5)), "tokens or extra keys differ");
  f.rows[row].num_computed = 7;
  CHECK_THROWS(f.checks.check_fork(row, *f.chain_of(7)),
               "expected the other tokens to be appended or rej");
}

}  // namespace

TEST_MAIN()
