// SPDX-License-Identifier: Apache-2.0
// Tests what the pool tells its listeners, and what they may do. `tests/allocator` compares the
// pool with a model (test_eviction.py).
#include "core/pool/block_pool.h"

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/eviction/registry.h"
#include "tests/check.h"
#include "tests/core_fixtures.h"
#include "tests/recorder.h"

using namespace kvcache;
using namespace kvcache::test;

namespace {

void publish(BlockPool* pool, const BlockId* ids, const Hash* hashes, int64_t n,
             uint8_t group = 0) {
  const Hash no_parent{};
  pool->publish(ids, Content{hashes, &no_parent}, n, group);
}

TEST(a_pool_is_broken_by_lack_of_memory_if_a_listener_runs_out_of_it) {
  struct Greedy : BlockListener {
    void on_forget(const Forgotten&) override { throw std::bad_alloc(); }
  } greedy;
  BlockPool pool(3);
  pool.add_listener(&greedy);
  BlockId id;
  CHECK(pool.allocate(1, &id));
  try {
    pool.release(&id, 1);
  } catch (const std::bad_alloc&) {
  }
  CHECK_THROWS(pool.allocate(1, &id), "the pool is broken: memory ran out within `release`");
}

// Reads the pool while blocks are forgotten.
struct ForgetReader : BlockListener {
  const BlockPool* pool = nullptr;
  std::vector<BlockId> last, found;  // blocks whose hash is gone; what their partial hash finds
  std::vector<uint64_t> variants;
  void on_forget(const Forgotten& forgotten) override {
    if (forgotten.why == Forgotten::Why::kFreed) return;
    for (int64_t i = 0; i < forgotten.n; ++i) {
      const BlockId id = forgotten.ids[i];
      CHECK(pool->hash_of(id) == nullptr);  // the block is no longer found
      if (forgotten.hash(i) != nullptr) {
        CHECK(pool->copied(id, /*is_chain=*/false).hash == *forgotten.hash(i));
      }
      if (forgotten.is_last(i)) last.push_back(id);
      found.push_back(pool->find_partial(hash_of(100 + id), forgotten.group(0)));
      variants.push_back(pool->variant_of(id));
    }
  }
};

TEST(hashes_are_removed_before_listeners_are_notified) {
  for (const char* policy : {"lru", "priority"}) {
    BlockPool pool(5, make_eviction_policy(policy, {}, 5));
    ForgetReader reader;
    reader.pool = &pool;
    pool.add_listener(&reader);
    BlockId ids[4];
    CHECK(pool.allocate(4, ids));
    for (int i : {0, 1}) pool.publish_partial(ids[i], hash_of(100 + ids[i]), hash_of(1), 0);
    const Hash hash = hash_of(2), parent = hash_of(1), other = hash_of(3);
    const uint64_t variant = 7;
    Content content{&hash, &parent};
    content.variants = &variant;
    pool.publish(ids, content, 1, 0);
    publish(&pool, &ids[2], &other, 1);
    publish(&pool, &ids[3], &other, 1);  // a duplicate, which is found when the first is gone
    pool.evict(ids, 4);
    CHECK(reader.found == std::vector<BlockId>({0, 0, 0, 0}));
    CHECK(reader.last == std::vector<BlockId>({ids[0], ids[3]}));
    CHECK(reader.variants == std::vector<uint64_t>({7, 0, 0, 0}));  // copies of blocks need them
    CHECK_EQ(pool.variant_of(ids[0]), 0);
  }
}

TEST(a_rejected_publish_changes_nothing) {
  BlockPool pool(4);
  BlockId ids[3];
  CHECK(pool.allocate(3, ids));
  pool.release(&ids[2], 1);
  const Hash hashes[] = {hash_of(1), hash_of(2), hash_of(3)};
  CHECK_THROWS(publish(&pool, ids, hashes, 3), "which is free");
  CHECK_THROWS(pool.publish_partial(ids[2], hashes[2], hashes[2], 1), "which is free");
  const BlockId twice[] = {ids[0], ids[0]};
  CHECK_THROWS(publish(&pool, twice, hashes, 2), "already published");
  const BlockId beyond[] = {ids[0], 4};
  CHECK_THROWS(publish(&pool, beyond, hashes, 2), "expected 1 to 3");
  CHECK_EQ(pool.num_cached(), 0);
  pool.publish_partial(ids[1], hashes[2], hashes[2], 1);
  CHECK_THROWS(publish(&pool, ids, hashes, 2), "block 2, which is published for another group");
  CHECK_EQ(pool.find(hashes[0], 0), 0);
  pool.evict(&ids[1], 1);
  publish(&pool, ids, hashes, 2);
  pool.check_invariants();
}

TEST(an_order_is_notified_of_all_changes_and_its_candidates_are_leaves) {
  std::vector<std::string> log;
  BlockPool pool(4, std::make_unique<Recorder>(&log));
  const auto notified = [&](const std::vector<std::string>& expected) {
    pool.check_invariants();
    const bool same = log == expected;
    if (!same) {
      for (const std::string& line : log) std::printf("  %s\n", line.c_str());
    }
    log.clear();
    return same;
  };
  CHECK(pool.order() != nullptr && pool.has_listeners());
  BlockId ids[3], one;
  CHECK(pool.allocate(3, ids));
  const Hash hashes[] = {hash_of(1), hash_of(2)};
  publish(&pool, ids, hashes, 2, 3);
  pool.publish_partial(ids[2], hash_of(8), hash_of(1), 3);
  CHECK(notified({"publish 1 3", "publish 2 3", "part 3 3"}));

  const int64_t prefix_tokens[] = {16, 32, 40};
  const Retention retention{1, 2, 3, 4};
  const ReleaseFeatures features{6, 7, 8, 10, 11, 16, &retention, 1};
  pool.notify(Released{{ids, 3}, {}, prefix_tokens, &features});
  pool.notify(Released{{ids, 2}, pool.begin_access(7.0)});
  pool.notify(Released{{ids, 3}});
  pool.release(ids, 3);  // block 1 has a child, block 3 belongs to no chain
  CHECK(notified({"release 1 2 3, tokens 16 32 40, prefix 6, new 7, output 8, time 10 11, of 16",
                  "retention 1 2 3 4", "access 1 2, time 7 1", "released 1 2 3", "idle 1", "idle 2",
                  "idle 3", "insert 2", "insert 3"}));

  pool.notify(Hit{{&ids[1], 1}, Hit::By::kRequest});
  pool.retain(&ids[1], 1);
  CHECK(notified({"hit 2", "remove 2"}));
  const BlockId twice[] = {ids[1], ids[1]};
  CHECK_THROWS(pool.release(twice, 2), "more often");
  CHECK(notified({}));
  pool.release(&ids[1], 1);
  CHECK(notified({"idle 2", "insert 2"}));

  CHECK(pool.allocate(1, &one));
  CHECK(notified({"remove 3", "forget 3 0 3 1"}));
  pool.release(&one, 1);
  CHECK(notified({"freed 3"}));
  CHECK(pool.allocate(1, &one));
  CHECK(notified({}));
  CHECK(pool.allocate(1, &one));
  CHECK(notified({"remove 2", "insert 1", "forget 2 1 3 1"}));
  pool.evict(&ids[0], 1);
  CHECK(notified({"remove 1", "forget 1 1 3 0"}));
  pool.publish_partial(ids[2], hash_of(8), hash_of(1), 3);
  CHECK(notified({"part 3 3"}));
  pool.clear();
  CHECK(notified({"reset 1", "forget 3 0 3 0"}));
}

TEST(a_block_that_is_its_own_parent_can_be_evicted) {
  std::vector<std::string> log;
  BlockPool pool(3, std::make_unique<Recorder>(&log));
  BlockId ids[2];
  CHECK(pool.allocate(2, ids));
  const Hash hash = hash_of(1);
  for (BlockId id : ids) pool.publish(&id, Content{&hash, &hash}, 1, 0);
  pool.release(ids, 2);
  pool.check_invariants();
  CHECK(pool.allocate(2, ids));
  CHECK_EQ(ids[0], 1);
  pool.check_invariants();
}

using Event = std::function<void(BlockPool*)>;

// A listener that calls a function at each event of one kind.
struct Disturber : BlockListener {
  explicit Disturber(std::function<void(const std::string&)> call) : call(std::move(call)) {}
  std::function<void(const std::string&)> call;

  void on_publish(const Published&) override { call("publish"); }
  void on_hit(const Hit&) override { call("hit"); }
  void on_release(const Released&) override { call("release"); }
  void on_idle(const Blocks&) override { call("idle"); }
  void on_forget(const Forgotten&) override { call("forget"); }
};

// Makes all kinds of changes, until one throws. Returns the message, and in `num_held` how many
// references the caller knows to hold, or could hold without knowing it.
std::string run_until_error(BlockPool* pool, int64_t* num_held) {
  const Hash hashes[] = {hash_of(1), hash_of(2)};
  BlockId ids[2], more[3];
  *num_held = 0;
  try {
    pool->allocate(2, ids);
    *num_held = 2;
    publish(pool, ids, hashes, 2);
    pool->publish_partial(ids[0], hash_of(7), hash_of(1), 0);
    pool->notify(Hit{{ids, 2}, Hit::By::kRequest});
    pool->notify(Released{{ids, 2}});
    *num_held = 0;
    pool->release(ids, 2);
    *num_held = 3;  // allocated, although the caller does not get them
    pool->allocate(3, more);
    *num_held = 2;
    pool->release(&more[2], 1);
    publish(pool, more, hashes, 2);
    pool->evict(more, 1);
    pool->clear();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

TEST(a_pool_is_whole_whatever_its_listeners_do) {
  const std::vector<std::string> events{"publish", "hit", "release", "idle", "forget"};
  for (const bool has_order : {false, true}) {
    for (const std::string& event : events) {
      // A listener that throws: the pool has made the whole change, and is broken for its manager.
      BlockPool pool(4, has_order ? make_eviction_policy("priority", {}, 4) : nullptr);
      std::vector<std::string> heard;
      Disturber throwing([&](const std::string& at) {
        if (at == event) throw std::runtime_error("listener failed at " + at);
      });
      Disturber other([&](const std::string& at) { heard.push_back(at); });
      pool.add_listener(&throwing);
      pool.add_listener(&other);
      int64_t num_held;
      CHECK_EQ(run_until_error(&pool, &num_held), "listener failed at " + event);
      CHECK(heard.back() == event);  // the other listeners were notified, too
      pool.check_invariants();
      CHECK_EQ(pool.num_total() - pool.num_free(), num_held);
      BlockId id;
      CHECK_THROWS(pool.allocate(0, &id), "the pool is broken: a listener failed within");

      // A listener that calls back: the call is rejected, and the change that it heard of is made.
      BlockPool own(4, has_order ? make_eviction_policy("priority", {}, 4) : nullptr);
      BlockPool second(9);
      int num_rejected = 0;
      BlockListener unheard;
      const std::vector<Hash> hashes{hash_of(5)};
      Disturber calling([&](const std::string& at) {
        if (at != event) return;
        BlockId taken;
        CHECK(second.allocate(1, &taken));  // other pools may be changed
        const std::vector<Event> calls = {
            [&](BlockPool* p) { p->allocate(0, &taken); },
            [&](BlockPool* p) { p->clear(); },
            [&](BlockPool* p) { p->retain(&taken, 0); },
            [&](BlockPool* p) { p->release(&taken, 0); },
            [&](BlockPool* p) { p->evict(&taken, 0); },
            [&](BlockPool* p) { p->pin(&taken, 0); },
            [&](BlockPool* p) { p->unpin(&taken, 1); },
            [&](BlockPool* p) { p->pin(&taken, 1); },
            [&](BlockPool* p) { p->add_listener(&unheard); },
            [&](BlockPool* p) { publish(p, &taken, hashes.data(), 1); }};
        for (const Event& each : calls) {
          CHECK_THROWS(each(&own), "was called by a listener of this pool");
          ++num_rejected;
        }
        CHECK(own.num_free() >= 0 && own.find(hash_of(9), 0) == 0);  // reading is allowed
      });
      own.add_listener(&calling);
      CHECK_EQ(run_until_error(&own, &num_held), "");
      own.check_invariants();
      CHECK(num_rejected > 0);
      CHECK_EQ(own.num_total() - own.num_free(), num_held);
    }
  }
}

}  // namespace

TEST_MAIN()
