#pragma once
// The parts that give rows their blocks, put together as a manager does, over one pool of 20.

#include <exception>
#include <memory>
#include <utility>
#include <vector>

#include "core/manager/row_growth.h"
#include "core/manager/row_swap.h"
#include "tests/check.h"
#include "tests/core_fixtures.h"

namespace kvcache::test {

struct Serving {
  std::vector<CacheGroup> groups;
  BlockPool pool{20};
  HostTier host;
  StepJournal journal;
  DeferredFrees frees{&pool, &journal.numbers(), /*is_enabled=*/false};
  PlanBuilder plan;
  RowTable rows{&groups, 0};
  BlockHolders holders{&pool, &frees, &host, &plan};
  DemandRules rules;
  RowGrowth growth{{&groups, &pool, &host, &rows, &plan, &journal, &frees}, holders};
  RowSwap swap{{&groups, &pool, &host, &rows, &plan, &journal, &frees}, /*caches_rows=*/true};

  explicit Serving(std::vector<CacheGroup> of = full_groups(4), const ManagerOptions& options = {})
      : groups(std::move(of)),
        host(std::make_unique<BlockPool>(10), &pool, &groups, HostWrite::kBack, 0),
        plan(groups.size(), 20),
        rules(&groups, &pool, &frees, &journal.numbers(), holders, options) {
    begin();
  }
  ~Serving() noexcept(false) {
    if (std::uncaught_exceptions() == 0) check();
  }

  void begin() {
    journal.begin();
    plan.begin(journal.numbers().num_steps);
    swap.begin();
  }
  const StepPlan& end() {
    host.publish_offloaded();
    const std::vector<BlockId> held = plan.take_held();
    pool.release(held.data(), static_cast<int64_t>(held.size()));
    const StepPlan& made = plan.end();
    journal.issue(made.clear_rows);
    return made;
  }
  int32_t add_row(int64_t num_tokens) {
    auto tokens = std::make_shared<TokenIds>();
    tokens->append(nullptr, num_tokens);
    const int32_t row = rows.take();
    rows[row].chain = std::make_shared<TokenChain>(tokens, 4, Hash{}, ExtraKeys(), true, true);
    rows[row].by_step = true;
    return row;
  }
  // Another row with all blocks of this one.
  int32_t add_twin(int32_t row) {
    const int32_t twin = add_row(20);
    ids(twin) = ids(row);
    rows[twin].num_computed = rows[row].num_computed;
    pool.retain(ids(row).data(), rows.blocks(row)[0].size());
    rows[row].may_share = true;
    return twin;
  }
  // Gives the row slots for tokens start to stop - 1.
  ServedRow serve(int32_t row, int64_t start, int64_t stop) {
    ServedRow served;
    served.row = row;
    served.span = {start, stop, 0};
    served.safe_start = start;
    const Demand demand = rules.of_running(rows.blocks(row), served.span, rows[row].may_share);
    CHECK(demand.status == Status::kServed);
    rows[row].num_computed = stop;
    growth.serve(&served, demand);
    return served;
  }
  std::vector<BlockId>& ids(int32_t row, uint8_t group = 0) {
    return rows.blocks(row)[group].blocks;
  }
  // References are what rows, onboards and fences hold.
  void check() const {
    PerBlock<int32_t> device(20), pages(10);
    rows.check_invariants(&device, &pages);
    host.check_invariants(&device, &pages);
    for (BlockId id = 1; id < 20; ++id) CHECK_EQ(pool.ref_count(id), device[id]);
    for (BlockId page = 1; page < 10; ++page) CHECK_EQ(host.pages().ref_count(page), pages[page]);
    plan.check_invariants();
  }
};

}  // namespace kvcache::test
