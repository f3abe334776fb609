// SPDX-License-Identifier: Apache-2.0
#include "core/manager/checkpoints.h"

#include "core/groups/recurrent_state.h"
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

int64_t to_next(const Checkpoints::Prompt& prompt, int64_t num_tokens) {
  return Checkpoints(hybrid_groups(), /*unit=*/16, /*hash_block_size=*/16)
      .num_tokens_to_next(prompt, num_tokens);
}

TEST(a_step_ends_at_the_last_boundary_that_it_reaches) {
  CHECK_EQ(to_next({0, 1200, 0, true}, 700), 512);
  CHECK_EQ(to_next({512, 1200, 0, true}, 600), 512);
  CHECK_EQ(to_next({512, 5000, 0, true}, 2048), 2048);
  CHECK_EQ(to_next({0, 1200, 0, true}, 100), 100);  // reaches no checkpoint
}

TEST(the_last_step_of_a_prompt_ends_where_an_equal_prompt_can_hit) {
  CHECK_EQ(to_next({1024, 1200, 0, true}, 700), 160);  // the checkpoint is at 1,184 tokens
  CHECK_EQ(to_next({1184, 1200, 0, true}, 700), 16);
  CHECK_EQ(to_next({0, 1195, 0, true}, 1190), 1184);  // a few tokens are left
  // Only a longer prompt can hit all tokens of this prompt.
  CHECK_EQ(to_next({0, 1024, 0, true}, 1024), 1008);
  CHECK_EQ(to_next({1008, 1024, 0, true}, 1024), 16);
  CHECK_EQ(to_next({0, 9, 0, true}, 9), 9);
}

TEST(an_equal_prompt_hits_tokens_that_a_drafter_does_not_recompute) {
  std::vector<CacheGroup> groups = {group_of(std::make_shared<FullAttention>(), 32, 0, 16),
                                    group_of(std::make_shared<RecurrentState>(), 512, 1, 16)};
  groups[0].drafts = true;
  const auto next = [&](int64_t start, int64_t num_tokens) {
    return Checkpoints(groups, 16, 16).num_tokens_to_next({start, 1100, 0, true}, num_tokens);
  };
  CHECK_EQ(next(0, 1100), 1056);
  CHECK_EQ(next(0, 1060), 1056);
  CHECK_EQ(next(0, 1050), 1024);
  CHECK_EQ(next(1056, 1100), 44);
  groups[0].has_partial = true;
  CHECK_EQ(next(0, 1100), 1072);
  groups[0].is_cached = false;
  CHECK_EQ(next(0, 1100), 1088);
}

TEST(a_step_ends_at_the_end_of_the_shared_prefix_first) {
  CHECK_EQ(to_next({0, 3000, 1088, true}, 3000), 1088);
  CHECK_EQ(to_next({0, 3000, 1088, true}, 1000), 512);
  CHECK_EQ(to_next({1088, 3000, 1088, true}, 1000), 960);
}

TEST(steps_without_kept_states_compute_all_tokens) {
  CHECK_EQ(to_next({0, 1200, 0, false}, 700), 700);
  CHECK_EQ(to_next({0, 1200, 0, false}, 7000), 1200);
  CHECK_EQ(Checkpoints(full_groups(16), 16, 16).num_tokens_to_next({0, 1200, 0, true}, 700), 700);
}

TEST(boundaries_are_common_to_all_state_groups_and_hits) {
  const std::vector<CacheGroup> groups = {group_of(std::make_shared<RecurrentState>(), 48, 0),
                                          group_of(std::make_shared<RecurrentState>(), 64, 1)};
  CHECK_EQ(Checkpoints(groups, 192, 16).num_tokens_to_next({0, 1000, 0, true}, 500), 384);
}

}  // namespace

TEST_MAIN()
