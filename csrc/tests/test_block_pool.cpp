// SPDX-License-Identifier: Apache-2.0
// Compares the block pool with a simple model of lists and maps.
#include "core/pool/block_pool.h"

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "core/eviction/registry.h"
#include "core/listeners/event_log.h"
#include "tests/check.h"
#include "tests/core_fixtures.h"

using kvcache::BlockId;
using kvcache::BlockPool;
using kvcache::Content;
using kvcache::EventLog;
using kvcache::Hash;
using kvcache::test::hash_of;

namespace {

void publish(BlockPool* pool, const BlockId* ids, const Hash* hashes, int64_t n,
             uint8_t group = 0) {
  const Hash no_parent{};
  pool->publish(ids, Content{hashes, &no_parent}, n, group);
}

void evict_derived(BlockPool* pool, BlockId id, bool is_uniform) {
  kvcache::InvalidChains invalid;
  pool->add_chains(&id, 1, &invalid);
  pool->evict_derived(invalid, is_uniform);
}

struct Model {
  explicit Model(int n) : refs(n, 0), content(n, -1), age(n, 0) {
    for (int id = 1; id < n; ++id) uncached.push_back(id);
  }
  std::vector<int> refs;
  std::vector<int64_t> content;  // number of the hash; -1: none
  std::vector<int64_t> age;      // time of publication
  std::deque<int> uncached, cached;
  int64_t clock = 0;

  int64_t num_free() const { return static_cast<int64_t>(uncached.size() + cached.size()); }

  std::vector<BlockId> allocate(int n) {
    std::vector<BlockId> out;
    for (int i = 0; i < n; ++i) {
      std::deque<int>& list = uncached.empty() ? cached : uncached;
      const int id = list.front();
      list.pop_front();
      content[id] = -1;
      refs[id] = 1;
      out.push_back(id);
    }
    return out;
  }
  void retain(int id) {
    if (refs[id]++ == 0) cached.erase(std::find(cached.begin(), cached.end(), id));
  }
  void release(int id) {
    if (--refs[id] == 0) (content[id] >= 0 ? cached : uncached).push_back(id);
  }
  void publish(int id, int64_t hash) {
    content[id] = hash;
    age[id] = clock++;
  }
  int lookup(int64_t hash) const {
    int best = -1;
    for (size_t id = 1; id < content.size(); ++id) {
      if (content[id] == hash && (best < 0 || age[id] < age[best])) best = static_cast<int>(id);
    }
    return best;
  }
};

void run_random(uint64_t seed, int num_blocks, int num_operations) {
  std::mt19937_64 random(seed);
  const auto below = [&](int64_t n) {
    return static_cast<int>(random() % static_cast<uint64_t>(n));
  };
  BlockPool pool(num_blocks);
  Model model(num_blocks);
  std::vector<BlockId> held;  // one entry per reference
  for (int step = 0; step < num_operations; ++step) {
    switch (below(6)) {
      case 0: {
        const int n = below(4);
        std::vector<BlockId> out(n);
        const bool served = pool.allocate(n, out.data());
        CHECK_EQ(served, n <= model.num_free());
        if (!served) break;
        CHECK(out == model.allocate(n));
        held.insert(held.end(), out.begin(), out.end());
        break;
      }
      case 1: {  // release a few references, in a random order
        std::vector<BlockId> ids;
        for (int n = below(4); n > 0 && !held.empty(); --n) {
          const int i = below(static_cast<int64_t>(held.size()));
          ids.push_back(held[i]);
          held.erase(held.begin() + i);
        }
        pool.release(ids.data(), static_cast<int64_t>(ids.size()));
        for (BlockId id : ids) model.release(id);
        break;
      }
      case 2: {  // publish a held block under one of a few hashes, so that duplicates are common
        if (held.empty()) break;
        const BlockId id = held[below(static_cast<int64_t>(held.size()))];
        const int64_t number = below(num_blocks / 2 + 1);
        const Hash hash = hash_of(static_cast<uint32_t>(number));
        if (model.content[id] >= 0) {
          CHECK_THROWS(publish(&pool, &id, &hash, 1), "already published");
        } else {
          publish(&pool, &id, &hash, 1);
          model.publish(id, number);
        }
        break;
      }
      case 3: {  // look up hashes and take the hit
        const int64_t number = below(num_blocks / 2 + 1);
        const Hash hash = hash_of(static_cast<uint32_t>(number));
        BlockId id = 0;
        pool.lookup(&hash, 1, 0, true, &id);
        CHECK_EQ(id, model.lookup(number));
        if (id < 0) break;
        pool.retain(&id, 1);
        model.retain(id);
        held.push_back(id);
        break;
      }
      case 4: {  // an invalid release changes nothing
        std::vector<BlockId> ids(held.begin(), held.end());
        ids.push_back(held.empty() ? 1 : held.front());
        for (BlockId id : held) ids.push_back(id);
        CHECK_THROWS(pool.release(ids.data(), static_cast<int64_t>(ids.size())), "more often");
        break;
      }
      default: {
        const BlockId id = 1 + below(num_blocks - 1);
        if (below(8) != 0) break;
        pool.evict(&id, 1);
        if (model.content[id] >= 0 && model.refs[id] == 0) {
          model.cached.erase(std::find(model.cached.begin(), model.cached.end(), id));
          model.uncached.push_back(id);
        }
        model.content[id] = -1;
      }
    }
    CHECK_EQ(pool.num_free(), model.num_free());
    if (step % 16 == 0) pool.check_invariants();
  }
}

TEST(the_pool_agrees_with_the_model_on_random_operations) {
  for (uint64_t seed = 0; seed < 40; ++seed) run_random(seed, 2 + static_cast<int>(seed) * 2, 3000);
}

TEST(a_failed_release_restores_the_eviction_order) {
  BlockPool pool(5);
  BlockId ids[4];
  CHECK(pool.allocate(4, ids));
  pool.release(ids + 2, 1);
  const BlockId bad[] = {ids[1], ids[0], ids[1]};
  CHECK_THROWS(pool.release(bad, 3), "block 2 more often than it is held");
  pool.check_invariants();
  CHECK_EQ(pool.ref_count(ids[0]), 1);
  CHECK_EQ(pool.ref_count(ids[1]), 1);
  pool.release(ids, 1);
  BlockId next[2];
  CHECK(pool.allocate(2, next));
  CHECK_EQ(next[0], ids[2]);
  CHECK_EQ(next[1], ids[0]);
}

TEST(only_a_prefix_lookup_stops_at_the_first_miss) {
  BlockPool pool(4);
  BlockId ids[2];
  CHECK(pool.allocate(2, ids));
  const Hash hashes[] = {hash_of(1), hash_of(2), hash_of(3)};
  publish(&pool, &ids[0], &hashes[0], 1);
  publish(&pool, &ids[1], &hashes[2], 1);
  BlockId found[3];
  CHECK_EQ(pool.lookup(hashes, 3, 0, true, found), 1);
  CHECK_EQ(found[2], -1);
  CHECK_EQ(pool.lookup(hashes, 3, 0, false, found), 1);
  CHECK_EQ(found[2], ids[1]);
}

struct Listener : kvcache::BlockListener {
  const BlockPool* pool;
  std::vector<BlockId> heard;
  void on_forget(const kvcache::Forgotten& forgotten) override {
    if (forgotten.why == kvcache::Forgotten::Why::kFreed) return;
    for (int64_t i = 0; i < forgotten.n; ++i) {
      const BlockId id = forgotten.ids[i];
      CHECK(pool->hash_of(id) == nullptr);  // the block is no longer found
      CHECK(pool->copied(id, /*is_chain=*/false).hash == *forgotten.hash(i));
      if (forgotten.is_last(i)) heard.push_back(id);
    }
  }
};

TEST(a_listener_is_notified_of_evicted_content) {
  for (const char* policy : {"lru", "priority"}) {
    BlockPool pool(5, kvcache::make_eviction_policy(policy, {}, 5));
    Listener listener;
    listener.pool = &pool;
    pool.add_listener(&listener);
    BlockId ids[4];
    CHECK(pool.allocate(4, ids));
    const Hash hashes[] = {hash_of(1), hash_of(2)};
    publish(&pool, ids, hashes, 2);
    publish(&pool, &ids[2], hashes, 1);  // a duplicate of the first block
    pool.release(ids, 4);
    BlockId taken[4];
    CHECK(pool.allocate(1, taken));
    CHECK(listener.heard.empty());  // the block was not cached
    CHECK(pool.allocate(3, taken));
    CHECK(listener.heard == std::vector<BlockId>({ids[1], ids[2]}));
  }
}

TEST(a_pool_is_broken_by_lack_of_memory_if_a_listener_runs_out_of_it) {
  struct Greedy : kvcache::BlockListener {
    void on_forget(const kvcache::Forgotten&) override { throw std::bad_alloc(); }
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
struct ForgetReader : kvcache::BlockListener {
  const BlockPool* pool = nullptr;
  std::vector<BlockId> found;  // for each block, what its partial hash finds
  std::vector<uint64_t> variants;
  int num_batches = 0;
  void on_forget(const kvcache::Forgotten& forgotten) override {
    if (forgotten.why == kvcache::Forgotten::Why::kFreed) return;
    ++num_batches;
    for (BlockId id : forgotten) {
      found.push_back(pool->find_partial(hash_of(100 + id), forgotten.group(0)));
      variants.push_back(pool->variant_of(id));
    }
  }
};

TEST(partial_hashes_are_removed_before_listeners_are_notified) {
  BlockPool pool(3);
  ForgetReader reader;
  reader.pool = &pool;
  pool.add_listener(&reader);
  BlockId ids[2];
  CHECK(pool.allocate(2, ids));
  for (BlockId id : ids) pool.publish_partial(id, hash_of(100 + id), hash_of(1), 0);
  kvcache::Content content{};
  const Hash hash = hash_of(2), parent = hash_of(1);
  const uint64_t variant = 7;
  content.hashes = &hash;
  content.parent = &parent;
  content.variants = &variant;
  pool.publish(ids, content, 1, 0);
  pool.evict(ids, 2);
  CHECK(reader.found == std::vector<BlockId>({0, 0}));
  CHECK(reader.variants == std::vector<uint64_t>({7, 0}));  // copies of the blocks need them
  CHECK_EQ(pool.variant_of(ids[0]), 0);
}

TEST(a_group_is_evicted_in_one_batch) {
  BlockPool pool(9);
  ForgetReader reader;
  reader.pool = &pool;
  pool.add_listener(&reader);
  BlockId ids[4];
  CHECK(pool.allocate(4, ids));
  for (int i = 0; i < 4; ++i) {
    pool.publish_partial(ids[i], hash_of(i), hash_of(i), static_cast<uint8_t>(i / 3));
  }
  pool.evict_group(0);
  CHECK_EQ(reader.num_batches, 1);
  CHECK_EQ(reader.found.size(), 3);
  CHECK(pool.is_cached(ids[3]));
}

TEST(stored_and_removed_events_are_logged_in_order) {
  BlockPool pool(4);
  EventLog events;
  kvcache::EventRecorder recorder(&events, kvcache::Tier::kDevice);
  pool.add_listener(&recorder);
  BlockId ids[3];
  CHECK(pool.allocate(3, ids));
  const Hash hashes[] = {hash_of(1), hash_of(2)};
  const int32_t tokens[] = {5, 6, 7, 8};
  Content content{hashes, &hashes[1]};
  content.tokens = tokens;
  content.tokens_per_block = 2;
  pool.publish(ids, content, 2, 0);
  publish(&pool, &ids[2], hashes, 1);  // a duplicate, so no additional hash can be found
  const BlockId tail_first[] = {ids[1], ids[0]};
  pool.release(tail_first, 2);
  CHECK(pool.allocate(2, ids));
  pool.release(ids, 3);
  pool.clear();
  const EventLog::Drained drained = events.drain();
  CHECK_EQ(drained.events.size(), 4);
  CHECK(drained.events[0].kind == EventLog::Kind::kStored && drained.events[0].hash == hashes[0]);
  CHECK(drained.events[0].parent == hashes[1] && drained.events[1].parent == hashes[0]);
  CHECK(drained.events[2].kind == EventLog::Kind::kRemoved && drained.events[2].hash == hashes[1]);
  CHECK(drained.events[3].kind == EventLog::Kind::kCleared);
  CHECK(drained.tokens == std::vector<int32_t>(tokens, tokens + 4));
  CHECK(events.drain().events.empty());
  CHECK_EQ(pool.num_evicted(), 2);
}

TEST(an_undrained_event_log_is_bounded_and_counts_dropped_events) {
  EventLog events(/*most_events=*/4, /*most_tokens=*/100);
  const std::vector<Hash> hashes = kvcache::test::hashes_from(1, 20);
  for (const Hash& hash : hashes) events.removed(hash, 0, kvcache::Tier::kDevice);
  // When the log is full, a notice replaces its events. The first time, four events are dropped;
  // each later time, three events are dropped. Together with the last event, which remains in the
  // log, this is 4 + 5 * 3 + 1 = 20 events.
  EventLog::Drained drained = events.drain();
  CHECK_EQ(drained.events.size(), 2);
  CHECK(drained.events[0].kind == EventLog::Kind::kCleared);
  CHECK_EQ(drained.events[0].num_dropped, 19);
  CHECK(drained.events[1].hash == hashes[19]);
  for (size_t i = 0; i < 5; ++i) events.stored_on_host(hashes[i], 0);
  drained = events.drain();
  CHECK_EQ(drained.events.size(), 3);  // a notice for each tier
  CHECK(drained.events[1].tier == kvcache::Tier::kHost);
  CHECK_EQ(drained.events[0].num_dropped, 4);
  CHECK_EQ(drained.events[1].num_dropped, 0);
}

TEST(clear_removes_all_hashes_and_keeps_held_blocks) {
  BlockPool pool(5);
  BlockId ids[3];
  for (int round = 0; round < 70000; ++round) {  // more rounds than a 16-bit epoch can count
    CHECK(pool.allocate(3, ids));
    const Hash hashes[] = {hash_of(1), hash_of(2), hash_of(3)};
    publish(&pool, ids, hashes, 3);
    pool.release(&ids[2], 1);
    CHECK_EQ(pool.num_cached(), 3);
    pool.clear();
    BlockId found = 0;
    CHECK_EQ(pool.lookup(hashes, 1, 0, true, &found), 0);
    CHECK_EQ(pool.num_cached(), 0);
    CHECK_EQ(pool.num_free(), 2);
    if (round % 9973 == 0) pool.check_invariants();
    pool.release(ids, 2);
  }
  pool.check_invariants();
}

TEST(descendants_of_an_invalid_block_are_evicted_without_their_parent) {
  BlockPool pool(8);
  BlockId ids[6];
  CHECK(pool.allocate(6, ids));
  const Hash chain[] = {hash_of(1), hash_of(2), hash_of(3), hash_of(4)};
  const Hash seed{};
  Content content{chain, &seed};
  content.root = &chain[0];
  pool.publish(ids, content, 4, 0);
  // A second chain, which shares only the first block.
  const Hash branch = hash_of(12);
  Content other{&branch, &chain[0]};
  other.root = &chain[0];
  pool.publish(&ids[4], other, 1, 0);
  const Hash unrelated = hash_of(9);
  publish(&pool, &ids[5], &unrelated, 1);
  pool.evict(&ids[2], 1);
  evict_derived(&pool, ids[1], /*is_uniform=*/true);
  CHECK(pool.is_cached(ids[0]) && !pool.is_cached(ids[1]) && !pool.is_cached(ids[3]));
  CHECK(pool.is_cached(ids[4]) && pool.is_cached(ids[5]));
  pool.check_invariants();
  evict_derived(&pool, ids[4], /*is_uniform=*/false);
  CHECK(!pool.is_cached(ids[0]) && !pool.is_cached(ids[4]) && pool.is_cached(ids[5]));
}

TEST(partial_blocks_are_found_until_the_block_is_reallocated) {
  BlockPool pool(3);
  BlockId ids[2];
  CHECK(pool.allocate(2, ids));
  const Hash hash = hash_of(5);
  for (BlockId id : ids) pool.publish_partial(id, hash, hash, 1);
  CHECK_EQ(pool.find_partial(hash, 1), ids[0]);
  CHECK_EQ(pool.find_partial(hash, 0), 0);
  CHECK_EQ(pool.find(hash, 1), 0);
  CHECK_EQ(pool.num_cached(), 2);
  pool.release(ids, 2);
  pool.check_invariants();
  BlockId taken;
  CHECK(pool.allocate(1, &taken));
  CHECK_EQ(pool.find_partial(hash, 1), ids[1]);
  CHECK_THROWS(pool.publish_partial(ids[1], hash, hash, 1), "which is free");
  pool.clear();
  CHECK_EQ(pool.find_partial(hash, 1), 0);
  pool.check_invariants();
}

TEST(a_rejected_publish_changes_nothing) {
  BlockPool pool(4);
  BlockId ids[3];
  CHECK(pool.allocate(3, ids));
  pool.release(&ids[2], 1);
  const Hash hashes[] = {hash_of(1), hash_of(2), hash_of(3)};
  CHECK_THROWS(publish(&pool, ids, hashes, 3), "which is free");
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

// An order that evicts the oldest candidate first, and records its notifications.
struct Recorder : kvcache::EvictionOrder, kvcache::BlockListener {
  explicit Recorder(std::vector<std::string>* log) : log(log) {}
  std::vector<std::string>* log;
  std::deque<BlockId> candidates;

  template <class... T>
  void note(const std::string& what, T... numbers) {
    std::string line = what;
    ((line += " " + std::to_string(numbers)), ...);
    log->push_back(line);
  }
  void insert(BlockId id) override {
    note("insert", id);
    candidates.push_back(id);
  }
  void remove(BlockId id) override {
    note("remove", id);
    candidates.erase(std::find(candidates.begin(), candidates.end(), id));
  }
  BlockId victim() override { return candidates.empty() ? 0 : candidates.front(); }
  void on_publish(const kvcache::Published& p) override {
    for (int64_t i = 0; i < p.n; ++i) {
      note(p.hash(i) == nullptr ? "part"
           : p.is_first[i]      ? "publish"
                                : "publish again",
           p.ids[i], int{p.group});
    }
  }
  void on_hit(const kvcache::Hit& hit) override { note("hit", hit.n, hit.ids[0]); }
  void on_release(const kvcache::Released& r) override {
    if (r.access.number > 0) {
      return note("access", r.n, r.ids[0], static_cast<int>(r.access.now), r.access.number);
    }
    if (r.features == nullptr) return note("released", r.n, r.ids[0]);
    const kvcache::ReleaseFeatures& f = *r.features;
    note("release", r.n, r.ids[0], r.prefix_tokens[0], f.num_prefix_tokens, f.num_new_blocks,
         f.num_output_tokens, f.logical_time, f.wall_ms, f.tokens_per_block, f.num_retention,
         f.retention[0].first, f.retention[0].stop, f.retention[0].priority, f.retention[0].ttl_ms);
  }
  void on_idle(const kvcache::Blocks& blocks) override {
    for (BlockId id : blocks) note("idle", id);
  }
  void on_forget(const kvcache::Forgotten& f) override {
    using Why = kvcache::Forgotten::Why;
    if (f.why == Why::kReset) note("reset", f.n);
    for (int64_t i = 0; i < f.n; ++i) {
      if (f.why == Why::kFreed) {
        note("freed", f.ids[i]);
      } else {
        note("forget", f.ids[i], int{f.hash(i) != nullptr}, int{f.group(i)},
             int{f.why == Why::kEvicted});
      }
    }
  }
};

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
  const kvcache::Retention retention{1, 2, 3, 4};
  const kvcache::ReleaseFeatures features{6, 7, 8, 10, 11, 16, &retention, 1};
  pool.notify(kvcache::Released{{ids, 3}, {}, prefix_tokens, &features});
  pool.notify(kvcache::Released{{ids, 2}, pool.begin_access(7.0)});
  pool.notify(kvcache::Released{{ids, 3}});
  pool.release(ids, 3);  // block 1 has a child, block 3 belongs to no chain
  CHECK(notified({"release 3 1 16 6 7 8 10 11 16 1 1 2 3 4", "access 2 1 7 1", "released 3 1",
                  "idle 1", "idle 2", "idle 3", "insert 2", "insert 3"}));

  pool.notify(kvcache::Hit{{&ids[1], 1}, kvcache::Hit::By::kRequest});
  pool.retain(&ids[1], 1);
  CHECK(notified({"hit 1 2", "remove 2"}));
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

TEST(a_parent_is_no_candidate_until_its_last_child_is_forgotten) {
  std::vector<std::string> log;
  BlockPool pool(5, std::make_unique<Recorder>(&log));
  BlockId ids[4];
  CHECK(pool.allocate(4, ids));
  const Hash parent = hash_of(1), child = hash_of(2);
  for (int i : {0, 1}) publish(&pool, &ids[i], &parent, 1);
  pool.release(ids, 2);
  log.clear();
  for (int i : {2, 3}) pool.publish(&ids[i], Content{&child, &parent}, 1, 0);
  CHECK(log == std::vector<std::string>({"publish 3 0", "publish again 4 0"}));
  pool.check_invariants();
  log.clear();
  pool.evict(&ids[0], 1);
  CHECK(log == std::vector<std::string>({"remove 1", "remove 2", "forget 1 1 0 0"}));
  log.clear();
  pool.evict(&ids[2], 1);
  CHECK(log == std::vector<std::string>({"forget 3 1 0 0"}));
  log.clear();
  pool.evict(&ids[3], 1);
  CHECK(log == std::vector<std::string>({"insert 2", "forget 4 1 0 0"}));
  pool.check_invariants();
}

TEST(descendants_of_invalid_blocks_are_evicted_under_every_policy) {
  std::vector<std::string> log;
  BlockPool pool(6, std::make_unique<Recorder>(&log));
  BlockId ids[5];
  CHECK(pool.allocate(5, ids));
  const Hash chain[] = {hash_of(1), hash_of(2), hash_of(3), hash_of(4)};
  const Hash seed{};
  Content content{chain, &seed};
  content.root = &chain[0];
  pool.publish(ids, content, 4, 0);
  pool.release(ids, 4);
  pool.pin(ids, 2);
  evict_derived(&pool, ids[1], /*is_uniform=*/true);
  pool.check_invariants();
  CHECK_EQ(pool.num_cached(), 1);
  pool.publish_partial(ids[4], hash_of(9), chain[0], 0);
  pool.release(&ids[4], 1);
  const Hash other = hash_of(5);
  BlockId more;
  CHECK(pool.allocate(1, &more));
  pool.publish(&more, Content{&other, &chain[0], 1, nullptr, &chain[0]}, 1, 0);
  pool.release(&more, 1);
  evict_derived(&pool, more, /*is_uniform=*/false);
  pool.check_invariants();
  CHECK_EQ(pool.num_cached(), 0);
  CHECK(pool.allocate(1, &more));
  publish(&pool, &more, chain, 1);
  pool.pin(&more, 1);
  pool.release(&more, 1);
  CHECK_EQ(pool.num_pinned(), 1);
  CHECK(pool.allocate(5, ids));
  CHECK_EQ(pool.num_pins_broken(), 1);
  pool.check_invariants();
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

TEST(policies_are_created_by_name) {
  for (const std::string& name : kvcache::eviction_names()) {
    const auto policy = kvcache::make_eviction_policy(name, {}, 8);
    CHECK_EQ(policy == nullptr, name == "lru");
    CHECK(policy == nullptr || policy->num_bytes() > 0);
  }
  const std::vector<std::string> for_host{"learned", "lru"};
  CHECK(kvcache::host_eviction_names() == for_host);
  const auto learned = kvcache::make_eviction_policy("learned", {}, 8);
  for (const std::string& name : for_host) {
    CHECK(kvcache::make_host_eviction_policy(name, {}, 8, learned.get()) != nullptr);
  }
  CHECK_THROWS(
      kvcache::make_host_eviction_policy("learned", {}, 8, nullptr),
      "host_eviction is 'learned', and eviction is 'another': expected 'learned' for both");
  CHECK_THROWS(kvcache::make_host_eviction_policy("priority", {}, 8, nullptr),
               "host_eviction is 'priority': expected one of learned, lru ");
  CHECK_THROWS(kvcache::make_host_eviction_policy("lru", {{"x", 1}}, 8, nullptr),
               "host_eviction 'lru': option 'x' is 1: expected no options");
  CHECK_THROWS(kvcache::make_eviction_policy("mru", {}, 8), "eviction is 'mru'");
  CHECK_THROWS(kvcache::make_eviction_policy("learned", {}, 1), "num_blocks is 1");
}

using Event = std::function<void(BlockPool*)>;

// A listener that calls a function at each event of one kind.
struct Disturber : kvcache::BlockListener {
  explicit Disturber(std::function<void(const std::string&)> call) : call(std::move(call)) {}
  std::function<void(const std::string&)> call;

  void on_publish(const kvcache::Published&) override { call("publish"); }
  void on_hit(const kvcache::Hit&) override { call("hit"); }
  void on_release(const kvcache::Released&) override { call("release"); }
  void on_idle(const kvcache::Blocks&) override { call("idle"); }
  void on_forget(const kvcache::Forgotten&) override { call("forget"); }
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
    pool->notify(kvcache::Hit{{ids, 2}, kvcache::Hit::By::kRequest});
    pool->notify(kvcache::Released{{ids, 2}});
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
      BlockPool pool(4, has_order ? kvcache::make_eviction_policy("priority", {}, 4) : nullptr);
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
      BlockPool own(4, has_order ? kvcache::make_eviction_policy("priority", {}, 4) : nullptr);
      BlockPool second(9);
      int num_rejected = 0;
      kvcache::BlockListener unheard;
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
