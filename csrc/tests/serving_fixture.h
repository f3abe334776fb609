// SPDX-License-Identifier: Apache-2.0
#pragma once
// The components that allocate blocks to rows, connected as in a manager, with a pool of 20 blocks
// and a host of 10 pages.

#include <exception>
#include <memory>
#include <utility>
#include <vector>

#include "core/manager/request_checks.h"
#include "core/manager/row_growth.h"
#include "core/manager/row_server.h"
#include "core/manager/row_swap.h"
#include "core/manager/token_intake.h"
#include "tests/check.h"
#include "tests/core_fixtures.h"

namespace kvcache::test {

// Returns options with these groups.
inline ManagerOptions with_groups(ManagerOptions options, const std::vector<CacheGroup>& groups) {
  for (const CacheGroup& group : groups) options.groups.push_back({group.kind, group.block_size});
  options.num_blocks = 20;
  if (options.max_model_len == 0) options.max_model_len = 1000;
  return options;
}

struct Serving {
  ManagerSetup setup;
  std::vector<CacheGroup> groups;
  BlockPool pool{20};
  StepJournal journal;
  PlanBuilder plan{groups.size(), 20};
  HostTier host{std::make_unique<BlockPool>(10), {&pool, &groups, &plan}, {}};
  DeferredFrees frees{&pool, &journal.numbers(), /*is_enabled=*/false};
  RowTable rows{&groups, setup.options.max_num_reqs};
  RowContext context{&groups, 4, &pool, &host, &rows, &plan, &journal, &frees};
  DemandRules rules{context, setup.options};
  RowGrowth growth{context};
  CacheStats stats{std::vector<int64_t>(groups.size(), 4), 10};
  Publisher publisher{context, &stats, setup.options};
  RequestChecks checks{&setup, without_host()};
  TokenIntake intake{context, &publisher, &checks};
  Clock clock{false};
  RowRelease release{context, &clock};
  RowSwap swap{context, &publisher, &release};
  HitEnds ends{groups};
  PrefixFinder finder{{&pool, &host.pages(), &groups, &ends, 4}, setup.options};
  RowServer server{context,
                   {&finder, &ends, &publisher, &swap, &intake, &stats, /*misses=*/nullptr,
                    /*compared=*/nullptr},
                   setup.options};

  RowContext without_host() const {
    RowContext out = context;
    out.host = nullptr;
    return out;
  }
  explicit Serving(std::vector<CacheGroup> of = full_groups(4), const ManagerOptions& options = {})
      : setup(with_groups(options, of)), groups(std::move(of)) {
    begin();
  }
  ~Serving() noexcept(false) {
    if (std::uncaught_exceptions() == 0) check();
  }

  void begin() {
    journal.begin();
    plan.begin(journal.numbers().num_steps);
    swap.leave(StepRequest{});  // moves no row, but forgets the rows moved by earlier steps
  }
  const StepPlan& end() {
    publisher.publish_offloaded();
    const std::vector<BlockId> held = plan.take_held();
    pool.release(held.data(), static_cast<int64_t>(held.size()));
    const StepPlan& made = plan.end();
    journal.issue(made.clear_rows);
    return made;
  }
  static std::shared_ptr<TokenChain> chain_of(int64_t num_tokens, int64_t block_size = 4) {
    auto tokens = std::make_shared<TokenIds>();
    tokens->append(nullptr, num_tokens);
    return std::make_shared<TokenChain>(tokens, block_size, Hash{}, ExtraKeys(), true, true);
  }
  int32_t add_row(int64_t num_tokens) {
    const int32_t row = rows.take();
    rows[row].chain = chain_of(num_tokens);
    rows[row].served_by = ServedBy::kSteps;
    rows.info(row).reads = true;
    return row;
  }
  // Creates another row with all blocks of this row.
  int32_t add_twin(int32_t row) {
    const int32_t twin = add_row(20);
    ids(twin) = ids(row);
    rows[twin].num_computed = rows[row].num_computed;
    pool.retain(ids(row).data(), rows.blocks(row)[0].size());
    rows[row].sharing = Sharing::kNext;
    return twin;
  }
  // Allocates slots for the tokens [start, stop) of the row. The last num_drafts tokens are drafts.
  ServedRow serve(int32_t row, int64_t start, int64_t stop, int32_t num_drafts = 0) {
    ServedRow served;
    served.row = row;
    served.span = {start, stop, 0, num_drafts, rows[row].num_drafts};
    served.safe_start = start;
    const Demand demand = rules.of_running(rows.blocks(row), served.span, rows[row].may_share());
    CHECK(demand.status == Status::kServed);
    rows[row].num_computed = stop;
    rows[row].num_drafts = num_drafts;
    growth.serve(&served, demand);
    return served;
  }
  std::vector<BlockId>& ids(int32_t row, uint8_t group = 0) {
    return rows.blocks(row)[group].blocks;
  }
  // Checks that all references are held by rows, onboards and fences.
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
