// SPDX-License-Identifier: Apache-2.0
// `check_invariants` of the manager's components detects states that calls cannot reach. The
// components themselves are tested through the manager (`tests/allocator`, `tests/simulator`).
#include "core/groups/kinds.h"
#include "core/manager/cache_tiers.h"
#include "core/manager/publisher.h"
#include "core/manager/row_table.h"
#include "core/manager/steps.h"
#include "tests/check.h"
#include "tests/core_fixtures.h"

using namespace kvcache;
using namespace kvcache::test;
using Ids = std::vector<BlockId>;

namespace {

TEST(plans_that_a_worker_cannot_apply_are_detected) {
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

TEST(a_step_that_was_not_issued_is_detected) {
  Steps steps(1, 9);
  steps.begin();
  CHECK_THROWS(steps.check_invariants(), "a plan was started but not completed");
  steps.plan().end();
  CHECK_THROWS(steps.check_invariants(), "the journal has a step that is done, or steps out");
}

struct Rows {
  std::vector<CacheGroup> groups = full_groups(4);
  RowTable table{&groups, 0};

  int32_t add(const Ids& ids) {
    const int32_t row = table.take();
    table[row].chain = std::make_shared<TokenChain>(std::make_shared<TokenIds>(), 4, Hash{},
                                                    ExtraKeys(), true, true);
    table.blocks(row)[0].blocks = ids;
    return row;
  }
  std::vector<PerBlock<int32_t>> references() const {
    std::vector<PerBlock<int32_t>> out;
    for (int i = 0; i < 2; ++i) out.emplace_back(9);  // of the device and of the host
    table.check_invariants(&out[0], &out[1]);
    return out;
  }
};

TEST(unexpected_null_blocks_are_detected) {
  Rows rows;
  rows.add({1, 0, 2});
  CHECK_THROWS(rows.references(), "row 0 has null blocks");
  rows.table.blocks(0)[0].blocks = {1, 2};
  rows.table.blocks(0)[0].num_dropped = 1;
  CHECK_THROWS(rows.references(), "has null blocks that num_dropped does not count");
}

TEST(a_row_that_would_miss_a_change_of_its_blocks_is_detected) {
  Rows rows;
  rows.add({1, 2});
  rows.table[0].sharing = Sharing::kNext;
  rows.table.set_quiet_until(0, 8);
  CHECK_THROWS(rows.references(), "row 0 would miss a change of its blocks");
}

TEST(references_are_counted_on_the_tier_of_the_row) {
  Rows rows;
  rows.add({1, 2});
  rows.table[rows.add({1, 3})].state = RowState::kOnHost;
  const auto found = rows.references();
  CHECK(found[0][1] == 1 && found[0][2] == 1 && found[0][3] == 0);
  CHECK(found[1][1] == 1 && found[1][2] == 0 && found[1][3] == 1);
}

TEST(leaked_references_are_detected_on_both_tiers) {
  ManagerOptions options{};
  options.groups = {{std::make_shared<FullAttention>(), 4}};
  options.num_blocks = 6;
  options.max_model_len = 100;
  options.num_host_blocks = 5;
  ManagerSetup setup(options);
  Steps steps(1, 6);
  CacheTiers tiers(&setup, &steps);
  const auto check = [&](const Ids& held) {
    PerBlock<int32_t> device(6), pages(5);
    for (const BlockId id : held) ++device[id];
    tiers.check_invariants(std::move(device), std::move(pages));
  };
  const Ids ids = take(&tiers.pool(), 1);
  check(ids);
  CHECK_THROWS(check({}), "block 1 has 1 references, but 0 are held");
  CHECK(tiers.any_held());
  release(&tiers.pool(), ids);
  CHECK(!tiers.any_held());
  take(tiers.host_pages(), 1);
  CHECK(tiers.any_held());
  CHECK_THROWS(check({}), "host page 1 has 1 references, but 0 are held");
}

TEST(rows_that_would_publish_wrong_blocks_are_detected) {
  Rows rows;
  BlockPool pool(9);
  StepJournal journal;
  CacheStats stats({4}, 10);
  Publisher publisher({&rows.groups, 4, &pool, /*host=*/nullptr, &rows.table, /*plan=*/nullptr,
                       &journal, /*frees=*/nullptr},
                      &stats, {});
  rows.add({1});
  rows.table[0].num_computed = 3;
  publisher.refresh(0);
  publisher.check_invariants();
  rows.table.blocks(0)[0].keeps_state = true;
  CHECK_THROWS(publisher.check_invariants(), "not at a hash boundary");
  rows.table.blocks(0)[0].keeps_state = false;
  rows.table[0].is_stale = true;
  rows.table[0].next_publish = 4;
  CHECK_THROWS(publisher.check_invariants(), "KV of an earlier epoch");
}

}  // namespace

TEST_MAIN()
