// SPDX-License-Identifier: Apache-2.0
// The guard of the learned policy compares the hits of requests with those of a simulated cache. In
// these tests the policy and the simulated cache always evict in the same order, so the simulated
// hits must be the real ones.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "core/eviction/learned.h"
#include "core/groups/full_attention.h"
#include "core/groups/recurrent_state.h"
#include "core/groups/sliding_window.h"
#include "core/manager/manager.h"
#include "tests/check.h"

using namespace kvcache;

namespace {

struct Compared {
  int64_t num_requests = 0, num_blocks = 0, num_hit = 0, num_simulated = 0;
};

enum class Order { kLru, kValue };

// Records the compared hits. Does not report them to the guard, so that the order never changes.
class Recorder : public SimulatedCache {
 public:
  Recorder(SimulatedCache* cache, Compared* compared) : cache_(cache), compared_(compared) {}
  bool has(const Hash& hash, uint8_t group, bool on_host) const override {
    return cache_->has(hash, group, on_host);
  }
  bool has_host() const override { return cache_->has_host(); }
  void clear_host() override { cache_->clear_host(); }
  void use_end(const Hash& hash, uint8_t group) override { cache_->use_end(hash, group); }
  void note_admission(int64_t num_blocks, int64_t num_hit, int64_t num_simulated) override {
    ++compared_->num_requests;
    compared_->num_blocks += num_blocks;
    compared_->num_hit += num_hit;
    compared_->num_simulated += num_simulated;
  }

 private:
  SimulatedCache* cache_;
  Compared* compared_;
};

class OneOrder : public Learned {
 public:
  OneOrder(int64_t num_blocks, Order order, Compared* compared)
      : Learned(num_blocks, /*double_cost_tokens=*/0), order_(order), compared_(compared) {}

  void compare_requests(int64_t num_host_blocks) override {
    Learned::compare_requests(num_host_blocks);
    // After a failed trial, the guard also simulates eviction by value.
    if (order_ == Order::kValue) Learned::simulated()->note_admission(0, 0, 1'000'000);
    model()->follow_lru(order_ == Order::kLru);
  }
  SimulatedCache* simulated() override {
    SimulatedCache* lru = Learned::simulated();
    if (lru == nullptr) return nullptr;
    recorder_.emplace(order_ == Order::kLru ? lru : lru->next(), compared_);
    return &*recorder_;
  }

 private:
  Order order_;
  Compared* compared_;
  std::optional<Recorder> recorder_;
};

struct Setup {
  std::vector<std::shared_ptr<const AttentionKind>> kinds;
  int64_t num_host_blocks = 0, retention_interval = -1;
  HostWrites host_writes = {};
  int64_t max_host_blocks = kMaxSize;  // of the hit of one request
  bool ends_at_checkpoints = true;     // whether steps end where states are kept
  int64_t last_block_size = 4;         // of the last group
  bool is_reset = false;               // whether the cache is cleared after every 100 requests
  Order order = Order::kLru;
};

ManagerOptions options_of(const Setup& setup, Compared* compared) {
  ManagerOptions options{};
  for (const auto& kind : setup.kinds) options.groups.push_back({kind, 4});
  options.groups.back().block_size = setup.last_block_size;
  options.num_blocks = 180;
  options.max_model_len = 400;
  options.num_host_blocks = setup.num_host_blocks;
  options.host_writes = setup.host_writes;
  options.retention_interval = setup.retention_interval;
  options.eviction.make = [=, order = setup.order](int64_t n) {
    return std::make_unique<OneOrder>(n, order, compared);
  };
  return options;
}

// Conversations of up to 40 blocks that share one of three system prompts, one request at a time.
class Conversations {
 public:
  Conversations(const Setup& setup, Compared* compared, uint32_t seed)
      : setup_(setup), random_(seed), manager_(options_of(setup, compared)) {}

  void serve(int num_requests) {
    for (int i = 0; i < num_requests; ++i) {
      manager_.set_now(1'000 * i);
      std::vector<int32_t>& ids = next();
      for (int n = 1 + below(60); n > 0; --n) ids.push_back(fresh_++);
      run(ids);
      if (setup_.is_reset && i % 100 == 99) CHECK(manager_.reset_prefix_cache());
    }
    manager_.check_invariants();
  }

 private:
  int32_t below(uint32_t n) { return static_cast<int32_t>(random_() % n); }

  std::vector<int32_t>& next() {
    if (!all_.empty() && below(3) > 0) {
      std::vector<int32_t>& ids =
          all_[all_.size() - 1 -
               static_cast<size_t>(
                   below(static_cast<uint32_t>(std::min<size_t>(all_.size(), 12))))];
      if (ids.size() < 160) return ids;
    }
    const int32_t system = below(3);
    all_.emplace_back(static_cast<size_t>(8 + 8 * system), 1'000'000 + system);
    return all_.back();
  }
  int64_t step_size(TokenChain* chain, int32_t row, int64_t most) {
    return setup_.ends_at_checkpoints ? manager_.checkpoint_tokens(*chain, row, most) : most;
  }
  void run(const std::vector<int32_t>& ids) {
    auto tokens = std::make_shared<TokenIds>();
    tokens->append(ids.data(), static_cast<int64_t>(ids.size()));
    auto chain = std::make_shared<TokenChain>(tokens, 4, Hash{}, ExtraKeys(), true, true);
    StepRequest request;
    const int64_t first = step_size(chain.get(), /*row=*/-1, kChunk);
    request.new_rows = {NewRow{chain, first}};
    request.new_rows[0].max_host_blocks = setup_.max_host_blocks;
    StepPlan plan = manager_.step(request);
    CHECK_EQ(plan.status[0], static_cast<uint8_t>(Status::kServed));
    const int32_t row = plan.rows[0];
    manager_.report(plan.step_id, /*completed=*/true, {}, {});
    const auto num_tokens = static_cast<int64_t>(ids.size());
    for (int64_t computed = plan.num_computed_tokens[0] + first; computed < num_tokens;) {
      const int64_t most = std::min(num_tokens - computed, kChunk);
      const auto n = static_cast<int32_t>(step_size(chain.get(), row, most));
      StepRequest more;
      more.rows = &row;
      more.num_tokens = &n;
      more.num_rows = 1;
      plan = manager_.step(more);
      CHECK_EQ(plan.status[0], static_cast<uint8_t>(Status::kServed));
      manager_.report(plan.step_id, /*completed=*/true, {}, {});
      computed += n;
    }
    manager_.free(row);
  }

  static constexpr int64_t kChunk = 32;
  Setup setup_;
  std::mt19937 random_;
  Manager manager_;
  std::vector<std::vector<int32_t>> all_;
  int32_t fresh_ = 0;
};

// `share`: the largest permitted difference between all hits, as a fraction of the hits.
void check_alike(const Setup& setup, double share) {
  Compared all;
  for (uint32_t seed = 1; seed <= 4; ++seed) Conversations(setup, &all, seed).serve(800);
  CHECK_EQ(all.num_requests, 3'200);
  CHECK(0.05 * static_cast<double>(all.num_blocks) < static_cast<double>(all.num_hit));
  const double difference = std::abs(static_cast<double>(all.num_hit - all.num_simulated));
  if (difference <= share * static_cast<double>(all.num_hit)) return;
  kvcache::test::fail(__FILE__, __LINE__,
                      std::to_string(all.num_hit) + " blocks were hit, and " +
                          std::to_string(all.num_simulated) + " in the simulated cache");
}

const auto full = std::make_shared<FullAttention>();
const auto window = std::make_shared<SlidingWindow>(12);
const auto state = std::make_shared<RecurrentState>();

// The hits differ slightly: a real cache evicts when it allocates a block, a simulated one only
// when the block is published.
TEST(the_simulated_hits_with_states_are_those_of_lru) {
  for (const int64_t interval : {-1, 0}) {
    check_alike({{full, state}, 0, interval}, 0.02);
    check_alike({{full, window, state}, 0, interval}, 0.03);
  }
  Setup setup{{full, state}};
  setup.ends_at_checkpoints = false;
  // The simulated cache keeps states for longer than a pool in which steps end anywhere.
  check_alike(setup, 0.15);
}

TEST(the_simulated_hits_by_value_are_those_of_the_policy) {
  Setup setup{{full, state}};
  setup.order = Order::kValue;
  for (const int64_t interval : {-1, 0}) {
    setup.retention_interval = interval;
    for (const int64_t num_host : {0, 120}) {
      setup.num_host_blocks = num_host;
      setup.kinds = {full, state};
      check_alike(setup, 0.04);
      setup.kinds = {full, window};
      check_alike(setup, 0.04);
    }
  }
  setup.kinds = {full};
  setup.retention_interval = -1;
  for (const int64_t num_host : {30, 200}) {
    setup.num_host_blocks = num_host;
    check_alike(setup, 0.04);
  }
}

TEST(the_simulated_hits_with_windows_are_those_of_lru) {
  for (const int64_t interval : {-1, 0}) check_alike({{full, window}, 0, interval}, 0.03);
  check_alike({{window}}, 0.01);
}

TEST(the_simulated_hits_with_a_host_are_those_of_lru) {
  check_alike({{full}, 200}, 0.01);
  check_alike({{full}, 30}, 0.01);
  for (const int64_t interval : {-1, 0}) check_alike({{full, state}, 120, interval}, 0.02);
  Setup setup{{full}, 200};
  setup.is_reset = true;
  check_alike(setup, 0.01);
}

TEST(requests_that_limit_their_host_blocks_are_compared_on_the_device) {
  Setup setup{{full}, 200};
  for (const int64_t most : {0, 1, 8}) {
    setup.max_host_blocks = most;
    check_alike(setup, 0.02);
  }
}

TEST(only_a_host_to_which_all_evicted_blocks_are_written_is_simulated) {
  const HostWrites through{/*is_through=*/true, /*min_gain=*/{}};
  check_alike({{full, window}, 200, 0, through}, 0.03);
  Compared compared;
  const Setup setup{{full}, 200, -1, through};
  Conversations(setup, &compared, 1).serve(10);
  CHECK_EQ(compared.num_requests, 0);  // compared block by block
}

TEST(hits_are_counted_in_blocks_of_full_attention) {
  Compared one, other;
  Setup setup{{full, state}};
  Conversations(setup, &one, 1).serve(100);
  setup.last_block_size = 16;
  Conversations(setup, &other, 1).serve(100);
  CHECK_EQ(one.num_blocks, other.num_blocks);
  CHECK(other.num_hit > one.num_hit / 2);
  check_alike(setup, 0.05);
}

TEST(hits_of_full_attention_on_the_device_are_compared_block_by_block) {
  Compared compared;
  Conversations({{full}}, &compared, 1).serve(10);
  CHECK_EQ(compared.num_requests, 0);
}

}  // namespace

TEST_MAIN()
