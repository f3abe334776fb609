// SPDX-License-Identifier: Apache-2.0
// Tests which blocks stay cached for retained hits.
#include "core/groups/retained_hits.h"

#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "core/groups/full_attention.h"
#include "core/groups/recurrent_state.h"
#include "core/groups/sliding_window.h"
#include "tests/check.h"
#include "tests/core_fixtures.h"

using namespace kvcache;
using namespace kvcache::test;

namespace {

CacheGroup sparse(std::shared_ptr<const AttentionKind> kind, int64_t every) {
  CacheGroup group = group_of(std::move(kind), 4);
  group.retained_every = every;
  return group;
}

std::set<int64_t> ends_of(const CacheGroup& group, int64_t num_prompt, int64_t num_hit,
                          int64_t num_shared) {
  const RetainedEnds ends =
      RetainedHits({group}, /*unit=*/4, /*whole_unit=*/8).ends(num_prompt, num_hit, num_shared);
  std::set<int64_t> out(ends.begin(), ends.end());
  out.erase(0);
  return out;
}

std::vector<int64_t> cached(const CacheGroup& group, const RetainedEnds& ends) {
  std::vector<int64_t> out;
  for (int64_t block = 0; block < 12; ++block) {
    if (group.may_be_hit(block, ends)) out.push_back(block);
  }
  return out;
}

TEST(an_equal_prompt_and_a_shared_prefix_are_retained_at_both_units) {
  const CacheGroup group = sparse(std::make_shared<SlidingWindow>(6), 0);
  CHECK(ends_of(group, 23, 0, 0) == (std::set<int64_t>{16, 20}));
  CHECK(ends_of(group, 25, 0, 0) == (std::set<int64_t>{24}));
  CHECK(ends_of(group, 25, 4, 12) == (std::set<int64_t>{8, 12, 24}));
  CHECK(ends_of(group, 25, 12, 12) == (std::set<int64_t>{24}));  // the request has hit it
  CHECK(ends_of(group, 3, 0, 0).empty());
}

TEST(a_drafter_recomputes_tokens_after_retained_hits) {
  CacheGroup group = sparse(std::make_shared<SlidingWindow>(6), 0);
  group.drafts = true;
  CHECK(ends_of(group, 24, 0, 0) == (std::set<int64_t>{16, 20}));
  CHECK(ends_of(group, 24, 0, 16) == (std::set<int64_t>{8, 12, 16, 20}));
  CHECK(cached(group, {20}) == (std::vector<int64_t>{3, 4, 5}));
}

TEST(groups_that_keep_all_tokens_need_no_retained_ends) {
  CHECK(ends_of(group_of(std::make_shared<FullAttention>(), 4), 25, 0, 12).empty());
}

TEST(the_ends_of_a_dense_group_are_its_likely_hits) {
  const CacheGroup group = group_of(std::make_shared<SlidingWindow>(6), 4);
  CHECK(ends_of(group, 25, 0, 12) == (std::set<int64_t>{8, 12, 24}));
  std::vector<int64_t> read;
  for (int64_t block = 0; block < 8; ++block) {
    CHECK(group.may_be_hit(block, {12, 24}));
    if (group.is_read_at(block, {12, 24})) read.push_back(block);
  }
  // The blocks with the five tokens before each end.
  CHECK(read == (std::vector<int64_t>{1, 2, 4, 5}));
}

TEST(windows_and_states_are_cached_only_at_retained_hits) {
  const CacheGroup window = sparse(std::make_shared<SlidingWindow>(6), 0);
  CHECK(cached(window, {}).empty());
  CHECK(cached(window, {20, 36}) == (std::vector<int64_t>{3, 4, 7, 8}));
  const CacheGroup state = sparse(std::make_shared<RecurrentState>(), 0);
  CHECK(cached(state, {20, 36}) == (std::vector<int64_t>{4, 8}));
  CHECK_EQ(cached(group_of(std::make_shared<FullAttention>(), 4), {}).size(), 12);
}

TEST(an_interval_retains_its_multiples_in_addition) {
  const CacheGroup window = sparse(std::make_shared<SlidingWindow>(6), 16);
  CHECK(cached(window, {36}) == (std::vector<int64_t>{2, 3, 6, 7, 8, 10, 11}));
  const CacheGroup state = sparse(std::make_shared<RecurrentState>(), 16);
  CHECK(cached(state, {36}) == (std::vector<int64_t>{3, 7, 8, 11}));
}

TEST(a_part_of_a_block_is_cached_if_a_retained_hit_ends_there) {
  CacheGroup group = sparse(std::make_shared<SlidingWindow>(6), 0);
  group.has_partial = true;
  group.num_hashes = 2;
  group.hit_unit = 2;
  CHECK(group.may_hit_part(10, {10}) && !group.may_hit_part(6, {10}));
  CHECK(!group.may_hit_part(10, {}));
  group.drafts = true;
  CHECK(group.may_hit_part(10, {8}));
  CHECK(group_of(std::make_shared<SlidingWindow>(6), 4).may_hit_part(6, {}));
}

}  // namespace

TEST_MAIN()
