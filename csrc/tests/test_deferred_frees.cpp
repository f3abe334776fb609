// SPDX-License-Identifier: Apache-2.0
#include "core/manager/deferred_frees.h"

#include "tests/check.h"
#include "tests/core_fixtures.h"

using namespace kvcache;
using namespace kvcache::test;

namespace {

struct Fixture {
  BlockPool pool{9};
  StepNumbers steps;
  DeferredFrees frees{&pool, &steps, /*is_enabled=*/true};
  std::vector<BlockId> ids = take(&pool, 4);

  ~Fixture() {
    steps.check_invariants();
    PerBlock<int32_t> references(9);
    frees.check_invariants(&references);
    for (BlockId id = 1; id < 9; ++id) {
      CHECK_EQ(references[id], frees.num_waiting_of(id) + frees.num_kept_of(id));
    }
  }
};

TEST(without_fences_blocks_are_freed_immediately) {
  BlockPool pool(9);
  StepNumbers steps;
  steps.issue();
  DeferredFrees frees(&pool, &steps, /*is_enabled=*/false);
  const std::vector<BlockId> ids = take(&pool, 2);
  frees.release_or_defer({ids.data(), 2});
  CHECK_EQ(pool.num_free(), 8);
  CHECK_EQ(frees.num_waiting_of(ids[0]), 0);
}

TEST(blocks_that_no_step_reads_are_freed_immediately) {
  Fixture f;
  f.frees.release_or_defer({f.ids.data(), 1});  // no step was issued
  CHECK_EQ(f.pool.num_free(), 5);
  f.steps.issue();
  f.steps.complete(0);
  f.frees.release_or_defer({f.ids.data() + 1, 1});
  CHECK_EQ(f.pool.num_free(), 6);
}

TEST(blocks_wait_for_the_report_on_their_step) {
  Fixture f;
  f.steps.issue();
  f.frees.release_or_defer({f.ids.data(), 2});
  // Waits for the step that is being built.
  f.frees.release_or_defer({f.ids.data() + 2, 1}, /*step_id=*/1);
  CHECK_EQ(f.pool.num_free(), 4);
  CHECK_EQ(f.frees.num_waiting(), 3);
  CHECK_EQ(f.frees.num_waiting_of(f.ids[0]), 1);
  f.steps.issue();
  f.steps.complete(0);
  f.frees.release_completed();
  CHECK_EQ(f.pool.num_free(), 6);
  CHECK_EQ(f.frees.num_waiting(), 1);
  f.steps.complete(1);
  f.frees.release_completed();
  CHECK_EQ(f.frees.num_waiting(), 0);
}

TEST(explicitly_deferred_blocks_wait_with_and_without_fences) {
  for (bool is_enabled : {false, true}) {
    BlockPool pool(9);
    StepNumbers steps;
    DeferredFrees frees(&pool, &steps, is_enabled);
    const std::vector<BlockId> ids = take(&pool, 2);
    steps.issue();
    steps.issue();
    frees.release_after({ids.data(), 2}, 0);
    CHECK_EQ(frees.num_waiting(), 2);
    steps.complete(0);
    frees.release_completed();
    // The last issued step may also read these blocks.
    CHECK_EQ(frees.num_waiting(), is_enabled ? 2 : 0);
    steps.complete(1);
    frees.release_completed();
    CHECK_EQ(pool.num_free(), 8);
  }
}

TEST(blocks_are_kept_under_a_name_until_it_is_released) {
  Fixture f;
  f.frees.keep("a", {f.ids[0], f.ids[1]});
  CHECK(f.frees.keeps("a") && !f.frees.keeps("b"));
  CHECK_EQ(f.frees.num_kept(), 2);
  CHECK_EQ(f.frees.num_kept_of(f.ids[0]), 1);
  CHECK_EQ(f.pool.num_free(), 4);
  f.steps.issue();
  f.frees.release_kept("a");  // waits for the step in flight
  CHECK_EQ(f.frees.num_kept(), 0);
  CHECK_EQ(f.frees.num_waiting(), 2);
  f.steps.complete(0);
  f.frees.release_completed();
  CHECK_EQ(f.pool.num_free(), 6);
}

TEST(blocks_are_released_in_step_order) {
  Fixture f;
  publish_chain(&f.pool, f.ids, hashes_from(1, 4));
  f.steps.issue();
  f.frees.release_or_defer({f.ids.data(), 1}, 1);
  f.frees.release_or_defer({f.ids.data() + 1, 1}, 0);
  f.steps.issue();
  f.steps.complete(1);
  f.frees.release_completed();
  take(&f.pool, 4);  // the uncached blocks
  CHECK_EQ(take(&f.pool, 1)[0], f.ids[1]);
}

TEST(blocks_of_an_aborted_step_wait_for_the_previous_step) {
  Fixture f;
  f.steps.issue();
  f.steps.issue();
  f.frees.release_or_defer({f.ids.data(), 1});
  f.steps.last_issued = 0;  // step 1 was aborted
  f.frees.forget_aborted();
  f.steps.complete(0);
  f.frees.release_completed();
  CHECK_EQ(f.frees.num_waiting(), 0);
  CHECK_EQ(f.pool.num_free(), 5);
}

}  // namespace

TEST_MAIN()
