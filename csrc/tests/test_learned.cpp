// SPDX-License-Identifier: Apache-2.0
// The parts of the eviction policy `learned`.
#include <algorithm>
#include <cstdint>
#include <list>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "core/eviction/learned.h"
#include "core/eviction/learned_copies.h"
#include "tests/check.h"

namespace {

using namespace kvcache;
namespace learned = learned;

constexpr int kShort = 0, kLong = 1;  // two classes of first turns

// Records blocks of one class that are used after `age` ms, and blocks of another that are not.
void train(Hazards* hazards, int64_t age) {
  int64_t now = 0;
  for (uint32_t key = 1; key < 4'000; key += 2) {
    hazards->add(key, kShort, true, 4, now);
    hazards->add(key + 1, kLong, true, 4, now);
    CHECK(hazards->use(key, now + age));
    now += 100;
  }
  hazards->learn(now + 100'000);
}

TEST(records_are_found_until_the_ring_overwrites_them) {
  Hazards hazards;
  hazards.add(7, kLong, true, 4, 6'400);
  hazards.add(7, kShort, false, 4, 64'000);
  CHECK_EQ(static_cast<int>(hazards.find(7)->reuse_class), kShort);
  CHECK_EQ(Hazards::age_of(*hazards.find(7), 128'000), 64'000);
  for (uint32_t key = 100; key < 100 + learned::kRecords; ++key) {
    hazards.add(key, kLong, true, 4, 0);
  }
  CHECK(hazards.find(7) == nullptr);
  CHECK(hazards.find(100) != nullptr && hazards.find(99 + learned::kRecords) != nullptr);
}

Segments::Segment segment_of(uint32_t number, int reuse_class, int64_t time) {
  Segments::Segment segment;
  segment.number = number;
  segment.reuse_class = static_cast<uint8_t>(reuse_class);
  segment.time = time;
  return segment;
}

// Segments as plain lists.
struct PlainSegments {
  std::map<BlockId, uint32_t> of;  // segment number
  std::map<uint32_t, std::list<BlockId>> candidates;

  BlockId oldest() const {
    for (const auto& [number, ids] : candidates) {
      if (!ids.empty()) return ids.front();
    }
    return kNullBlock;
  }
};

TEST(any_order_of_calls_agrees_with_plain_lists) {
  std::mt19937 random(1);
  Segments segments(60);
  PlainSegments plain;
  uint32_t num_opened = 0;
  for (int i = 0; i < 30'000; ++i) {
    const auto id = static_cast<BlockId>(1 + random() % 59);
    switch (random() % 4) {
      case 0: {  // several blocks are released together
        const uint32_t s = segments.open(i, static_cast<int>(random() % 90) % ReuseClass::kNum);
        ++num_opened;
        bool any = false;
        for (int k = 0; k < 5; ++k) {
          const auto each = static_cast<BlockId>(1 + random() % 59);
          if (segments.is_candidate(each)) continue;
          segments.assign(each, s);
          plain.of[each] = num_opened;
          any = true;
        }
        if (!any) {
          if (segments.is_candidate(id)) {
            segments.remove(id);
            plain.candidates[plain.of[id]].remove(id);
          }
          segments.assign(id, s);
          plain.of[id] = num_opened;
        }
        break;
      }
      case 1:
        if (segments.of(id) == Segments::kNone || segments.is_candidate(id)) break;
        segments.insert(id);
        plain.candidates[plain.of[id]].push_back(id);
        break;
      case 2:
        if (!segments.is_candidate(id)) break;
        segments.remove(id);
        plain.candidates[plain.of[id]].remove(id);
        break;
      default:
        if (segments.is_candidate(id)) break;
        segments.assign(id, Segments::kNone);
        plain.of.erase(id);
    }
    CHECK_EQ(segments.victim(nullptr, 0), plain.oldest());
  }
}

// An LRU cache of keys. Held keys are not evicted.
class PlainLru {
 public:
  explicit PlainLru(size_t capacity) : capacity_(capacity) {}
  bool hold(uint32_t key) {
    const bool had = held_.count(key) != 0 || drop(key);
    held_.insert(key);
    shrink();
    return had;
  }
  void idle(uint32_t key) {
    held_.erase(key);
    drop(key);
    order_.push_back(key);
    shrink();
  }

 private:
  bool drop(uint32_t key) {
    const auto at = std::find(order_.begin(), order_.end(), key);
    if (at == order_.end()) return false;
    order_.erase(at);
    return true;
  }
  void shrink() {
    while (held_.size() + order_.size() > capacity_ && !order_.empty()) order_.pop_front();
  }
  size_t capacity_;
  std::set<uint32_t> held_;
  std::list<uint32_t> order_;
};

TEST(a_simulated_pool_without_hazards_is_an_lru_cache) {
  std::mt19937 random(2);
  SimulatedPool pool(20, nullptr);
  PlainLru plain(20);
  for (uint32_t number = 1; number < 5'000; ++number) {
    std::vector<uint32_t> keys;
    for (int i = 0; i < 5; ++i) keys.push_back(static_cast<uint32_t>(1 + random() % 40));
    std::sort(keys.begin(), keys.end());
    keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
    for (const uint32_t key : keys) CHECK_EQ(pool.hold(key), plain.hold(key));
    for (const uint32_t key : keys) {
      pool.idle(key, segment_of(number, static_cast<int>(random() % 70), number));
      plain.idle(key);
    }
  }
}

// Blocks that recur after a scan, which only a pool that knows the classes keeps, alternate with a
// loop that LRU keeps. The pool loses all hits whenever it does not follow LRU.
TEST(a_policy_that_loses_all_hits_loses_at_most_the_bound) {
  constexpr int64_t kBlocks = 100;
  Hazards hazards;
  train(&hazards, 20'000);
  Duel duel(kBlocks, &hazards, Duel::By::kBlock);
  PlainLru lru(kBlocks);
  auto own = std::make_unique<PlainLru>(kBlocks);
  int64_t num_lru = 0, num_own = 0, now = 0, num_trials = 0;
  uint32_t number = 0, fresh = 1'000'000;
  const auto use = [&](uint32_t key, int reuse_class) {
    const bool by_lru = lru.hold(key);
    const bool followed = duel.follows_lru();
    const bool is_hit = followed && own->hold(key);
    num_lru += by_lru;
    num_own += is_hit;
    duel.use(key, is_hit);
    now += 10;
    duel.idle(key, segment_of(++number, reuse_class, now));
    lru.idle(key);
    if (followed) own->idle(key);
    if (followed && !duel.follows_lru()) {
      ++num_trials;
      own = std::make_unique<PlainLru>(kBlocks);  // all content is lost
    }
    const double most = learned::kShare * static_cast<double>(num_lru) +
                        (1 + learned::kStake) * static_cast<double>(kBlocks) + 1;
    CHECK(static_cast<double>(num_lru - num_own) <= most);
  };
  for (int phase = 0; phase < 400; ++phase) {
    if (phase % 2 == 0) {
      for (int i = 0; i < 10; ++i) {
        for (uint32_t key = 1; key <= 50; ++key) use(key, kShort);
        for (int k = 0; k < 100; ++k) use(++fresh, kLong);
      }
    } else {
      for (int i = 0; i < 100; ++i) {
        for (uint32_t key = 1; key <= 50; ++key)
          use(1'000 * static_cast<uint32_t>(phase) + key, kLong);
      }
    }
  }
  CHECK(num_trials > 5);
}

// After a trial has lost its stake, the pool misses one of many hits of the simulated LRU, as a
// pool does that also stores blocks without hashes. That must not prevent trials forever.
TEST(hits_that_following_lru_misses_do_not_prevent_trials_forever) {
  Hazards hazards;
  Duel duel(100, &hazards, Duel::By::kBlock);
  Segments::Segment segment{};
  const auto use = [&](uint32_t key, bool is_hit) {
    duel.use(key, is_hit);
    ++segment.number;
    segment.time += 10;
    duel.idle(key, segment);
  };
  duel.count(100, 0, 100);
  CHECK(!duel.follows_lru());
  while (!duel.follows_lru()) duel.count(0, 1, 0);
  uint32_t fresh = 1'000;
  for (int i = 0; i < 20'000; ++i) {
    use(i % 40 + 1, i % 20 != 0);
    use(++fresh, false);
  }
  duel.count(0, 0, 100);
  CHECK(!duel.follows_lru());
}

}  // namespace

TEST_MAIN()
