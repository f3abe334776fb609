// SPDX-License-Identifier: Apache-2.0
#include "core/manager/plan_builder.h"

#include "tests/check.h"

using namespace kvcache;
using Ids = std::vector<int32_t>;

namespace {

RowBlocks blocks_of(const Ids& ids) {
  RowBlocks blocks;
  blocks.blocks = ids;
  return blocks;
}

TEST(appends_are_ragged_by_row_in_every_group) {
  PlanBuilder plan(2, 20);
  plan.begin(5);
  const RowBlocks first[] = {blocks_of({1, 2, 3}), blocks_of({4})};
  const RowBlocks second[] = {blocks_of({5}), blocks_of({6})};
  const int64_t from[] = {1, 1}, all[] = {0, 0};
  plan.append(0, first, from);
  plan.append(1, second, from);  // the row has no new blocks
  plan.append(2, second, all);
  const StepPlan& made = plan.end();
  CHECK_EQ(made.step_id, 5);
  CHECK(made.append_rows == Ids({0, 2}));
  CHECK(made.groups[0].append_ids == Ids({2, 3, 5}));
  CHECK(made.groups[0].append_splits == Ids({0, 2, 3}));
  CHECK(made.groups[1].append_ids == Ids({6}));
  CHECK(made.groups[1].append_splits == Ids({0, 0, 1}));
  plan.check_invariants();
}

TEST(a_new_plan_contains_only_freed_rows_to_clear) {
  PlanBuilder plan(1, 20);
  plan.begin(0);
  plan.answer(3, Status::kServed, 7, 2);
  plan.copy(1, 2);
  plan.zero(3);
  plan.swap_out(4, 1);
  plan.swap_in(2, 5);
  plan.replace(3, 0, 1, 6);
  plan.end();
  plan.clear_later(9);
  plan.clear_later(4);
  plan.begin(1);
  plan.clear(4);
  const StepPlan& made = plan.end();
  CHECK(made.clear_rows == Ids({4, 9}));
  CHECK(made.rows.empty() && made.status.empty() && made.copy.empty() && made.zero.empty());
  CHECK(made.swap_out.empty() && made.swap_in.empty() && made.groups[0].replace.empty());
  CHECK(!made.is_empty());
  plan.begin(2, 1);
  plan.set_parts(1, 0);
  plan.answer(3, Status::kServed, 7, 2);
  const StepPlan& empty = plan.end();
  CHECK(empty.clear_rows.empty() && empty.is_empty());
  CHECK_EQ(empty.previous_step_id, 1);
  CHECK_EQ(empty.num_running, 1);
  CHECK(empty.num_tokens == Ids({2}));
  plan.begin(3);
  plan.replace(3, 0, 1, 6);
  CHECK(!plan.end().is_empty());
}

TEST(running_rows_are_served_unless_they_are_refused) {
  PlanBuilder plan(1, 20);
  const std::vector<int32_t> rows{4, 2}, num_tokens{3, 1};
  plan.begin(0);
  int32_t* num_computed = plan.answer_running(rows.data(), num_tokens.data(), 2);
  num_computed[0] = 7;
  num_computed[1] = 9;
  plan.refuse(0, Status::kWait);
  plan.answer(-1, Status::kNever, 0, 0);
  const StepPlan& made = plan.end();
  CHECK(made.rows == Ids({4, 2, -1}));
  CHECK(made.status == std::vector<uint8_t>({1, 0, 2}));
  CHECK(made.num_computed_tokens == Ids({7, 9, 0}));
  CHECK(made.num_tokens == Ids({0, 1, 0}));
}

TEST(new_pages_are_fresh_unless_another_section_fills_them) {
  PlanBuilder plan(1, 20);
  const std::vector<int32_t> pages{7, 3, 5, 9, 2};
  plan.begin(0);
  plan.give(pages.data(), 5);
  plan.zero(3);
  plan.copy(1, 9);
  plan.swap_in(4, 2);
  CHECK(plan.end().fresh == Ids({7, 5}));
  plan.check_invariants();
  plan.begin_direct();
  plan.give(pages.data(), 5);  // outside of a step, the caller receives the pages
  plan.begin(1);
  CHECK(plan.end().fresh.empty());
}

TEST(a_resent_row_has_no_replaced_entries) {
  PlanBuilder plan(1, 20);
  plan.resend(6);
  plan.resend(2);
  plan.resend(6);
  plan.resend(4);
  plan.forget_resend(4);  // the row was freed
  CHECK(plan.must_resend(6) && !plan.must_resend(4) && !plan.must_resend(100));
  plan.begin(0);
  plan.replace(6, 0, 1, 3);
  plan.replace(5, 0, 1, 4);
  CHECK(plan.take_resent() == Ids({6, 2}));
  plan.replace(6, 0, 1, 5);
  CHECK(plan.end().groups[0].replace == Ids({5, 1, 4, 6, 1, 5}));
  CHECK(plan.take_resent().empty());
}

TEST(calls_outside_of_steps_record_only_pairs) {
  PlanBuilder plan(1, 20);
  plan.begin(0);
  plan.copy(1, 2);
  plan.end();
  plan.begin_direct();
  plan.copy(3, 4);
  plan.replace(0, 0, 1, 4);
  CHECK(!plan.is_step());
  CHECK(plan.direct_pairs() == Ids({3, 4}));
  plan.begin_direct();
  CHECK(plan.direct_pairs().empty());
}

TEST(blocks_that_the_plan_reads_are_held_until_take_held) {
  PlanBuilder plan(1, 20);
  plan.begin(0);
  plan.hold(3);
  plan.hold(5);
  plan.hold(3);
  CHECK_EQ(plan.num_held(3), 2);
  CHECK(plan.take_held() == std::vector<BlockId>({3, 5, 3}));
  CHECK_EQ(plan.num_held(3), 0);
  plan.end();
  plan.check_invariants();
}

TEST(invariant_checks_detect_plans_that_a_worker_cannot_apply) {
  const auto made = [](void (*fill)(PlanBuilder*)) {
    PlanBuilder plan(1, 20);
    plan.begin(0);
    fill(&plan);
    plan.end();
    plan.check_invariants();
  };
  made([](PlanBuilder* plan) { plan->copy(1, 2), plan->copy(1, 3); });
  CHECK_THROWS(made([](PlanBuilder* plan) { plan->copy(1, 2), plan->zero(2); }), "written twice");
  CHECK_THROWS(made([](PlanBuilder* plan) { plan->zero(2), plan->swap_in(1, 2); }), "twice");
  CHECK_THROWS(made([](PlanBuilder* plan) { plan->copy(2, 3), plan->swap_in(1, 2); }),
               "copied before it is loaded");
  CHECK_THROWS(made([](PlanBuilder* plan) { plan->swap_out(1, 2), plan->swap_out(3, 2); }),
               "host page is written twice");
  CHECK_THROWS(made([](PlanBuilder* plan) { plan->swap_out(1, 2), plan->swap_in(2, 3); }),
               "written and loaded");
  CHECK_THROWS(made([](PlanBuilder* plan) {
                 plan->answer(1, Status::kServed, 0, 1), plan->answer(1, Status::kWait, 0, 0);
               }),
               "a row twice");
  CHECK_THROWS(made([](PlanBuilder* plan) { plan->hold(1); }), "a step that is over");
}

}  // namespace

TEST_MAIN()
