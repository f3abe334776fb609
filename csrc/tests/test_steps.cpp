// SPDX-License-Identifier: Apache-2.0
#include "core/manager/steps.h"

#include "tests/check.h"
#include "tests/core_fixtures.h"

using namespace kvcache;
using namespace kvcache::test;
using Ids = std::vector<BlockId>;

namespace {

struct Fixture {
  std::vector<CacheGroup> groups = full_groups(4);
  RowTable rows{&groups, 0};
  Steps steps{1, 9};

  int32_t add_row(const Ids& ids) {
    const int32_t row = rows.take();
    rows.blocks(row)[0].blocks = ids;
    return row;
  }
};

TEST(plan_and_journal_use_the_same_step_number) {
  Fixture f;
  for (int64_t id : {0, 1}) {
    f.steps.begin();
    CHECK(f.steps.plan().is_step());
    CHECK_EQ(f.steps.journal().last().id, id);
    CHECK_EQ(f.steps.end(f.rows).step_id, id);
    CHECK_EQ(f.steps.numbers().last_issued, id);
    f.steps.check_invariants();
  }
}

TEST(resent_tables_are_cleared_and_sent_completely) {
  Fixture f;
  f.add_row({1}), f.add_row({2, 3}), f.add_row({4});
  f.rows[2].state = RowState::kOnHost;
  f.steps.plan().resend(2);
  f.steps.plan().resend(1);
  f.steps.begin();
  const StepPlan& plan = f.steps.end(f.rows);
  CHECK(plan.clear_rows == Ids({1, 2}));
  CHECK(plan.append_rows == Ids({1}));  // the other row is sent when it returns
  CHECK(plan.groups[0].append_ids == Ids({2, 3}));
  CHECK(f.steps.journal().last().clear_rows == Ids({1, 2}));
  CHECK(!f.steps.plan().must_resend(1));
}

TEST(invariant_checks_detect_a_step_that_was_not_issued) {
  Fixture f;
  f.steps.begin();
  CHECK_THROWS(f.steps.check_invariants(), "a plan was started but not completed");
  f.steps.plan().end();
  CHECK_THROWS(f.steps.check_invariants(), "the journal has a step that is done, or steps out");
}

}  // namespace

TEST_MAIN()
