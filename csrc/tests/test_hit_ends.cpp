// SPDX-License-Identifier: Apache-2.0
// Tests where hits and steps end, and which blocks stay cached for these hits.
#include "core/groups/hit_ends.h"

#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "core/groups/kinds.h"
#include "tests/check.h"
#include "tests/core_fixtures.h"

using namespace kvcache;
using namespace kvcache::test;

namespace {

// Returns an attention group with blocks of 2,048 tokens and a state group with blocks of 512
// tokens. Hits end at multiples of 16 tokens.
std::vector<CacheGroup> hybrid_groups() {
  return {group_of(std::make_shared<FullAttention>(), 2048, 0, 16),
          group_of(std::make_shared<RecurrentState>(), 512, 1, 16)};
}

TokenChain chain_of(int64_t block_size, int64_t num_lookahead = 0) {
  HashScheme scheme;
  scheme.num_lookahead = num_lookahead;
  return {std::make_shared<TokenIds>(), block_size, Hash{}, ExtraKeys(), true, true, 0, scheme};
}

// Returns the end of the longest hit of a prompt that is cached completely.
int64_t end_of(const std::vector<CacheGroup>& groups, int64_t num_tokens, int64_t num_lookahead = 0,
               bool with_partial = true) {
  return HitEnds(groups).of_prompt(chain_of(16, num_lookahead), num_tokens, with_partial);
}

// Returns the number of tokens [start, stop) that the next step computes.
int64_t to_next(int64_t start, int64_t stop, std::initializer_list<int64_t> likely = {}) {
  return HitEnds(hybrid_groups()).end_of_step({start, stop, true}, likely) - start;
}

TEST(an_equal_prompt_hits_all_tokens_but_the_last) {
  CHECK_EQ(end_of(hybrid_groups(), 1200), 1184);
  CHECK_EQ(end_of(hybrid_groups(), 1025), 1024);
  CHECK_EQ(end_of(hybrid_groups(), 1024), 1008);  // only a longer prompt can hit all its tokens
  CHECK_EQ(end_of(hybrid_groups(), 9), 0);
  CHECK_EQ(end_of(hybrid_groups(), 2300, 0, /*with_partial=*/false), 2048);
}

TEST(an_equal_prompt_hits_only_blocks_whose_hashes_cover_known_tokens) {
  CHECK_EQ(end_of(hybrid_groups(), 1025, 1), 1024);
  CHECK_EQ(end_of(hybrid_groups(), 1025, 2), 1008);
  CHECK_EQ(end_of(hybrid_groups(), 1026, 2), 1024);
  CHECK_EQ(end_of(hybrid_groups(), 17, 40), 0);
}

TEST(an_equal_prompt_hits_tokens_that_a_drafter_does_not_recompute) {
  std::vector<CacheGroup> groups = {group_of(std::make_shared<FullAttention>(), 32, 0, 16),
                                    group_of(std::make_shared<RecurrentState>(), 512, 1, 16)};
  groups[0].drafts = true;
  CHECK_EQ(end_of(groups, 1100), 1056);
  groups[0].has_partial = true;
  CHECK_EQ(end_of(groups, 1100), 1072);
  CHECK_EQ(end_of(groups, 1090, 3), 1056);
  CHECK_EQ(end_of(groups, 1091, 3), 1072);
  groups[0].is_cached = false;
  CHECK_EQ(end_of(groups, 1100), 1088);
}

TEST(drafts_limit_the_shared_prefix_only_in_groups_that_limit_it) {
  std::vector<CacheGroup> groups = full_groups(4);
  groups.push_back(group_of(std::make_shared<SlidingWindow>(6), 4, 1));
  const auto longest = [&](bool only_shared) {
    return HitEnds(groups).longest(25, 24, /*with_partial=*/true, only_shared);
  };
  CHECK_EQ(longest(true), 24);
  groups[1].drafts = true;
  CHECK(longest(true) == 24 && longest(false) == 20);
  groups[0].drafts = true;
  CHECK(longest(true) == 20 && longest(false) == 20);
}

TEST(a_step_ends_at_the_last_boundary_that_it_reaches) {
  CHECK_EQ(to_next(0, 700), 512);
  CHECK_EQ(to_next(512, 1112), 512);
  CHECK_EQ(to_next(512, 2560), 2048);
  CHECK_EQ(to_next(0, 100), 100);  // reaches no boundary
}

TEST(a_step_ends_at_the_first_likely_hit_that_it_reaches) {
  CHECK_EQ(to_next(0, 3000, {1088, 2992}), 1088);
  CHECK_EQ(to_next(0, 3000, {2992, 1088}), 1088);
  CHECK_EQ(to_next(0, 1000, {1088, 2992}), 512);
  CHECK_EQ(to_next(1088, 2088, {1088, 2992}), 960);
  CHECK_EQ(to_next(1024, 1200, {0, 1184}), 160);
  CHECK_EQ(to_next(1184, 1200, {0, 1184}), 16);
}

TEST(steps_without_states_end_anywhere) {
  CHECK_EQ(HitEnds(full_groups(16)).end_of_step({0, 700, true}, {32, 64}), 700);
}

TEST(boundaries_are_common_to_all_state_groups_and_hits) {
  std::vector<CacheGroup> groups = {group_of(std::make_shared<RecurrentState>(), 48, 0),
                                    group_of(std::make_shared<RecurrentState>(), 64, 1)};
  for (CacheGroup& group : groups) group.hit_unit = 192;
  CHECK_EQ(HitEnds(groups).end_of_step({0, 500, true}, {}), 384);
}

CacheGroup sparse(std::shared_ptr<const AttentionKind> kind, int64_t every) {
  CacheGroup group = group_of(std::move(kind), 4);
  group.retained_every = every;
  return group;
}

std::set<int64_t> ends_of(const CacheGroup& group, int64_t num_prompt, int64_t num_hit,
                          int64_t num_shared) {
  CacheGroup other = group_of(std::make_shared<FullAttention>(), 8, 1, /*hash_block_size=*/4);
  other.is_cached = false;
  const RetainedEnds ends =
      HitEnds({group, other}).retained(chain_of(4), num_prompt, num_hit, num_shared);
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
  const HitEnds ends(full_groups(4));
  CHECK(ends.retained(chain_of(4), 25, 0, 12) == RetainedEnds{});
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
