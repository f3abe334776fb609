// The manager under random calls of both kinds (steps and single requests), over mixed groups:
// checks tables that follow the plans, and the invariants. tests/test_allocator_random.py compares
// every answer with a model; this test runs under the sanitizers.
#include "core/manager/manager.h"

#include <algorithm>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "core/eviction/registry.h"
#include "core/groups/chunked_local.h"
#include "core/groups/cross_attention.h"
#include "core/groups/full_attention.h"
#include "core/groups/recurrent_state.h"
#include "core/groups/sliding_window.h"
#include "core/hashing/sha256.h"
#include "tests/check.h"

using kvcache::AttentionKind;
using kvcache::BlockId;
using kvcache::ExtraKeys;
using kvcache::Hash;
using kvcache::Manager;
using kvcache::ManagerOptions;
using kvcache::NewRow;
using kvcache::Slots;
using kvcache::Status;
using kvcache::StepPlan;
using kvcache::StepRequest;
using kvcache::TokenChain;
using kvcache::TokenIds;

namespace {

// A step that only asks for a new row.
StepRequest asking(const std::shared_ptr<TokenChain>& chain, int64_t num_tokens) {
  StepRequest request;
  request.new_rows = {{chain, num_tokens}};
  return request;
}

struct Request {
  std::shared_ptr<TokenIds> tokens;
  std::shared_ptr<TokenChain> chain;
};

Request make_request(int64_t num_tokens, int32_t variant = 0, int64_t block_size = 4,
                     bool reads = true, bool writes = true, int64_t num_encoder_tokens = 0) {
  std::vector<int32_t> ids(static_cast<size_t>(num_tokens), variant);
  auto tokens = std::make_shared<TokenIds>();
  tokens->append(ids.data(), num_tokens);
  return {tokens, std::make_shared<TokenChain>(tokens, block_size, Hash{}, ExtraKeys(), reads,
                                               writes, num_encoder_tokens)};
}

ManagerOptions make_options(int64_t block_size, int64_t num_blocks, int64_t max_model_len) {
  ManagerOptions options{};
  options.groups = {{std::make_shared<kvcache::FullAttention>(), block_size}};
  options.num_blocks = num_blocks;
  options.max_model_len = max_model_len;
  return options;
}

StepPlan step_new(Manager* manager, const std::vector<NewRow>& rows, int64_t lookahead = 0) {
  StepRequest request;
  request.new_rows = rows;
  request.num_lookahead = lookahead;
  return manager->step(request);
}

// The digest of these tests: no libcrypto is needed, and a test may put a hook into it.
uint64_t mix(const uint8_t* data, size_t size) {
  uint64_t state = 0xCBF29CE484222325ull;
  for (size_t i = 0; i < size; ++i) state = (state ^ data[i]) * 0x100000001B3ull;
  return state;
}

void use_digest(const std::function<void()>& hook) {
  kvcache::set_sha256_fallback(
      [hook](const uint8_t* data, size_t size, uint8_t* out) {
        if (hook) hook();
        for (int i = 0; i < 4; ++i) {
          const uint64_t word = mix(data, size) * (2 * i + 1);
          std::memcpy(out + 8 * i, &word, 8);
        }
      },
      /*force=*/true);
}

// One manager, its requests and the tables that a worker would have.
class Driver {
 public:
  explicit Driver(uint64_t seed) : random_(seed), options_(draw_options()), manager_(options_) {
    use_digest([this] {
      if (raise_ && below(4) == 0) throw std::runtime_error("interrupted");
    });
  }
  ~Driver() { use_digest({}); }

  void run(int num_operations) {
    for (int i = 0; i < num_operations; ++i) {
      raise_ = below(3) == 0;
      try {
        operate();
      } catch (const std::runtime_error& error) {
        CHECK_EQ(std::string(error.what()), "interrupted");
      }
      raise_ = false;
      check();
    }
  }

 private:
  struct Admitted {
    Request request;
    bool by_step;
  };
  using Table = std::vector<std::vector<BlockId>>;  // per group

  int32_t below(int64_t n) { return static_cast<int32_t>(random_() % static_cast<uint64_t>(n)); }

  ManagerOptions draw_options() {
    const auto full = std::make_shared<kvcache::FullAttention>();
    const auto window = std::make_shared<kvcache::SlidingWindow>(6);
    const auto chunked = std::make_shared<kvcache::ChunkedLocal>(10);
    const auto state = std::make_shared<kvcache::RecurrentState>();
    const auto cross = std::make_shared<kvcache::CrossAttention>();
    ManagerOptions options{};
    switch (below(6)) {
      case 0:
        options.groups = {{full, 4}};
        break;
      case 1:
        options.groups = {{full, 4}, {window, 4}};
        break;
      case 2:
        options.groups = {{window, 2}, {full, 4}, {chunked, 4}};
        break;
      case 3:
        options.groups = {{full, 4}, {state, 4}};
        has_state_ = true;
        break;
      case 4:
        options.groups = {{full, 8}, {window, 4}};
        options.hash_block_size = 2;
        break;
      default:
        options.groups = {{full, 4}, {cross, 2}};
        has_encoder_ = true;
    }
    options.num_blocks = 3 + below(40) * static_cast<int64_t>(options.groups.size());
    options.max_model_len = 1 + below(100);
    options.enable_caching = below(8) != 0;
    options.num_preallocate_tokens = below(12);
    options.max_num_reqs = below(6);
    options.watermark_blocks = below(3) == 0 ? below(4) : 0;
    options.groups[0].drafts =
        options.groups[0].kind->pages() == AttentionKind::Pages::kTokens && below(4) == 0;
    auto& last = options.groups.back();
    last.is_cached = last.kind->pages() == AttentionKind::Pages::kState || below(5) != 0;
    options.fence_frees = below(4) == 0;
    options.record_events = below(2) == 0;
    options.track_residency = below(2) == 0;
    options.stats_window = 7;
    const std::vector<std::string> policies = kvcache::eviction_names();
    options.eviction.policy = policies[below(policies.size())];
    if (below(2) == 0) {
      options.num_host_blocks = 2 + below(60);
      const std::vector<std::string> for_host = kvcache::host_eviction_names();
      options.host_eviction.policy = for_host[below(for_host.size())];
      options.host_write = static_cast<kvcache::HostWrite>(below(3));
      options.num_hits_to_write = 1 + below(2);
    }
    return options;
  }

  Request new_request() {
    if (!waiting_.empty() && below(3) == 0) {
      Request request = waiting_.back();
      waiting_.pop_back();
      if (request.tokens->size() <= options_.max_model_len) return request;
    }
    const bool has_encoder = has_encoder_ && below(2) == 0;
    return make_request(1 + below(options_.max_model_len), below(2), manager_.hash_block_size(),
                        !has_encoder && below(6) != 0, !has_encoder && below(6) != 0,
                        has_encoder ? 5 : 0);
  }

  int64_t room(int32_t row) const {
    return options_.max_model_len - manager_.num_computed_tokens(row);
  }

  void operate() {
    const auto row = rows_.empty() ? rows_.end() : std::next(rows_.begin(), below(rows_.size()));
    switch (below(17)) {
      case 0:
      case 1:
      case 2:
        step();
        break;
      case 3:
        if (!has_state_) allocate();
        break;
      case 4:
        if (row == rows_.end() || row->second.by_step || room(row->first) == 0 ||
            manager_.is_on_host(row->first)) {
          break;
        }
        manager_.append(row->first, 1 + below(room(row->first)), below(20));
        break;
      case 5: {
        if (row == rows_.end()) break;
        const int64_t most = options_.max_model_len + 1 - row->second.request.tokens->size();
        const int64_t n = std::clamp<int64_t>(most, 0, below(9));
        const std::vector<int32_t> ids(static_cast<size_t>(n), below(3));
        row->second.request.tokens->append(ids.data(), static_cast<int64_t>(ids.size()));
        break;
      }
      case 6: {
        if (below(3) == 0) {
          manager_.start_epoch();
          break;
        }
        const BlockId id = 1 + below(options_.num_blocks - 1);
        manager_.invalidate(&id, 1);
        break;
      }
      case 7: {
        const int64_t num_steps = manager_.num_steps();
        if (num_steps == 0) break;
        const int64_t id = std::max<int64_t>(num_steps - 1 - below(3), 0);
        if (below(2) == 0) {
          manager_.report(id, /*completed=*/true, {}, {});
          break;
        }
        try {
          manager_.abort(id);
        } catch (const std::invalid_argument& error) {  // done, or aborted before
          CHECK(std::string(error.what()).find("in flight") != std::string::npos);
        }
        break;
      }
      case 8:
        ask();
        break;
      case 9:
        wrong();
        break;
      case 13:
        if (row == rows_.end() || manager_.is_on_host(row->first)) break;
        fork(row->first, row->second);
        break;
      case 14:
        if (row == rows_.end() || row->second.by_step || manager_.host() == nullptr) break;
        if (manager_.is_on_host(row->first)) {
          manager_.swap_in({row->first});
        } else {
          manager_.swap_out({row->first});
        }
        break;
      case 15: {
        const std::string session = below(2) == 0 ? "one" : "two";
        if (below(2) == 0 || waiting_.empty()) {
          manager_.unpin(session);
        } else {
          manager_.pin(session, *waiting_.back().chain);
        }
        break;
      }
      case 10:
        if (row == rows_.end() || has_state_) break;
        try {
          manager_.reject(row->first, below(4));
        } catch (const std::invalid_argument& error) {
          CHECK(std::string(error.what()).find("expected at most ") != std::string::npos);
        }
        break;
      default:
        if (row == rows_.end()) {
          if (!options_.fence_frees && manager_.num_loading() == 0) {
            CHECK(manager_.reset_prefix_cache());
          }
          break;
        }
        manager_.free(row->first);
        waiting_.push_back(row->second.request);
        rows_.erase(row);
    }
  }

  // One of two ways that the row's tokens may go on, if they are known.
  void fork(int32_t row, const Admitted& parent) {
    const int64_t num_computed = manager_.num_computed_tokens(row);
    const TokenChain& chain = *parent.request.chain;
    if (chain.num_tokens() < num_computed || num_computed == 0) return;
    Request child;
    child.tokens = std::make_shared<TokenIds>();
    child.tokens->append(chain.tokens(), num_computed);
    child.chain = std::make_shared<TokenChain>(child.tokens, manager_.hash_block_size(), Hash{},
                                               ExtraKeys(), chain.read_cache(), chain.write_cache(),
                                               chain.num_encoder_tokens());
    const Slots slots = manager_.fork(row, child.chain);
    if (slots.status == Status::kServed) rows_[slots.row] = {child, parent.by_step};
  }

  void step() {
    std::vector<int32_t> asked, counts, ids, num_ids, ahead, leaving;
    for (const auto& [id, state] : rows_) {
      if (!state.by_step) continue;
      if (manager_.host() != nullptr && !manager_.is_on_host(id) && below(6) == 0) {
        leaving.push_back(id);
        continue;
      }
      if (room(id) == 0 || below(2) == 0) continue;
      asked.push_back(id);
      counts.push_back(1 + below(room(id)));
      // At most one more than max_model_len: the last that was sampled.
      const int64_t most = options_.max_model_len + 1 - state.request.tokens->size();
      num_ids.push_back(static_cast<int32_t>(std::clamp<int64_t>(most, 0, below(3))));
      ids.insert(ids.end(), static_cast<size_t>(num_ids.back()), below(2));
    }
    std::vector<Request> requests;
    StepRequest request;
    for (int n = below(3); n > 0; --n) {
      requests.push_back(new_request());
      request.new_rows.push_back({requests.back().chain, 1 + below(100), below(3) * 10});
    }
    request.swap_out_rows = leaving.data();
    request.num_swap_out_rows = static_cast<int64_t>(leaving.size());
    for (size_t i = 0; i < asked.size() + requests.size(); ++i) ahead.push_back(below(12));
    request.rows = asked.data();
    request.num_tokens = counts.data();
    request.num_rows = static_cast<int64_t>(asked.size());
    request.token_ids = ids.data();
    request.num_ids = static_cast<int64_t>(ids.size());
    request.num_token_ids = num_ids.data();
    request.lookahead = ahead.data();
    std::vector<int64_t> sizes;
    for (int32_t id : asked) sizes.push_back(rows_[id].request.tokens->size());
    StepPlan plan;
    try {
      plan = manager_.step(request);
    } catch (...) {
      for (size_t i = 0; i < asked.size(); ++i) {
        CHECK_EQ(rows_[asked[i]].request.tokens->size(), sizes[i]);
      }
      throw;
    }
    apply(plan);
    for (size_t k = 0; k < requests.size(); ++k) {
      const int32_t id = plan.rows[asked.size() + leaving.size() + k];
      if (id >= 0) rows_[id] = {requests[k], true};
    }
  }

  // Questions, which change nothing.
  void ask() {
    const int64_t num_free = manager_.pool().num_free();
    const Request request = new_request();
    const Status status = manager_.would_fit(asking(request.chain, options_.max_model_len), false);
    StepRequest alone;
    alone.new_rows = {{request.chain, options_.max_model_len}};
    waiting_.push_back(request);
    if (!rows_.empty() && !manager_.is_on_host(rows_.begin()->first)) {
      manager_.num_common_prefix_blocks(rows_.begin()->first, 1 + below(3), 0);
    }
    manager_.set_now(++now_ms_);
    CHECK_EQ(manager_.pool().num_free(), num_free);
    if (status != Status::kServed) return;
    raise_ = false;
    const StepPlan& plan = manager_.step(alone);
    CHECK_EQ(plan.status[0], static_cast<uint8_t>(Status::kServed));
    apply(plan);
    waiting_.pop_back();
    rows_[plan.rows[0]] = {request, true};
  }

  // Calls that are refused, whatever the state.
  void wrong() {
    StepRequest request;
    const int32_t rows[] = {1000, -1}, counts[] = {1, 1}, ids[] = {5, -5};
    request.rows = rows;
    request.num_tokens = counts;
    request.num_rows = 1;
    CHECK_THROWS(manager_.step(request), "row 1000 is not in use");
    request.num_rows = 0;
    request.token_ids = ids;
    request.num_ids = 1;
    CHECK_THROWS(manager_.step(request), "token_ids has 1 entries: expected 0");
    request.num_ids = 0;
    request.num_reserved_blocks = -1;
    CHECK_THROWS(manager_.step(request), "num_reserved_blocks is -1");
    const BlockId beyond = static_cast<BlockId>(options_.num_blocks);
    CHECK_THROWS(manager_.invalidate(&beyond, 1), "expected 1 to ");
    CHECK_THROWS(manager_.report(manager_.num_steps(), true, {}, {}), "step_id is ");
    CHECK_THROWS(manager_.abort(manager_.num_steps()), "step_id is ");
    CHECK_THROWS(manager_.free(-1), "row -1 is not in use");
    CHECK_THROWS(manager_.append(1000, 1, 0), "row 1000 is not in use");
    CHECK_THROWS(manager_.num_common_prefix_blocks(1000, 1, 0), "row 1000 is not in use");
    CHECK_THROWS(manager_.blocks(1000, 0), "row 1000 is not in use");
    const Request mine = make_request(1, 0, manager_.hash_block_size());
    CHECK_THROWS(manager_.allocate({mine.chain, 0}, {}, 0), "num_tokens is 0");
    if (!has_state_) CHECK_THROWS(manager_.allocate({mine.chain, 1}, {}, 0), "has 0 groups");
    const Request other = make_request(1, 0, manager_.hash_block_size() + 1);
    CHECK_THROWS(manager_.would_fit(asking(other.chain, 1), false),
                 "came to a manager with block_size");
    if (rows_.empty() || !rows_.begin()->second.by_step) return;
    const int32_t row = rows_.begin()->first;
    if (room(row) == 0) return;
    const int32_t twice[] = {row, row};
    request = {};
    request.rows = twice;
    request.num_tokens = counts;
    request.num_rows = 2;
    CHECK_THROWS(manager_.step(request), "twice");
    request.num_rows = 1;
    request.token_ids = ids + 1;
    request.num_ids = 1;
    if (rows_.begin()->second.request.tokens->size() <= options_.max_model_len) {
      CHECK_THROWS(manager_.step(request), "token_ids[0] is -5");
    }
  }

  void apply(const StepPlan& plan) {
    const size_t num_groups = options_.groups.size();
    for (int32_t id : plan.clear_rows) tables_[id].assign(num_groups, {});
    for (size_t g = 0; g < num_groups; ++g) {
      const StepPlan::Group& group = plan.groups[g];
      for (size_t k = 0; k < plan.append_rows.size(); ++k) {
        std::vector<BlockId>& table = tables_[plan.append_rows[k]][g];
        table.insert(table.end(), group.append_ids.begin() + group.append_splits[k],
                     group.append_ids.begin() + group.append_splits[k + 1]);
      }
      for (size_t k = 0; k < group.replace.size(); k += 3) {
        tables_[group.replace[k]][g].at(static_cast<size_t>(group.replace[k + 1])) =
            group.replace[k + 2];
      }
    }
  }

  void allocate() {
    const Request request = new_request();
    kvcache::PrefixHit hit;
    hit.blocks.resize(options_.groups.size());
    if (request.chain->read_cache()) hit = manager_.lookup(*request.chain);
    const int64_t most = options_.max_model_len - hit.num_tokens;
    const Slots slots = manager_.allocate({request.chain, 1 + below(most)}, hit.blocks, below(20));
    if (slots.status == Status::kServed) rows_[slots.row] = {request, false};
  }

  void check() {
    CHECK_EQ(manager_.num_rows(), rows_.size());
    for (const auto& [id, state] : rows_) {
      // The next plan or a later one has the others.
      if (!state.by_step || manager_.must_resend(id) || manager_.is_on_host(id)) continue;
      for (size_t g = 0; g < options_.groups.size(); ++g) {
        CHECK(tables_[id][g] == manager_.blocks(id, static_cast<int64_t>(g)));
      }
    }
    manager_.check_invariants();
    if (below(5) == 0) manager_.drain_events();
  }

  std::mt19937_64 random_;
  bool has_state_ = false, has_encoder_ = false;
  ManagerOptions options_;
  Manager manager_;
  std::map<int32_t, Admitted> rows_;
  std::map<int32_t, Table> tables_;
  std::vector<Request> waiting_;
  bool raise_ = false;
  int64_t now_ms_ = 1'000'000;
};

TEST(random_calls_of_both_drivers_keep_tables_and_invariants) {
  for (uint64_t seed = 0; seed < 400; ++seed) {
    try {
      Driver(seed).run(500);
    } catch (const std::exception& error) {
      kvcache::test::fail(__FILE__, __LINE__, "seed " + std::to_string(seed) + ": " + error.what());
    }
  }
  use_digest({});
}

TEST(sizes_beyond_32_bits_are_refused_and_the_largest_do_not_overflow) {
  use_digest({});
  constexpr int64_t kLargest = std::numeric_limits<int32_t>::max();
  constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
  for (int64_t size : {kLargest + 1, kHuge, -kHuge}) {
    const auto refused = [&](int64_t ManagerOptions::* field, const char* message) {
      ManagerOptions options = make_options(4, 9, 9);
      options.*field = size;
      CHECK_THROWS(Manager(options), message);
    };
    CHECK_THROWS(Manager(make_options(size, 9, 9)), "block_size is ");
    refused(&ManagerOptions::num_blocks, "num_gpu_blocks is ");
    refused(&ManagerOptions::max_model_len, "max_model_len is ");
    refused(&ManagerOptions::num_preallocate_tokens, "num_preallocate_tokens is ");
    refused(&ManagerOptions::max_num_reqs, "max_num_reqs is ");
    refused(&ManagerOptions::watermark_blocks, "watermark_blocks is ");
    refused(&ManagerOptions::hash_block_size, "hash_block_size is ");
    refused(&ManagerOptions::stats_window, "stats_window is ");
  }
  ManagerOptions largest = make_options(4, 9, kLargest);
  largest.num_preallocate_tokens = kLargest;
  Manager manager(largest);
  const Request request = make_request(10);
  for (int64_t size : {kLargest + 1, kHuge, -kHuge}) {
    CHECK_THROWS(step_new(&manager, {{request.chain, size}}), "new_num_tokens is ");
    CHECK_THROWS(step_new(&manager, {{request.chain, 1}}, size), "num_lookahead_tokens is ");
    CHECK_THROWS(manager.allocate({request.chain, size}, {{}}, 0), "num_tokens is ");
    CHECK_THROWS(manager.append(0, size, 0), "row 0 is not in use");
  }
  CHECK_EQ(step_new(&manager, {{request.chain, kLargest}}, 20).groups[0].append_ids.size(), 8);
  const int32_t row = 0;
  const auto most = static_cast<int32_t>(kLargest - 10);
  StepRequest more;
  more.rows = &row;
  more.num_tokens = &most;
  more.num_rows = 1;
  more.num_lookahead = kLargest;
  CHECK_EQ(manager.step(more).status[0], static_cast<uint8_t>(Status::kNever));
  manager.check_invariants();
}

TEST(a_manager_belongs_to_the_thread_that_first_used_it) {
  Manager manager(make_options(4, 9, 100));
  std::thread([&] { manager.check_caller(); }).join();
  CHECK_THROWS(manager.reset_prefix_cache(), "but the manager belongs to thread ");
  CHECK_THROWS(step_new(&manager, {}), "called from thread ");
}

TEST(calls_from_within_the_digest_are_refused) {
  Manager manager(make_options(4, 9, 100));
  const Request request = make_request(10);
  int num_calls = 0;
  use_digest([&] {
    ++num_calls;
    const int32_t more = 1;
    CHECK_THROWS(manager.free(0), "has not returned");
    CHECK_THROWS(request.tokens->append(&more, 1), "token_ids came while");
    CHECK_THROWS(request.chain->hashes(), "has not returned");
  });
  step_new(&manager, {{request.chain, 100}});
  CHECK_EQ(num_calls, 2);
  use_digest({});
  manager.free(0);
  manager.check_invariants();
}

// Records its notifications; evicts in the order of release.
class Recorder : public kvcache::EvictionPolicy {
 public:
  explicit Recorder(std::vector<std::string>* log) : log_(log) {}
  void insert(BlockId id) override { candidates_.push_back(id); }
  void remove(BlockId id) override {
    candidates_.erase(std::find(candidates_.begin(), candidates_.end(), id));
  }
  BlockId victim() override {
    return candidates_.empty() ? kvcache::kNullBlock : candidates_.front();
  }
  void on_hit(const BlockId* ids, int64_t n) override { write("hit", ids, n); }
  void on_release(const BlockId* ids, const int64_t* prefix_tokens, int64_t n,
                  const kvcache::ReleaseFeatures& f) override {
    write("release", ids, n);
    std::ostringstream text;
    text << "  tokens";
    for (int64_t i = 0; i < n; ++i) text << " " << prefix_tokens[i];
    text << ", turn " << f.turn << ", prefix " << f.num_prefix_tokens << ", new "
         << f.num_new_blocks << ", output " << f.num_output_tokens << ", class " << f.request_class
         << ", time " << f.logical_time << " " << f.wall_ms << ", of " << f.tokens_per_block
         << ", retention " << f.num_retention << (f.is_swapped_out ? ", swapped" : "");
    log_->push_back(text.str());
  }
  kvcache::Access begin_access(double now) override { return {now, 1}; }
  void on_access(const BlockId* ids, int64_t n, const kvcache::Access&) override {
    write("access", ids, n);
  }
  void on_idle(BlockId id) override { write("idle", &id, 1); }

 private:
  void write(const char* what, const BlockId* ids, int64_t n) {
    std::ostringstream text;
    text << what;
    for (int64_t i = 0; i < n; ++i) text << " " << ids[i];
    log_->push_back(text.str());
  }
  std::vector<std::string>* log_;
  std::vector<BlockId> candidates_;
};

StepPlan serve(Manager* manager, int32_t row, int32_t num_tokens, int32_t token) {
  StepRequest request;
  request.rows = &row;
  request.num_tokens = &num_tokens;
  request.num_rows = 1;
  request.token_ids = &token;
  request.num_ids = 1;
  return manager->step(request);
}

TEST(a_policy_is_told_what_requests_do) {
  use_digest({});
  std::vector<std::string> log;
  ManagerOptions options = make_options(4, 9, 100);
  options.eviction.make = [&](int64_t) { return std::make_unique<Recorder>(&log); };
  options.num_host_blocks = 9;
  options.fence_frees = true;
  Manager manager(options);
  manager.set_now(7);
  const auto notified = [&](const std::vector<std::string>& wanted) {
    const auto joined = [](const std::vector<std::string>& lines) {
      std::string all;
      for (const std::string& line : lines) all += line + "\n";
      return all;
    };
    CHECK_EQ(joined(log), joined(wanted));
    log.clear();
  };

  const Request first = make_request(10);
  step_new(&manager, {{first.chain, 6}}, /*lookahead=*/4);  // a chunk of 6, and a block for drafts
  serve(&manager, 0, 4, 0);                                 // the rest, and one token comes
  notified({});
  kvcache::ReleaseFeatures features;
  features.turn = 3;
  features.request_class = 5;
  const kvcache::Retention retention[] = {{0, 4, 90, -1}};
  features.retention = retention;
  features.num_retention = 1;
  manager.free(0, features);
  notified(
      {"release 3 2 1",
       "  tokens 12 8 4, turn 3, prefix 0, new 3, output 1, class 5, time 1 7, of 4, retention 1"});
  manager.report(1, /*completed=*/true, {}, {});  // behind the fence; the last one is not cached
  notified({"idle 2", "idle 1"});

  const Request second = make_request(9);
  step_new(&manager, {{second.chain, 100}});
  notified({"hit 1 2"});
  manager.access(0, 11.5);
  notified({});  // its blocks are said to have had it when it releases them
  const Request child = make_request(9);
  CHECK(manager.fork(0, child.chain).status == Status::kServed);
  notified({});  // a fork is no hit
  const int32_t row = 1;
  StepRequest leave;
  leave.swap_out_rows = &row;
  leave.num_swap_out_rows = 1;
  manager.step(leave);
  notified(
      {"release 4 2 1",
       "  tokens 12 8 4, turn 0, prefix 9, new 0, output 0, class -1, time 2 7, of 4, retention 0"
       ", swapped"});
  manager.free(1);  // from the host: no block of the device goes
  notified({});
  manager.free(0);
  notified(
      {"release 4 2 1",
       "  tokens 12 8 4, turn 0, prefix 8, new 1, output 0, class -1, time 3 7, of 4, retention "
       "0",
       "access 4 2 1"});
  manager.report(3, /*completed=*/true, {}, {});
  notified({"idle 2", "idle 1"});
  manager.check_invariants();
}

TEST(a_policy_is_told_of_hits_inside_blocks_and_of_each_group) {
  use_digest({});
  std::vector<std::string> log;
  ManagerOptions options = make_options(8, 20, 100);
  options.groups.push_back({std::make_shared<kvcache::SlidingWindow>(9), 4});
  options.hash_block_size = 2;
  options.eviction.make = [&](int64_t) { return std::make_unique<Recorder>(&log); };
  Manager manager(options);
  const Request first = make_request(14, 0, 2);
  step_new(&manager, {{first.chain, 100}});
  manager.free(0);
  log.clear();
  const Request second = make_request(13, 0, 2);
  step_new(&manager, {{second.chain, 100}});  // 12 tokens: a block and half of one; the window's
  // The block whose half was copied is idle again.
  CHECK(log == std::vector<std::string>({"hit 2", "hit 1", "hit 4 5", "idle 2"}));
  manager.free(0);
  manager.check_invariants();
}

}  // namespace

TEST_MAIN()
