// SPDX-License-Identifier: Apache-2.0
// Unit tests of the parts of the learned policy.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "core/eviction/learned/ages.h"
#include "core/eviction/learned/end_blocks.h"
#include "core/eviction/learned/ghost_ring.h"
#include "core/eviction/learned/hazards.h"
#include "core/eviction/learned/loose_segment.h"
#include "core/eviction/learned/lru_guard.h"
#include "core/eviction/learned/reuse_class.h"
#include "core/eviction/learned/reuse_factors.h"
#include "core/eviction/learned/reuse_model.h"
#include "core/eviction/learned/segments.h"
#include "core/eviction/learned/shadow_lru.h"
#include "core/eviction/learned/shadow_worth.h"
#include "core/eviction/learned/state_budget.h"
#include "core/eviction/learned/trials.h"
#include "core/eviction/learned/worth_order.h"
#include "core/hash.h"
#include "tests/check.h"

using namespace kvcache;

namespace {

TEST(each_age_maps_to_the_bucket_that_contains_it) {
  const AgeBuckets ages(100);
  CHECK_EQ(ages.of(0), 0);
  CHECK_EQ(ages.of(99), 0);
  CHECK_EQ(ages.of(100), 1);
  for (int b = 0; b + 1 < AgeBuckets::kNum; ++b) {
    CHECK(std::abs(ages.width(b) - 100 * std::pow(2.0, b / 2.0)) < 1e-6 * ages.width(b));
    CHECK_EQ(ages.of(static_cast<int64_t>(std::ceil(ages.begin(b)))), b);
    CHECK_EQ(ages.of(static_cast<int64_t>(std::ceil(ages.begin(b + 1))) - 1), b);
  }
  CHECK_EQ(ages.of(INT64_MAX), AgeBuckets::kNum - 1);
}

TEST(different_features_give_different_classes) {
  std::map<int, int> seen;
  const int64_t gaps[] = {-1, 11'999, 12'000, 30'000, 120'000, 480'000};  // -1: a first turn
  for (int gap = 0; gap < ReuseClass::kGaps; ++gap) {
    for (int64_t added : {2'559, 2'560, 20'480}) {
      for (int64_t answer : {99, 100, 300, 1'000}) {
        const int c = ReuseClass::of_own(gap == 0 ? 0 : 2, gaps[gap], added, answer);
        CHECK_EQ(ReuseClass::gap_of(c), gap);
        CHECK_EQ(ReuseClass::is_later_turn(c), gap > 0);
        CHECK_EQ(ReuseClass::added_of(c), (added >= 2'560) + (added >= 20'480));
        CHECK_EQ(ReuseClass::answer_of(c), (answer >= 100) + (answer >= 300) + (answer >= 1'000));
        ++seen[c];
      }
    }
  }
  for (int forks : {1, 2, 4, 16}) ++seen[ReuseClass::of_shared(forks)];
  ++seen[ReuseClass::kLeft];
  for (int c = ReuseClass::kLoose; c < ReuseClass::kNum; ++c) ++seen[c];
  CHECK_EQ(seen.size(), ReuseClass::kNum);
  CHECK(seen.begin()->first == 0 && seen.rbegin()->first == ReuseClass::kNum - 1);
  CHECK_EQ(ReuseClass::of_own(3, 0, 0, 0), ReuseClass::of_own(1'000, 11'999, 2'559, 99));
  CHECK_EQ(ReuseClass::of_own(0, 0, 0, 0), ReuseClass::of_own(0, INT64_MAX, 0, 0));
  CHECK_EQ(ReuseClass::of_shared(16), ReuseClass::of_shared(65'535));
  CHECK(ReuseClass::is_shared(ReuseClass::of_shared(3)) && !ReuseClass::is_shared(0));
  CHECK(!ReuseClass::is_shared(ReuseClass::kLeft) && !ReuseClass::is_shared(ReuseClass::kLoose));
  CHECK(!ReuseClass::is_later_turn(ReuseClass::kLeft));
  CHECK_EQ(ReuseClass::kHit, ReuseClass::kLikely + 1);
}

TEST(a_state_that_becomes_idle_keeps_the_class_of_its_hits) {
  CHECK_EQ(ReuseClass::idle(0), ReuseClass::kLoose);
  CHECK_EQ(ReuseClass::idle(ReuseClass::of_shared(2)), ReuseClass::kLoose);
  CHECK_EQ(ReuseClass::idle(ReuseClass::kLikely), ReuseClass::kLikely);
  CHECK_EQ(ReuseClass::hit(0), ReuseClass::kHit);
  CHECK_EQ(ReuseClass::hit(ReuseClass::kLoose), ReuseClass::kHit);
  CHECK_EQ(ReuseClass::hit(ReuseClass::kLikely), ReuseClass::kHit);
  CHECK_EQ(ReuseClass::hit(ReuseClass::of_shared(1)), ReuseClass::kHit + 1);
  int c = ReuseClass::kHit;
  for (int i = 0; i < 5; ++i) c = ReuseClass::hit(c);
  CHECK_EQ(c, ReuseClass::kNum - 1);
}

TEST(end_blocks_join_the_segment_in_which_their_hit_ends) {
  EndBlocks ends;
  const auto taken = [&](int64_t first, int64_t stop, int64_t num_hit) {
    std::vector<BlockId> ids;
    ends.take(first, stop, num_hit, [&](BlockId id) { ids.push_back(id); });
    return ids;
  };
  const auto add_all = [&] {
    ends.clear();
    ends.add(7, EndBlocks::kHeld);
    ends.add(5, 80);
    ends.add(7, 80);  // also held
    ends.add(4, 64);
    ends.add(3, 32);
    ends.add(2, 16);
    ends.sort();
  };
  constexpr int64_t kOnlyLongest = EndBlocks::kHeld - 1;
  add_all();
  CHECK(!ends.empty());
  // For a shared part of 32 tokens, only the blocks of the longest hit that ends in this part are
  // taken, each of them once.
  CHECK(taken(0, 32, kOnlyLongest) == (std::vector<BlockId>{3}));
  CHECK(taken(0, 32, kOnlyLongest) == (std::vector<BlockId>{2}));
  CHECK(taken(0, 32, kOnlyLongest).empty());
  // For the request's own part, the blocks of all hits that are longer than its own hit are taken.
  CHECK(taken(32, EndBlocks::kHeld, 48) == (std::vector<BlockId>{4, 5, 7}));
  CHECK(taken(32, EndBlocks::kHeld, 48).empty());
  // If the request's own hit is the longest, the blocks of that hit are taken.
  add_all();
  CHECK(taken(32, EndBlocks::kHeld, 80) == (std::vector<BlockId>{5, 7}));
  ends.clear();
  CHECK(ends.empty() && taken(0, EndBlocks::kHeld, 0).empty());
}

TEST(a_factor_is_the_ratio_of_observed_to_expected_uses) {
  // Blocks after short answers are used three times as often as others, at every age and for every
  // level of the other features.
  ReuseFactors::CountsOfClasses counts{};
  ReuseHazards of_all;
  of_all.fill(0.1);
  for (int own = 0; own < ReuseClass::kOwn; ++own) {
    for (ReuseCount& count : counts[own]) {
      count = {1'000, ReuseClass::answer_of(own) == 0 ? 240.0 : 80.0};
    }
  }
  ReuseFactors factors;
  for (int own : {0, 1, 71}) CHECK_EQ(factors.hazard(own, 7, 0.1), 0.1);
  for (int round = 0; round < 20; ++round) factors.fit(counts, of_all);
  for (int own = 0; own < ReuseClass::kOwn; ++own) {
    const double expected = ReuseClass::answer_of(own) == 0 ? 0.24 : 0.08;
    CHECK(std::abs(factors.hazard(own, 7, 0.1) - expected) < 0.001);
  }
  // Without samples, a factor does not change.
  const double before = factors.hazard(5, 3, 0.1);
  factors.fit({}, of_all);
  CHECK_EQ(factors.hazard(5, 3, 0.1), before);
  CHECK(factors.hazard(0, 0, 1) < 1);
}

TEST(a_lookup_returns_the_youngest_record_of_a_key) {
  for (uint32_t seed = 1; seed <= 50; ++seed) {
    std::mt19937 random(seed);
    const int size = 1 << random() % 5;
    GhostRing ring(size);
    std::deque<GhostRing::Record> model;
    for (int64_t number = 0; number < 200; ++number) {
      GhostRing::Record record{};
      record.key = 1 + random() % 30;
      record.set_time(number);
      ring.add(record);
      model.push_back(record);
      if (static_cast<int>(model.size()) > size) model.pop_front();
      CHECK_EQ(ring.is_full(), static_cast<int>(model.size()) == size);
      CHECK_EQ(ring.first(), model.front().time());
      CHECK_EQ(ring.num_added(), number + 1);
      CHECK_EQ(ring.at(ring.first()).key, model.front().key);
      for (uint32_t key = 1; key <= 31; ++key) {
        const GhostRing::Record* found = ring.find(key);
        int64_t youngest = -1;
        for (const auto& each : model) youngest = each.key == key ? each.time() : youngest;
        CHECK_EQ(found == nullptr ? -1 : found->time(), youngest);
      }
    }
  }
}

TEST(without_samples_older_blocks_are_worth_less) {
  const AgeBuckets ages(100);
  const Hazards hazards(ages);
  for (int64_t age = 0; age < 20'000; age += 50) {
    CHECK(hazards.index(0, age) > hazards.index(0, age + 50));
    CHECK_EQ(hazards.index(0, age), hazards.index(ReuseClass::kLoose, age));
  }
}

TEST(a_reused_class_is_worth_more_at_its_reuse_ages) {
  const AgeBuckets ages(100);
  Hazards hazards(ages);
  const int used = 3, left = 7;
  for (int i = 0; i < 1'000; ++i) {
    for (int b = 0; b <= 5; ++b) {
      hazards.reach(used, b);
      hazards.reach(left, b);
    }
    hazards.use(used, 5);  // used at this age only
  }
  hazards.solve();
  const auto at = [&](int b) { return static_cast<int64_t>(std::ceil(ages.begin(b))); };
  CHECK(hazards.index(used, at(0)) > hazards.index(left, at(0)));
  // The value increases towards the age of the use. Beyond this age, it is as low as for the other
  // class.
  for (int b = 0; b < 5; ++b) {
    CHECK(hazards.index(used, at(b)) < hazards.index(used, at(b + 1)));
  }
  CHECK(hazards.index(used, at(8)) < hazards.index(used, at(0)));
  // Older counts have less weight than newer ones.
  const double before = hazards.index(used, at(5));
  for (int i = 0; i < 5'000; ++i) hazards.fade();
  hazards.solve();
  CHECK(hazards.index(used, at(5)) < before / 2);
}

TEST(the_gain_of_a_block_is_its_expected_hits_minus_the_price_of_its_space) {
  const AgeBuckets ages(100);
  Hazards hazards(ages);
  for (int i = 0; i < 1'000; ++i) {
    for (int b = 0; b <= 5; ++b) hazards.reach(3, b);
    if (i % 2 == 0) hazards.use(3, 5);
  }
  hazards.solve();
  CHECK(hazards.gain(3, 0, /*cost=*/1, /*price=*/0) > 0.5);
  CHECK(hazards.gain(3, 0, 1, 0) <= 1);
  CHECK(std::abs(hazards.gain(3, 0, 2, 0) - 2 * hazards.gain(3, 0, 1, 0)) < 1e-12);
  for (int64_t age : {0, 30, 150, 1'000, 100'000, 1'000'000'000}) {
    const double worth = hazards.index(3, age);
    double last = hazards.gain(3, age, 1, 0);
    for (double share : {0.2, 0.5, 0.9}) {  // the gain decreases as the price of space increases
      const double gain = hazards.gain(3, age, 1, share * worth);
      CHECK(gain > 0 && gain < last);
      last = gain;
    }
    // If the price exceeds the block's own value, there is no gain. Between the starts of buckets,
    // values are interpolated linearly.
    CHECK(hazards.gain(3, age, 1, 1.5 * worth) < 0.01);
  }
}

TEST(only_samples_are_counted_but_segment_ends_are_recorded) {
  ReuseModel model(30'000);  // samples one of ten blocks
  int num_sampled = 0;
  constexpr int kKeys = 2'000;
  const auto key_of = [](int i) { return static_cast<uint32_t>(i) * 0x9E3779B1u | 1u; };
  for (int i = 1; i <= kKeys; ++i) {
    model.set_now(1'000 * i);
    model.note_release(key_of(i),
                       model.release_of(/*reuse_class=*/2, /*turn=*/300, /*num_blocks=*/1),
                       i % 4 == 0, i % 8 == 0);
    const GhostRing::Record* record = model.find(key_of(i));
    CHECK(record != nullptr || i % 4 != 0);
    num_sampled += record != nullptr && record->is_sample;
    if (record == nullptr) continue;
    CHECK(record->turn == 3 && record->is_end == (i % 8 == 0) && record->time() == model.clock());
  }
  CHECK(num_sampled > kKeys / 15 && num_sampled < kKeys / 7);
  // All sampled blocks reached age bucket 0.
  CHECK_EQ(model.hazards().counts()[2 * AgeBuckets::kNum], num_sampled);
  for (int repeat = 0; repeat < 2; ++repeat) {  // the second use of a record is not counted
    for (int i = 1; i <= kKeys; ++i) model.note_use(key_of(i));
  }
  double num_used = 0;
  const std::vector<double> counts = model.hazards().counts();
  for (size_t i = counts.size() / 2; i < counts.size(); ++i) num_used += counts[i];
  CHECK_EQ(num_used, num_sampled);
  ReuseModel larger(15'000);
  larger.add_blocks(15'000);  // same sampling rate as above
  for (int i = 1; i <= kKeys; ++i)
    larger.note_release(key_of(i), larger.release_of(2, 0, 639), false, false);
  CHECK_EQ(larger.hazards().counts()[2 * AgeBuckets::kNum], num_sampled);
  // A smaller fraction of a long segment's blocks is sampled, such that fewer than 64 samples are
  // expected.
  for (const auto& [num_blocks, share] : std::map<int64_t, double>{{640, 0.5}, {2'559, 0.25}}) {
    ReuseModel of_long(30'000);
    for (int i = 1; i <= kKeys; ++i) {
      of_long.note_release(key_of(i), of_long.release_of(2, 0, num_blocks), false, false);
    }
    const double num = of_long.hazards().counts()[2 * AgeBuckets::kNum];
    CHECK(std::abs(num / num_sampled - share) < 0.15);
  }
}

// The keys of an LRU cache.
struct PlainLru {
  size_t capacity;
  std::deque<uint32_t> keys;  // released keys, oldest first
  std::set<uint32_t> held;

  bool contains(uint32_t key) const {
    return held.count(key) > 0 || std::count(keys.begin(), keys.end(), key) > 0;
  }
  void remove(uint32_t key) {
    keys.erase(std::remove(keys.begin(), keys.end(), key), keys.end());
    held.erase(key);
  }
  void hold(uint32_t key) {
    remove(key);
    held.insert(key);
    shrink();
  }
  void release(uint32_t key) {
    remove(key);
    keys.push_back(key);
    shrink();
  }
  void shrink() {
    while (keys.size() + held.size() > capacity && !keys.empty()) keys.pop_front();
  }
};

TEST(the_shadow_cache_holds_the_keys_of_an_lru_cache) {
  for (uint32_t seed = 1; seed <= 50; ++seed) {
    std::mt19937 random(seed);
    const size_t capacity = 1 + random() % 9;
    ShadowLru shadow(static_cast<int64_t>(capacity));
    PlainLru model{capacity, {}, {}};
    for (int step = 0; step < 500; ++step) {
      const uint32_t key = 2 * (random() % 20);
      if (random() % 5 == 0) {
        shadow.remove(key);
        model.remove(key);
      } else if (random() % 3 == 0) {
        CHECK_EQ(shadow.hold(key), model.contains(key));
        model.hold(key);
      } else {
        shadow.release(key);
        model.release(key);
      }
      if (random() % 200 == 0) {
        shadow.clear();
        model.keys.clear();
        model.held.clear();
      }
      for (uint32_t each = 0; each < 40; each += 2) {
        CHECK_EQ(shadow.contains(each), model.contains(each));
      }
    }
  }
}

// A cache that evicts either the least or the most recently used key. Compared with LRU, the second
// order loses many hits on some workloads and gains many on others.
struct TwoOrders {
  bool use(uint32_t key, bool follows_lru) {
    const auto at = std::find(keys.begin(), keys.end(), key);
    const bool is_hit = at != keys.end();
    if (is_hit) {
      keys.erase(at);
    } else if (keys.size() == capacity) {
      keys.erase(follows_lru ? keys.begin() : keys.end() - 1);
    }
    keys.push_back(key);
    return is_hit;
  }

  size_t capacity;
  std::deque<uint32_t> keys;  // least recently used first
};

// The bound holds for every evidence, so in half of the runs there is always evidence for a trial.
TEST(a_guarded_policy_loses_at_most_the_bound_to_lru) {
  constexpr int64_t kUses = 20'000;
  int num_exceeded = 0, num_ahead = 0;
  for (uint32_t seed = 1; seed <= 48; ++seed) {
    std::mt19937 random(seed);
    const size_t capacity = 4 + random() % 60;
    TwoOrders guarded{capacity, {}}, unguarded{capacity, {}}, lru{capacity, {}};
    Trials trials(static_cast<int64_t>(capacity));
    int64_t behind = 0, behind_unguarded = 0;
    uint32_t span = 1;
    bool is_loop = false;
    for (int64_t n = 1; n <= kUses; ++n) {
      if (n % (1 + kUses / (1 + seed % 7)) == 1) {  // another workload
        is_loop = random() % 2 == 0;
        span = static_cast<uint32_t>(capacity) + random() % 40;
      }
      // In a loop over more keys than it holds, LRU has no hits. Keys that are soon used again are
      // hits only with LRU.
      const uint32_t key =
          2 * static_cast<uint32_t>(is_loop ? n % span : n / 3 + random() % (capacity / 4));
      const auto is_hit = int64_t{lru.use(key, true)};
      const int64_t gain = int64_t{guarded.use(key, trials.follows_lru())} - is_hit;
      const int64_t gain_unguarded = int64_t{unguarded.use(key, false)} - is_hit;
      trials.count(1, gain, seed <= 24 ? gain_unguarded : 1);
      behind -= gain;
      behind_unguarded -= gain_unguarded;
      const auto c = static_cast<double>(capacity);
      const double bound = 1.25 * c * (2 + std::log2(1 + static_cast<double>(n) / (2 * c)));
      CHECK(static_cast<double>(behind) <= bound);
      if (n == kUses) num_exceeded += static_cast<double>(behind_unguarded) > bound;
    }
    num_ahead += behind < 0;
  }
  CHECK(num_exceeded > 8);  // without the guard, the policy would lose far more hits
  CHECK(num_ahead > 4);     // with the guard, the policy still gains hits on favorable workloads
}

TEST(a_policy_that_beats_lru_leaves_the_fallback_sooner) {
  Trials trials(16);
  const auto lose = [&] {
    int num = 0;
    for (; !trials.follows_lru(); ++num) trials.count(1, -1, 0);
    return num;
  };
  const auto win = [&] { trials.count(1, 1, 0); };
  const auto wait = [&] {
    int num = 0;
    for (; trials.follows_lru(); ++num) trials.count(1, 0, 1);
    return num;
  };
  CHECK_EQ(lose(), 1);
  CHECK_EQ(wait(), 32);
  CHECK_EQ(lose(), 4);
  CHECK_EQ(wait(), 64);
  for (int i = 0; i < 31; ++i) win();
  CHECK_EQ(lose(), 16);   // the policy is ahead and may lose more
  CHECK_EQ(wait(), 128);  // but it did not gain enough to halve the period
  for (int i = 0; i < 32; ++i) win();
  CHECK_EQ(lose(), 16);
  CHECK_EQ(wait(), 128);
}

TEST(a_policy_follows_lru_until_its_own_order_is_better) {
  Trials trials(64);
  trials.count(1, -1, 0);
  CHECK(trials.follows_lru());
  trials.count(1'000, 0, 3);
  CHECK(trials.follows_lru());
  trials.count(1'000, 0, -100);  // only the gain since it was furthest behind counts
  trials.count(1'000, 0, 3);
  CHECK(trials.follows_lru());
  trials.count(1, 0, 1);
  CHECK(!trials.follows_lru());
  trials.count(16, -16, 0);
  trials.count(1'000, 0, 15);
  CHECK(trials.follows_lru());  // a later failure costs more, so more evidence is required
  trials.count(1, 0, 1);
  CHECK(!trials.follows_lru());
}

TEST(errors_of_the_comparison_do_not_change_the_lead_by_more_than_the_capacity) {
  const auto lost_until_failure = [](int64_t gain_in_fallback, int num_won) {
    Trials trials(16);
    trials.count(1, -1, 0);
    trials.count(1'000, gain_in_fallback, 0);
    trials.count(1, 0, 1);
    for (int i = 0; i < num_won; ++i) trials.count(1, 1, 0);
    CHECK(!trials.follows_lru());
    int num = 0;
    for (; !trials.follows_lru(); ++num) trials.count(1, -1, 0);
    return num;
  };
  CHECK_EQ(lost_until_failure(0, 5), 8);  // 16 / 4, plus a lead of 5 - 1
  CHECK_EQ(lost_until_failure(100, 5), 8);
  CHECK_EQ(lost_until_failure(-5, 10), 8);
  CHECK_EQ(lost_until_failure(-100, 20), 7);  // the return to LRU loses at most 16
}

Hash hash_of(uint64_t n) {
  Hash hash{};
  std::memcpy(hash.bytes, &n, sizeof(n));
  return hash;
}

// With a second cache, an evicted key moves there, and a key that is loaded stays in both.
TEST(the_simulated_host_receives_what_the_simulated_device_evicts) {
  ReuseModel model(100);
  LruGuard guard(100, &model);
  CHECK(guard.simulated() == nullptr);
  guard.compare_requests(/*num_blocks=*/3, /*num_host_blocks=*/4);  // 2 blocks and 3 pages
  SimulatedCache& lru = *guard.simulated();
  const auto use = [&](uint64_t n) {
    guard.note_use(ReuseModel::key_of(hash_of(n), 0), false);
    guard.note_idle(ReuseModel::key_of(hash_of(n), 0));
  };
  // Returns the blocks that are cached on the device or, with `on_host`, on either tier.
  const auto cached = [&](bool on_host) {
    std::set<uint64_t> found;
    for (uint64_t n = 1; n <= 6; ++n) {
      if (lru.has(hash_of(n), 0, on_host)) found.insert(n);
    }
    return found;
  };
  using Blocks = std::set<uint64_t>;
  for (const uint64_t n : {1, 2, 3, 4}) use(n);
  CHECK((cached(true) == Blocks{1, 2, 3, 4} && cached(false) == Blocks{3, 4}));
  use(1);  // loaded; evicts 3
  use(5);
  use(6);  // the host has 3, 4, 1 from the oldest to the youngest, and has evicted 2
  CHECK((cached(true) == Blocks{1, 3, 4, 5, 6} && cached(false) == Blocks{5, 6}));
  lru.use_end(hash_of(4), 0);  // the host has 4, 1, 5
  CHECK((cached(true) == Blocks{1, 4, 5, 6} && cached(false) == Blocks{4, 6}));
  guard.clear();
  CHECK((cached(true) == Blocks{1, 4, 5} && cached(false).empty()));
  lru.clear_host();
  CHECK(cached(true).empty());
}

TEST(a_guard_that_compares_requests_counts_their_blocks) {
  ReuseModel model(100);
  LruGuard guard(100, &model);
  guard.compare_requests(/*num_blocks=*/33, /*num_host_blocks=*/0);
  const Hash hash = hash_of(1);
  const uint32_t key = ReuseModel::key_of(hash, 0);
  guard.note_use(key, false);  // uses count only by request
  guard.note_idle(key);
  for (int i = 0; i < 100; ++i) guard.note_use(key, false);
  CHECK(!guard.falls_back());
  SimulatedCache& lru = *guard.simulated();
  CHECK(lru.next() == nullptr);
  lru.note_admission(/*num_blocks=*/10, /*num_hit=*/3, /*num_simulated=*/3);
  CHECK(!guard.falls_back() && !model.follows_lru());
  lru.note_admission(10, 1, 2);
  CHECK(guard.falls_back() && model.follows_lru());
  SimulatedCache& by_value = *lru.next();
  CHECK(!by_value.has(hash, 0, false));  // still empty
  guard.note_use(key, true);
  CHECK(by_value.has(hash, 0, false));
  const auto compare = [&](int64_t num_blocks, int64_t num_lru, int64_t num_by_value) {
    lru.note_admission(num_blocks, 0, num_lru);
    by_value.note_admission(num_blocks, 0, num_by_value);
  };
  compare(40, 20, 20);  // hits that LRU has, too, are no evidence
  compare(23, 0, 8);
  CHECK(guard.falls_back());
  compare(10, 0, 0);
  CHECK(!guard.falls_back() && !model.follows_lru() && lru.next() == nullptr);
  lru.note_admission(8, 0, 8);
  compare(200, 50, 50);  // after the period too, only hits that LRU lacks are evidence
  CHECK(guard.falls_back());
  compare(8, 0, 8);
  CHECK(!guard.falls_back());
}

// Calls every function in random order, which a pool never does.
TEST(a_simulated_pool_by_value_never_exceeds_its_capacity) {
  for (uint32_t seed = 1; seed <= 40; ++seed) {
    std::mt19937 random(seed);
    ReuseModel model(100);
    const size_t capacity = 1 + random() % 9;
    ShadowWorth shadow(static_cast<int64_t>(capacity), /*num_host=*/seed % 2 == 0 ? 5 : 0, &model);
    std::set<uint32_t> held;
    for (int step = 0; step < 1'000; ++step) {
      model.set_now(500 * step);
      const uint32_t key = 2 + 2 * (random() % 20);
      const auto loose = static_cast<int>(ReuseClass::kLoose + random() % 4);
      switch (random() % 12) {
        case 0:
          shadow.open(static_cast<int>(random() % 3), 0, 1);
          break;
        case 1:
        case 2:
          shadow.release(key);
          break;
        case 3:
          shadow.assign_loose(key, loose);
          break;
        case 4:
          shadow.remove(key);
          CHECK(!shadow.contains(key, false));
          held.erase(key);
          break;
        case 5:
          shadow.note_end(key);
          break;
        case 6:
          if (random() % 20 == 0) shadow.clear(), held.clear();
          if (random() % 20 == 0) shadow.clear_host();
          break;
        case 7:
        case 8:
          shadow.hold(key);
          held.insert(key);
          CHECK(shadow.contains(key, false));
          break;
        default:
          shadow.make_idle(key);
          held.erase(key);
      }
      for (const uint32_t each : held) CHECK(shadow.contains(each, false));
    }
    for (uint32_t key = 2; key < 42; key += 2) shadow.make_idle(key);
    size_t num = 0, num_on_host = 0;
    for (uint32_t key = 2; key < 42; key += 2) {
      num += shadow.contains(key, false);
      num_on_host += shadow.contains(key, true) && !shadow.contains(key, false);
    }
    CHECK_EQ(num, capacity);
    CHECK(num_on_host <= 5);
  }
}

// Compares a StateBudget with a plain list of the blocks in insertion order.
TEST(the_victim_of_a_budget_is_the_least_valuable_end_of_a_class) {
  for (uint32_t seed = 1; seed <= 20; ++seed) {
    std::mt19937 random(seed);
    constexpr BlockId kBlocks = 40;
    const double share = 0.1 * (random() % 5);
    StateBudget budget(kBlocks + 1, share);
    struct Listed {
      BlockId id;
      int reuse_class;
    };
    std::vector<Listed> model;
    std::vector<int64_t> hits(kBlocks + 1, 0);
    std::vector<double> worths(kBlocks + 1);
    for (double& worth : worths) worth = static_cast<double>(random());
    const auto worth_of = [&](BlockId id, int64_t num_hit) {
      CHECK_EQ(num_hit, hits[static_cast<size_t>(id)]);
      return worths[static_cast<size_t>(id)];
    };
    int64_t num_victims = 0;
    for (int step = 0; step < 3'000; ++step) {
      const BlockId id = 1 + static_cast<BlockId>(random() % kBlocks);
      const auto at = std::find_if(model.begin(), model.end(),
                                   [&](const Listed& each) { return each.id == id; });
      if (random() % 400 == 0) {
        budget.clear();
        model.clear();
        std::fill(hits.begin(), hits.end(), 0);
      } else if (random() % 5 == 0) {
        hits[static_cast<size_t>(id)] = random() % 100;
        budget.set_hit(id, hits[static_cast<size_t>(id)]);
      } else if (at == model.end()) {
        model.push_back({id, static_cast<int>(random() % 3)});
        budget.insert(id, model.back().reuse_class);
      } else {
        model.erase(at);
        budget.remove(id);
        budget.remove(id);
      }
      BlockId expected = kNullBlock;
      for (int c = 0; c < 3; ++c) {
        std::vector<BlockId> of_class;
        for (const Listed& each : model) {
          if (each.reuse_class == c) of_class.push_back(each.id);
        }
        for (size_t i = 0; i < of_class.size(); ++i) {
          if (i > 0 && i + 1 < of_class.size()) continue;
          const BlockId other = of_class[i];
          if (expected == kNullBlock || worth_of(other, hits[static_cast<size_t>(other)]) <
                                            worths[static_cast<size_t>(expected)]) {
            expected = other;
          }
        }
      }
      const auto most = static_cast<size_t>(share * kBlocks);
      if (model.size() <= most) expected = kNullBlock;
      num_victims += expected != kNullBlock;
      CHECK_EQ(budget.victim(worth_of), expected);
    }
    CHECK(num_victims > 0);
    CHECK(budget.num_bytes() < 64 * (2 * kBlocks + 200));
  }
  StateBudget unlimited(10, 1);
  CHECK(!unlimited.is_limited());
  CHECK_EQ(unlimited.victim([](BlockId, int64_t) { return 0.0; }), kNullBlock);
}

TEST(loose_blocks_share_a_segment_while_it_is_young_and_small) {
  Segments segments(200);
  LooseSegment loose;
  const auto add = [&](BlockId id, int64_t time) {
    const int32_t s = loose.at(time, ReuseClass::kLoose, &segments);
    segments.assign(id, s);
    return s;
  };
  const int32_t first = add(1, 0);
  for (BlockId id = 2; id <= 64; ++id) CHECK_EQ(add(id, 5), first);
  const int32_t second = add(65, 5);
  CHECK(second != first && segments[second].reuse_class == ReuseClass::kLoose);
  CHECK_EQ(add(66, 5 + 1'999), second);
  CHECK(add(67, 5 + 2'000) != second);
  loose.clear();
  CHECK_EQ(segments[add(68, 5 + 2'001)].num_blocks, 1);
}

TEST(copies_in_the_other_tier_are_evicted_before_low_value_blocks) {
  ReuseModel model(100);
  Segments segments(20);
  WorthOrder order(&model, &segments);
  const auto add = [&](BlockId id, int reuse_class, float cost) {
    segments.assign(id, segments.open(model.clock(), reuse_class, 0, cost));
    segments.insert(id);
  };
  add(1, 5, 1);
  model.set_now(1'000'000);
  model.set_now(5);  // the clock does not go back
  add(2, 5, 1);
  add(3, 6, 0.001F);
  CHECK(order.worth(segments.of(3)) < order.worth(segments.of(1)));
  CHECK(order.worth(segments.of(1)) < order.worth(segments.of(2)));
  CHECK_EQ(order.victim(), 3);
  add(4, ReuseClass::kLoaded, 1);
  CHECK_EQ(order.worth(segments.of(4)), 0);
  CHECK_EQ(order.victim(), 3);  // a chosen segment is evicted completely before the next
  for (BlockId expected : {3, 4, 1, 2}) {
    CHECK_EQ(order.victim(), expected);
    segments.remove(expected);
    segments.assign(expected, Segments::kNone);
  }
  CHECK_EQ(order.victim(), kvcache::kNullBlock);
}

TEST(segments_are_listed_by_class_and_blocks_within_them_in_order) {
  Segments segments(10);
  const int32_t old = segments.open(5, 1), young = segments.open(9, 1), other = segments.open(9, 2);
  for (BlockId id : {1, 2, 3}) segments.assign(id, old);
  segments.assign(4, young);
  segments.assign(5, other);
  CHECK(!segments.is_candidate(2) && !segments.has_candidate(old));
  segments.insert(4);
  segments.insert(3);
  segments.insert(1);
  segments.insert(2);
  segments.insert(5);
  CHECK(segments.is_candidate(2) && segments.is_candidate(5));
  CHECK(segments.oldest(1) == old && segments.youngest(1) == young && segments.oldest(2) == other);
  for (BlockId id : {1, 2, 3}) {  // in the order of assignment
    CHECK_EQ(segments.first_candidate(old), id);
    segments.remove(id);
    CHECK(!segments.is_candidate(id));
  }
  CHECK(segments.oldest(1) == young && segments.youngest(1) == young);
  segments.insert(2);
  CHECK(segments.oldest(1) == old);
  segments.remove(2);
  for (BlockId id : {1, 2, 3}) segments.assign(id, Segments::kNone);
  const int64_t number = segments[old].number;
  const int32_t again = segments.open(9, 1);  // reuses the index of the segment that has ended
  CHECK(again == old && segments[again].number > number);
  segments.clear();
  CHECK(segments.oldest(1) == Segments::kNone && segments.of(4) == Segments::kNone);
}

TEST(blocks_leave_a_long_segment_from_any_side) {
  for (const bool joins : {false, true}) {  // whether they join another segment
    constexpr BlockId kBlocks = 5'000;
    Segments segments(kBlocks + 2);
    const int32_t s = segments.open(1, 1), other = segments.open(1, 2);
    for (BlockId id = 1; id <= kBlocks; ++id) segments.assign(id, s);
    segments.assign(kBlocks + 1, other);
    const auto leave = [&](BlockId id) { segments.assign(id, joins ? other : Segments::kNone); };
    for (BlockId id = kBlocks; id > 3'500; --id) leave(id);  // blocks leave from the end
    // Blocks leave from the middle, in ascending order.
    for (BlockId id = 1'000; id <= 2'000; ++id) leave(id);
    // Blocks leave from the middle, in descending order.
    for (BlockId id = 3'000; id > 2'500; --id) leave(id);
    for (BlockId id = 1; id < 1'000; id += 2) leave(id);  // every other block leaves
    for (BlockId id : {1'500, kBlocks}) segments.assign(id, s);
    std::vector<BlockId> expected;
    for (BlockId id = 2; id < 1'000; id += 2) expected.push_back(id);
    for (BlockId id = 2'001; id <= 2'500; ++id) expected.push_back(id);
    for (BlockId id = 3'001; id <= 3'500; ++id) expected.push_back(id);
    expected.insert(expected.end(), {1'500, kBlocks});
    CHECK_EQ(segments[s].num_blocks, expected.size());
    for (BlockId id : expected) segments.insert(id);
    for (BlockId id : expected) {
      CHECK_EQ(segments.first_candidate(s), id);
      segments.remove(id);
      segments.assign(id, Segments::kNone);
    }
    CHECK_EQ(segments.open(2, 1), s);  // the segment has ended
    for (BlockId id = 1; id <= kBlocks; ++id) {
      CHECK_EQ(segments.of(id) == Segments::kNone,
               !joins || std::count(expected.begin(), expected.end(), id) > 0);
    }
  }
}

TEST(any_order_of_calls_agrees_with_plain_lists) {
  for (uint32_t seed = 1; seed <= 100; ++seed) {
    std::mt19937 random(seed);
    constexpr int kBlocks = 12;
    struct Block {
      int64_t number = 0, order = 0;  // number of its segment, and position among all assignments
      bool is_in = false;
    };
    std::vector<Block> model(kBlocks);
    std::map<int64_t, int> class_of;
    Segments segments(kBlocks);
    int64_t num_assigned = 0;
    int32_t last = Segments::kNone;
    for (int step = 0; step < 300; ++step) {
      const BlockId id = 1 + static_cast<BlockId>(random() % (kBlocks - 1));
      Block& block = model[id];
      if (block.is_in) {
        segments.remove(id);
        block.is_in = false;
      } else if (block.number != 0 && random() % 2 == 0) {
        segments.insert(id);
        block.is_in = true;
      } else if (random() % 4 == 0) {
        segments.assign(id, Segments::kNone);
        block = {};
      } else {
        if (last == Segments::kNone || segments[last].num_blocks == 0 || random() % 3 == 0) {
          last = segments.open(step, static_cast<int>(random() % 3));
        }
        segments.assign(id, last);
        block = {segments[last].number, ++num_assigned, false};
        class_of[block.number] = segments[last].reuse_class;
      }
      for (int c = 0; c < 3; ++c) {
        int64_t oldest = 0, youngest = 0;
        for (const Block& each : model) {
          if (!each.is_in || class_of[each.number] != c) continue;
          if (oldest == 0 || each.number < oldest) oldest = each.number;
          youngest = std::max(youngest, each.number);
        }
        const auto number = [&](int32_t s) {
          return s == Segments::kNone ? 0 : segments[s].number;
        };
        CHECK_EQ(number(segments.oldest(c)), oldest);
        CHECK_EQ(number(segments.youngest(c)), youngest);
        if (oldest == 0) continue;
        BlockId first = kNullBlock;
        for (BlockId each = 1; each < kBlocks; ++each) {
          if (!model[each].is_in || model[each].number != oldest) continue;
          if (first == kNullBlock || model[each].order < model[first].order) first = each;
        }
        CHECK_EQ(segments.first_candidate(segments.oldest(c)), first);
      }
    }
  }
}

}  // namespace

TEST_MAIN()
