// The manager under random calls of both faces: tables that follow the deltas, and the invariants.
// tests/test_manager.py compares every answer with a model; this one runs under the sanitizers.
#include "core/manager.h"

#include <algorithm>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "core/sha256.h"
#include "tests/check.h"

using kvcache::BlockId;
using kvcache::ExtraKeys;
using kvcache::Hash;
using kvcache::Manager;
using kvcache::ManagerOptions;
using kvcache::NewRow;
using kvcache::Slots;
using kvcache::Status;
using kvcache::StepDelta;
using kvcache::TokenChain;
using kvcache::TokenIds;

namespace {

struct Request {
  std::shared_ptr<TokenIds> tokens;
  std::shared_ptr<TokenChain> chain;
};

Request make_request(int64_t num_tokens, int32_t variant = 0, int64_t block_size = 4,
                     bool reads = true, bool writes = true) {
  std::vector<int32_t> ids(static_cast<size_t>(num_tokens), variant);
  auto tokens = std::make_shared<TokenIds>();
  tokens->append(ids.data(), num_tokens);
  return {tokens,
          std::make_shared<TokenChain>(tokens, block_size, Hash{}, ExtraKeys(), reads, writes)};
}

StepDelta step_new(Manager* manager, const std::vector<NewRow>& rows, int64_t lookahead = 0) {
  return manager->step(nullptr, nullptr, 0, rows, lookahead);
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

void run_random(uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto below = [&](int64_t n) {
    return static_cast<int32_t>(random() % static_cast<uint64_t>(n));
  };
  ManagerOptions options{4, 3 + below(40), 1 + below(100), below(8) != 0, below(12), below(6)};
  Manager manager(options);
  struct Admitted {
    Request request;
    bool by_step;
  };
  std::map<int32_t, Admitted> rows;
  std::map<int32_t, std::vector<BlockId>> tables;
  std::vector<Request> waiting;
  const auto new_request = [&] {
    if (!waiting.empty() && below(3) == 0) {
      Request request = waiting.back();
      waiting.pop_back();
      if (request.tokens->size() <= options.max_model_len) return request;
    }
    return make_request(1 + below(options.max_model_len), below(2), 4, below(6) != 0,
                        below(6) != 0);
  };
  const auto room = [&](int32_t row) {
    return options.max_model_len - manager.num_computed_tokens(row);
  };
  bool raise = false;
  use_digest([&] {
    if (raise && below(4) == 0) throw std::runtime_error("interrupted");
  });

  for (int i = 0; i < 400; ++i) {
    raise = below(3) == 0;
    const int64_t lookahead = below(4) == 0 ? below(20) : 0;
    const auto row = rows.empty() ? rows.end() : std::next(rows.begin(), below(rows.size()));
    try {
      switch (below(6)) {
        case 0:
        case 1: {
          std::vector<int32_t> asked, counts;
          for (const auto& [id, state] : rows) {
            if (!state.by_step || room(id) == 0 || below(2) == 0) continue;
            asked.push_back(id);
            counts.push_back(1 + below(room(id)));
          }
          std::vector<Request> requests;
          std::vector<NewRow> new_rows;
          for (int n = below(3); n > 0; --n) {
            requests.push_back(new_request());
            new_rows.push_back({requests.back().chain, 1 + below(100)});
          }
          const StepDelta delta = manager.step(
              asked.data(), counts.data(), static_cast<int64_t>(asked.size()), new_rows, lookahead);
          for (int32_t id : delta.clear_rows) tables[id].clear();
          for (size_t k = 0; k < delta.append_rows.size(); ++k) {
            std::vector<BlockId>& table = tables[delta.append_rows[k]];
            table.insert(table.end(), delta.append_ids.begin() + delta.append_splits[k],
                         delta.append_ids.begin() + delta.append_splits[k + 1]);
          }
          for (size_t k = 0; k < requests.size(); ++k) {
            const int32_t id = delta.rows[asked.size() + k];
            if (id >= 0) rows[id] = {requests[k], true};
          }
          break;
        }
        case 2: {
          const Request request = new_request();
          const std::vector<BlockId> hits =
              request.chain->read_cache() ? manager.lookup(*request.chain) : std::vector<BlockId>{};
          const auto num_hits = static_cast<int64_t>(hits.size());
          const Slots slots =
              manager.allocate(request.chain, 1 + below(options.max_model_len - 4 * num_hits),
                               hits.data(), num_hits, lookahead);
          if (slots.status == Status::kServed) rows[slots.row] = {request, false};
          break;
        }
        case 3:
          if (row == rows.end() || row->second.by_step || room(row->first) == 0) break;
          manager.append(row->first, 1 + below(room(row->first)), lookahead);
          break;
        case 4: {
          if (row == rows.end()) break;
          const std::vector<int32_t> ids(static_cast<size_t>(below(9)), below(3));
          row->second.request.tokens->append(ids.data(), static_cast<int64_t>(ids.size()));
          break;
        }
        default:
          if (row == rows.end()) {
            CHECK(manager.reset_prefix_cache());
            break;
          }
          manager.free(row->first);
          waiting.push_back(row->second.request);
          rows.erase(row);
      }
    } catch (const std::runtime_error& error) {
      CHECK_EQ(std::string(error.what()), "interrupted");
    }
    CHECK_EQ(manager.num_rows(), rows.size());
    for (const auto& [id, state] : rows) {
      if (state.by_step) CHECK(tables[id] == manager.blocks(id));
    }
    manager.check_invariants();
  }
}

TEST(random_calls_of_both_faces_keep_tables_and_invariants) {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    try {
      run_random(seed);
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
    CHECK_THROWS(Manager({size, 9, 9}), "block_size is ");
    CHECK_THROWS(Manager({4, size, 9}), "num_gpu_blocks is ");
    CHECK_THROWS(Manager({4, 9, size}), "max_model_len is ");
    CHECK_THROWS(Manager({4, 9, 9, true, size}), "num_preallocate_tokens is ");
    CHECK_THROWS(Manager({4, 9, 9, true, 0, size}), "max_num_reqs is ");
  }
  Manager manager({4, 9, kLargest, true, kLargest, 0});
  const Request request = make_request(10);
  for (int64_t size : {kLargest + 1, kHuge, -kHuge}) {
    CHECK_THROWS(step_new(&manager, {{request.chain, size}}), "new_num_tokens is ");
    CHECK_THROWS(step_new(&manager, {{request.chain, 1}}, size), "num_lookahead_tokens is ");
    CHECK_THROWS(manager.allocate(request.chain, size, nullptr, 0, 0), "num_tokens is ");
    CHECK_THROWS(manager.append(0, size, 0), "row 0 is not in use");
  }
  CHECK_EQ(step_new(&manager, {{request.chain, kLargest}}, 20).append_ids.size(), 8);
  const int32_t row = 0;
  const auto most = static_cast<int32_t>(kLargest - 10);
  CHECK_EQ(manager.step(&row, &most, 1, {}, kLargest).status[0],
           static_cast<uint8_t>(Status::kNever));
  manager.check_invariants();
}

TEST(a_manager_belongs_to_the_thread_that_first_used_it) {
  Manager manager({4, 9, 100});
  std::thread([&] { manager.check_caller(); }).join();
  CHECK_THROWS(manager.reset_prefix_cache(), "but the manager belongs to thread ");
  CHECK_THROWS(step_new(&manager, {}), "called from thread ");
}

TEST(calls_from_within_the_digest_are_refused) {
  Manager manager({4, 9, 100});
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

}  // namespace

TEST_MAIN()
