// SPDX-License-Identifier: Apache-2.0
// Makes random calls of both kinds (steps and individual requests) to a manager with mixed groups.
// Applies the plans to block tables, and checks the tables and the invariants.
#pragma once

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "core/eviction/registry.h"
#include "core/groups/kinds.h"
#include "core/hashing/long_work.h"
#include "core/manager/manager.h"
#include "tests/check.h"

namespace kvcache::test {

struct Request {
  std::shared_ptr<TokenIds> tokens;
  std::shared_ptr<TokenChain> chain;
};

inline Request make_request(int64_t num_tokens, int32_t variant = 0, int64_t block_size = 4,
                            bool reads = true, bool writes = true, int64_t num_encoder_tokens = 0) {
  std::vector<int32_t> ids(static_cast<size_t>(num_tokens), variant);
  auto tokens = std::make_shared<TokenIds>();
  tokens->append(ids.data(), num_tokens);
  return {tokens, std::make_shared<TokenChain>(tokens, block_size, Hash{}, ExtraKeys(), reads,
                                               writes, num_encoder_tokens)};
}

// While this object exists, calls `hook` after each hashed block.
class WhileHashing {
 public:
  explicit WhileHashing(std::function<void()> hook) {
    hook_ = std::move(hook);
    between_pieces = [](bool) { hook_(); };
    tokens_per_piece = 1;
  }
  ~WhileHashing() {
    between_pieces = nullptr;
    tokens_per_piece = before_;
  }
  WhileHashing(const WhileHashing&) = delete;

 private:
  static inline std::function<void()> hook_;
  int64_t before_ = tokens_per_piece;
};

// A manager, its requests, and the tables that a worker would have.
class ManagerDriver {
 public:
  explicit ManagerDriver(uint64_t seed)
      : random_(seed), options_(draw_options()), manager_(options_), hashing_([this] {
          if (raise_ && below(4) == 0) throw std::runtime_error("interrupted");
        }) {}

  // Tables and invariants are checked after one operation in `one_in`, and after the last.
  void run(int num_operations, int one_in = 1) {
    for (int i = 0; i < num_operations; ++i) {
      raise_ = below(3) == 0;
      try {
        operate();
      } catch (const std::runtime_error& error) {
        CHECK_EQ(std::string(error.what()), "interrupted");
      }
      raise_ = false;
      if (below(one_in) == 0) check();
      if (below(5) == 0) manager_.drain_events();
    }
    check();
  }

 private:
  struct Admitted {
    Request request;
    bool by_step;
  };
  using Table = std::vector<std::vector<BlockId>>;  // table of each group

  int32_t below(int64_t n) { return static_cast<int32_t>(random_() % static_cast<uint64_t>(n)); }

  ManagerOptions draw_options() {
    const auto full = std::make_shared<FullAttention>();
    const auto window = std::make_shared<SlidingWindow>(6);
    const auto chunked = std::make_shared<ChunkedLocal>(10);
    const auto state = std::make_shared<RecurrentState>();
    const auto cross = std::make_shared<CrossAttention>();
    ManagerOptions options{};
    const std::vector<std::vector<GroupOptions>> mixes = {{{full, 4}},
                                                          {{full, 4}, {window, 4}},
                                                          {{window, 2}, {full, 4}, {chunked, 4}},
                                                          {{full, 4}, {state, 4}},
                                                          {{full, 8}, {window, 4}},
                                                          {{full, 4}, {cross, 2}}};
    const int mix = below(6);
    options.groups = mixes[mix];
    has_state_ = mix == 3;
    if (mix == 4) options.hash_block_size = 2;
    has_encoder_ = mix == 5;
    options.num_blocks = 3 + below(40) * static_cast<int64_t>(options.groups.size());
    options.max_model_len = 1 + below(100);
    options.enable_caching = below(8) != 0;
    options.num_preallocate_tokens = below(12);
    options.max_num_reqs = below(6);
    options.watermark_blocks = below(3) == 0 ? below(4) : 0;
    options.groups[0].drafts = options.groups[0].kind->rules().traits.appends && below(4) == 0;
    auto& last = options.groups.back();
    last.is_cached = last.kind->rules().traits.updates_in_place || below(5) != 0;
    options.fence_frees = below(4) == 0;
    options.record_events = below(2) == 0;
    const std::vector<std::string> policies = eviction_names();
    options.eviction.policy = policies[below(policies.size())];
    if (below(2) == 0) {
      options.num_host_blocks = 2 + below(60);
      const std::vector<std::string> for_host = host_eviction_names();
      options.host_eviction.policy = for_host[below(for_host.size())];
      options.host_writes.is_through = below(2) == 0;
      if (options.host_eviction.policy == "learned") {
        options.eviction.policy = "learned";
        if (below(2) == 0) options.host_writes.min_gain = 0.1 * static_cast<double>(below(4));
      }
    }
    options.explain_misses = below(3);
    return options;
  }

  Request new_request() {
    if (!waiting_.empty() && below(3) == 0) {
      Request request = waiting_.back();
      waiting_.pop_back();
      if (request.tokens->size() <= options_.max_model_len) return request;
    }
    const bool has_encoder = has_encoder_ && below(2) == 0;
    return make_request(1 + below(options_.max_model_len), below(2),
                        manager_.reads().hash_block_size(), !has_encoder && below(6) != 0,
                        !has_encoder && below(6) != 0, has_encoder ? 5 : 0);
  }

  int64_t room(int32_t row) const {
    return options_.max_model_len - manager_.reads().row(row).num_computed;
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
            manager_.reads().row(row->first).is_on_host()) {
          break;
        }
        {
          (void)manager_.take_copies();  // discards the copies of an earlier admission
          const RowAsk ask{row->first, 1 + below(room(row->first)), below(20)};
          if (below(2) == 0) {
            manager_.extend(ask);
          } else {
            manager_.advance({ask});
          }
        }
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
        const int64_t num_steps = manager_.reads().steps().num_steps;
        if (num_steps == 0) break;
        const int64_t id = std::max<int64_t>(num_steps - 1 - below(3), 0);
        if (below(2) == 0) {
          manager_.report(id, /*completed=*/true, {}, {});
          break;
        }
        try {
          manager_.report(id, /*completed=*/false, {}, {});
        } catch (const std::invalid_argument& error) {  // the step is done or was already aborted
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
        if (row == rows_.end() || manager_.reads().row(row->first).is_on_host()) break;
        fork(row->first, row->second);
        break;
      case 14:
        if (row == rows_.end() || row->second.by_step || manager_.host() == nullptr) break;
        if (manager_.reads().row(row->first).is_on_host()) {
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
          if (!options_.fence_frees && manager_.reads().num_loading() == 0) {
            CHECK(manager_.reset_prefix_cache());
          }
          break;
        }
        manager_.free(row->first);
        waiting_.push_back(row->second.request);
        rows_.erase(row);
    }
  }

  // Forks the row if the tokens at all of its computed positions are known. The child has the same
  // tokens.
  void fork(int32_t row, const Admitted& parent) {
    const int64_t num_computed = manager_.reads().row(row).num_computed;
    const TokenChain& chain = *parent.request.chain;
    if (chain.num_tokens() < num_computed || num_computed == 0) return;
    Request child;
    child.tokens = std::make_shared<TokenIds>();
    child.tokens->append(chain.tokens(), num_computed);
    child.chain = std::make_shared<TokenChain>(child.tokens, manager_.reads().hash_block_size(),
                                               Hash{}, ExtraKeys(), chain.read_cache(),
                                               chain.write_cache(), chain.num_encoder_tokens());
    const Slots slots = manager_.fork(row, child.chain);
    if (slots.status == Status::kServed) rows_[slots.row] = {child, parent.by_step};
  }

  void step() {
    std::vector<int32_t> asked, counts, ids, num_ids, ahead, leaving;
    for (const auto& [id, state] : rows_) {
      if (!state.by_step) continue;
      if (manager_.host() != nullptr && !manager_.reads().row(id).is_on_host() && below(6) == 0) {
        leaving.push_back(id);
        continue;
      }
      if (room(id) == 0 || below(2) == 0) continue;
      asked.push_back(id);
      counts.push_back(1 + below(room(id)));
      // At most max_model_len + 1 tokens, because the last sampled token is not computed.
      const int64_t most = options_.max_model_len + 1 - state.request.tokens->size();
      num_ids.push_back(static_cast<int32_t>(std::clamp<int64_t>(most, 0, below(3))));
      ids.insert(ids.end(), static_cast<size_t>(num_ids.back()), below(2));
    }
    std::vector<Request> requests;
    StepRequest request;
    for (int n = below(3); n > 0; --n) {
      requests.push_back(new_request());
      request.new_rows.push_back({requests.back().chain, 1 + below(100), below(3) * 10});
      request.new_rows.back().num_lookahead = below(12);
    }
    request.swap_out_rows = leaving.data();
    request.num_swap_out_rows = static_cast<int64_t>(leaving.size());
    for (size_t i = 0; i < asked.size(); ++i) ahead.push_back(below(12));
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

  // Makes queries, which must not change anything.
  void ask() {
    const int64_t num_free = manager_.pool().num_free();
    const Request request = new_request();
    const Status status = manager_.would_fit({request.chain, options_.max_model_len}, false);
    StepRequest alone;
    alone.new_rows = {{request.chain, options_.max_model_len}};
    waiting_.push_back(request);
    if (!rows_.empty() && !manager_.reads().row(rows_.begin()->first).is_on_host()) {
      manager_.reads().num_common_prefix_blocks(rows_.begin()->first, 1 + below(3), 0);
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

  // Makes calls that are rejected in every state. `tests/hostile` makes more.
  void wrong() {
    const int32_t rows[] = {1000, -1}, counts[] = {1, 1}, ids[] = {5, -5};
    const auto step = [&](const int32_t* asked, int64_t num_rows, const int32_t* tokens) {
      StepRequest request;
      request.rows = asked;
      request.num_tokens = counts;
      request.num_rows = num_rows;
      request.token_ids = tokens;
      request.num_ids = tokens == nullptr ? 0 : 1;
      manager_.step(request);
    };
    CHECK_THROWS(step(rows, 1, nullptr), "row 1000 is not in use");
    CHECK_THROWS(step(rows, 0, ids), "token_ids has 1 entries: expected 0");
    const BlockId beyond = static_cast<BlockId>(options_.num_blocks);
    CHECK_THROWS(manager_.invalidate(&beyond, 1), "expected 1 to ");
    for (const bool completed : {true, false}) {
      const int64_t next = manager_.reads().steps().num_steps;
      CHECK_THROWS(manager_.report(next, completed, {}, {}), "step_id is ");
    }
    CHECK_THROWS(manager_.free(-1), "row -1 is not in use");
    (void)manager_.take_copies();
    CHECK_THROWS(manager_.advance({RowAsk{1000, 1}}), "row 1000 is not in use");
    const Request mine = make_request(1, 0, manager_.reads().hash_block_size());
    CHECK_THROWS(manager_.admit({mine.chain, 0}, {}), "num_tokens is 0");
    if (!has_state_) CHECK_THROWS(manager_.admit({mine.chain, 1}, {}), "has 0 groups");
    const Request other = make_request(1, 0, manager_.reads().hash_block_size() + 1);
    CHECK_THROWS(manager_.would_fit({other.chain, 1}, false),
                 "passed to a manager with block_size");
    NewRow greedy{mine.chain, 1};
    greedy.num_reserved_blocks = -1;
    CHECK_THROWS(manager_.would_fit(greedy, false), "num_reserved_blocks is -1");
    CHECK_THROWS(manager_.reads().num_common_prefix_blocks(1000, 1, 0), "row 1000 is not in use");
    CHECK_THROWS(manager_.reads().blocks(1000, 0), "row 1000 is not in use");
    if (rows_.empty() || !rows_.begin()->second.by_step) return;
    const int32_t row = rows_.begin()->first;
    if (room(row) == 0) return;
    const int32_t twice[] = {row, row};
    CHECK_THROWS(step(twice, 2, nullptr), "twice");
    CHECK_THROWS(manager_.free(twice, 2), "would be freed twice");
    if (rows_.begin()->second.request.tokens->size() <= options_.max_model_len) {
      CHECK_THROWS(step(twice, 1, ids + 1), "token_ids[0] is -5");
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
    PrefixHit hit;
    hit.blocks.resize(options_.groups.size());
    if (request.chain->read_cache()) hit = manager_.lookup(*request.chain);
    const int64_t most = options_.max_model_len - hit.num_tokens;
    NewRow asked{request.chain, 1 + below(most)};
    asked.num_lookahead = below(20);
    const Slots slots = manager_.admit(asked, hit.blocks);
    if (slots.status == Status::kServed) rows_[slots.row] = {request, false};
  }

  void check() {
    CHECK_EQ(manager_.reads().num_rows(), rows_.size());
    for (const auto& [id, state] : rows_) {
      // Skips rows whose tables are not sent by plans, or are sent only by a later plan.
      if (!state.by_step || manager_.reads().must_resend(id) ||
          manager_.reads().row(id).is_on_host())
        continue;
      for (size_t g = 0; g < options_.groups.size(); ++g) {
        CHECK(tables_[id][g] == manager_.reads().blocks(id, static_cast<int64_t>(g)));
      }
    }
    manager_.check_invariants();
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
  WhileHashing hashing_;
};

}  // namespace kvcache::test
