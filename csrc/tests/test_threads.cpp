// SPDX-License-Identifier: Apache-2.0
// Uses ThreadSanitizer (`make sanitize-thread`) to test the state that managers in several threads
// share.
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "core/groups/kinds.h"
#include "core/hashing/block_hash.h"
#include "core/hashing/token_chain.h"
#include "core/manager/manager.h"
#include "tests/check.h"
#include "worker/host_tables.h"

using namespace kvcache;
namespace {

constexpr int kThreads = 4, kRounds = 50;

void in_threads(const std::function<void(int)>& work) {
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) threads.emplace_back(work, i);
  for (std::thread& each : threads) each.join();
}

std::shared_ptr<TokenChain> chain_of(int64_t num_tokens, int32_t token) {
  auto ids = std::make_shared<TokenIds>();
  const std::vector<int32_t> tokens(static_cast<size_t>(num_tokens), token);
  ids->append(tokens.data(), num_tokens);
  return std::make_shared<TokenChain>(ids, 4, Hash{}, ExtraKeys(), true, true);
}

ManagerOptions options() {
  ManagerOptions out{};
  out.groups = {{std::make_shared<FullAttention>(), 4}};
  out.num_blocks = 65;
  out.max_model_len = 100;
  return out;
}

TEST(managers_of_several_threads_share_no_mutable_state) {
  in_threads([](int thread) {
    Manager manager(options());
    for (int round = 0; round < kRounds; ++round) {
      StepRequest request;
      request.new_rows = {{chain_of(30, thread), 30}, {chain_of(20, round), 20}};
      const std::vector<int32_t> rows = manager.step(request).rows;
      manager.free(rows.data(), static_cast<int64_t>(rows.size()));
    }
    manager.check_invariants();
    CHECK_EQ(manager.reads().num_rows(), 0);
  });
}

TEST(blocks_are_hashed_by_several_threads_at_once) {
  std::vector<Hash> last(kThreads);
  in_threads([&](int thread) {
    const std::vector<int32_t> tokens(4000, 7);
    last[static_cast<size_t>(thread)] =
        hash_blocks(HashAlgorithm::kSha256Cbor, tokens.data(), tokens.size(), 16, Hash{}, {})
            .back();
  });
  for (const Hash& each : last) CHECK(each == last[0]);
}

// Like Python's GIL, the lock makes each call and its check of the calling thread one atomic
// operation.
TEST(a_manager_under_a_lock_rejects_all_threads_but_its_owner) {
  Manager manager(options());
  std::mutex lock;
  int num_served = 0, num_refused = 0;
  in_threads([&](int thread) {
    for (int round = 0; round < kRounds; ++round) {
      const std::lock_guard<std::mutex> held(lock);
      try {
        StepRequest request;
        request.new_rows = {{chain_of(5, thread), 5}};
        const int32_t row = manager.step(request).rows[0];
        manager.free(row);
        ++num_served;
      } catch (const std::runtime_error&) {
        ++num_refused;
      }
    }
  });
  CHECK_EQ(num_served, kRounds);
  CHECK_EQ(num_refused, (kThreads - 1) * kRounds);
}

TEST(tables_of_several_threads_share_no_state) {
  in_threads([](int thread) {
    std::vector<int32_t> arena(4 * 8 + 4);
    HostTables tables(arena.data(), 4, {{0, 8, 1, 100}}, /*track=*/true);
    for (int round = 0; round < kRounds; ++round) {
      const int32_t ids[2] = {thread, round};
      tables.append_row(0, round % 4, ids, 2, /*reset=*/true);
    }
    CHECK_EQ(arena[8], thread);
  });
}

}  // namespace

TEST_MAIN()
