// SPDX-License-Identifier: Apache-2.0
#include "core/manager/prefix_finder.h"

#include "core/groups/kinds.h"
#include "tests/check.h"
#include "tests/core_fixtures.h"

using namespace kvcache;
using namespace kvcache::test;
using Ids = std::vector<BlockId>;

namespace {

// A request of 16 tokens, and pools that contain some of its blocks of 4 tokens.
struct Fixture {
  std::vector<CacheGroup> groups;
  HitEnds ends{groups};
  BlockPool pool{20}, host{20};
  PrefixFinder finder;
  std::shared_ptr<TokenChain> chain;

  explicit Fixture(std::vector<CacheGroup> of = full_groups(4), const ManagerOptions& options = {},
                   int64_t hash_block_size = 4)
      : groups(std::move(of)),
        finder({&pool, &host, &groups, &ends, hash_block_size}, options),
        chain(make_chain(hash_block_size, /*reads=*/true)) {}

  static std::shared_ptr<TokenChain> make_chain(int64_t block_size, bool reads) {
    auto tokens = std::make_shared<TokenIds>();
    tokens->append(nullptr, 16);
    auto chain = std::make_shared<TokenChain>(tokens, block_size, Hash{}, ExtraKeys(), reads, true);
    chain->hashes();
    return chain;
  }
  // Publishes a block with the content of this block of the request.
  BlockId cache(BlockPool* in, size_t block, uint8_t group = 0) {
    const Ids ids = take(in, 1);
    const auto num_hashes = static_cast<size_t>(groups[group].num_hashes);
    publish_chain(in, ids, {chain->known_hashes()[(block + 1) * num_hashes - 1]}, group);
    return ids[0];
  }
  const PrefixHit& find(bool with_host = false, bool with_partial = false) {
    return finder.find(*chain, with_partial, with_host, chain->read_cache());
  }
};

TEST(a_hit_consists_of_the_leading_cached_blocks) {
  Fixture f;
  CHECK_EQ(f.find().num_tokens, 0);
  const BlockId first = f.cache(&f.pool, 0), second = f.cache(&f.pool, 1);
  f.cache(&f.pool, 3);
  CHECK_EQ(f.find().num_tokens, 8);
  CHECK(f.find().blocks == std::vector<Ids>({{first, second}}));
  CHECK_EQ(f.pool.ref_count(first), 1);
}

TEST(an_uncached_group_does_not_limit_hits) {
  std::vector<CacheGroup> groups = full_groups(4);
  groups.push_back(group_of(std::make_shared<FullAttention>(), 8, /*id=*/1, /*hash_block_size=*/4));
  groups[1].is_cached = false;
  Fixture f(groups);
  for (size_t block = 0; block < 3; ++block) f.cache(&f.pool, block);
  CHECK_EQ(f.find().num_tokens, 8);  // whole blocks of all groups
  CHECK(f.find().blocks[1] == Ids({kNullBlock}));
  const PrefixHit& hit = f.find(/*with_host=*/false, /*with_partial=*/true);
  CHECK_EQ(hit.num_tokens, 12);
  CHECK_EQ(hit.sources[1], kNullBlock);
  groups[0].is_cached = false;
  Fixture none(groups);
  CHECK_EQ(none.find().num_tokens, 0);
}

TEST(a_hit_excludes_the_last_token) {
  Fixture f;
  for (size_t block = 0; block < 4; ++block) f.cache(&f.pool, block);
  CHECK_EQ(f.find().num_tokens, 12);
}

TEST(a_drafting_group_must_find_one_block_after_the_hit) {
  CacheGroup full = full_groups(4)[0];
  full.drafts = true;
  Fixture f({full});
  for (size_t block = 0; block < 3; ++block) f.cache(&f.pool, block);
  CHECK_EQ(f.find().num_tokens, 8);
  CHECK_EQ(f.find().blocks[0].size(), 2);
  // The block contains the last token, which must be computed. For the drafter, the block still
  // counts as found.
  f.cache(&f.pool, 3);
  CHECK_EQ(f.find().num_tokens, 12);
  f.cache(&f.host, 3);
  CHECK_EQ(f.find(/*with_host=*/true).num_host_blocks, 0);

  CacheGroup window = group_of(std::make_shared<SlidingWindow>(4), 4);
  window.drafts = true;
  Fixture w({window});
  w.cache(&w.pool, 1);
  CHECK_EQ(w.find().num_tokens, 0);
  w.cache(&w.pool, 2);
  CHECK_EQ(w.find().num_tokens, 8);
  CHECK_EQ(w.find().blocks[0].size(), 2);
}

TEST(groups_that_do_not_draft_lose_no_block) {
  CacheGroup full = full_groups(4)[0], window = group_of(std::make_shared<SlidingWindow>(4), 4, 1);
  full.drafts = true;
  Fixture f({full, window});
  for (size_t block = 0; block < 4; ++block) f.cache(&f.pool, block);
  f.cache(&f.pool, 2, 1);
  CHECK_EQ(f.find().num_tokens, 12);
}

TEST(with_partial_hits_a_drafter_needs_one_more_hash_block) {
  CacheGroup group = group_of(std::make_shared<FullAttention>(), 4, 0, /*hash_block_size=*/2);
  group.has_partial = group.drafts = true;
  Fixture f({group}, {}, /*hash_block_size=*/2);
  f.cache(&f.pool, 0);
  CHECK_EQ(f.find(false, /*with_partial=*/true).num_tokens, 0);
  const HashList& hashes = f.chain->known_hashes();
  f.pool.publish_partial(take(&f.pool, 1)[0], hashes[2], hashes[0], 0);
  CHECK_EQ(f.find(false, /*with_partial=*/true).num_tokens, 4);
  CHECK_EQ(f.find(false, /*with_partial=*/false).num_tokens, 0);
}

TEST(requests_that_do_not_read_the_cache_find_nothing) {
  Fixture f;
  f.cache(&f.pool, 0);
  CHECK_EQ(f.finder.find(*f.chain, false, false, /*reads=*/false).num_tokens, 0);
  ManagerOptions options{};
  options.enable_caching = false;
  Fixture off(full_groups(4), options);
  off.cache(&off.pool, 0);
  CHECK_EQ(off.find().num_tokens, 0);
}

TEST(host_pages_fill_gaps_in_the_device_cache) {
  Fixture f;
  const BlockId first = f.cache(&f.pool, 0), third = f.cache(&f.pool, 2);
  const BlockId page = f.cache(&f.host, 1);
  CHECK_EQ(f.find(/*with_host=*/false).num_tokens, 4);
  CHECK_EQ(f.find(/*with_host=*/false).first_host_token(f.groups), 4);
  const PrefixHit& hit = f.find(/*with_host=*/true);
  CHECK_EQ(hit.num_tokens, 12);
  CHECK(hit.blocks == std::vector<Ids>({{first, kNullBlock, third}}));
  CHECK_EQ(hit.num_host_blocks, 1);
  CHECK(hit.on_host[0].size() == 1 && hit.on_host[0][0].column == 1);
  CHECK_EQ(hit.on_host[0][0].page, page);
  CHECK_EQ(hit.first_host_token(f.groups), 4);
}

TEST(a_window_needs_only_its_last_blocks) {
  Fixture f({group_of(std::make_shared<SlidingWindow>(4), 4)});
  const BlockId third = f.cache(&f.pool, 2);
  CHECK_EQ(f.find().num_tokens, 12);
  CHECK(f.find().blocks == std::vector<Ids>({{kNullBlock, kNullBlock, third}}));
}

TEST(all_groups_must_agree) {
  Fixture f({group_of(std::make_shared<FullAttention>(), 4, 0),
             group_of(std::make_shared<SlidingWindow>(4), 4, 1)});
  for (size_t block = 0; block < 3; ++block) f.cache(&f.pool, block, 0);
  CHECK_EQ(f.find().num_tokens, 0);
  f.cache(&f.pool, 1, 1);
  CHECK_EQ(f.find().num_tokens, 8);
  CHECK_EQ(f.find().blocks[0].size(), 2);
}

TEST(a_state_is_found_where_it_was_kept) {
  Fixture f({group_of(std::make_shared<RecurrentState>(), 4)});
  const BlockId second = f.cache(&f.pool, 1);
  CHECK_EQ(f.find().num_tokens, 8);
  CHECK(f.find().blocks == std::vector<Ids>({{kNullBlock, second}}));
}

TEST(num_shared_tokens_is_the_hit_of_groups_that_keep_all_tokens) {
  Fixture f({group_of(std::make_shared<FullAttention>(), 4, 0),
             group_of(std::make_shared<RecurrentState>(), 4, 1)});
  for (size_t block = 0; block < 3; ++block) f.cache(&f.pool, block, 0);
  CHECK_EQ(f.find().num_tokens, 0);
  CHECK_EQ(f.find().num_shared_tokens, 12);
  f.cache(&f.pool, 1, 1);
  CHECK_EQ(f.find().num_tokens, 8);
  CHECK_EQ(f.find().num_shared_tokens, 12);
  Fixture alone({group_of(std::make_shared<RecurrentState>(), 4)});
  CHECK_EQ(alone.find().num_shared_tokens, 0);
  Fixture windows({group_of(std::make_shared<SlidingWindow>(6), 4, 0),
                   group_of(std::make_shared<FullAttention>(), 4, 1)});
  for (size_t block = 0; block < 3; ++block) windows.cache(&windows.pool, block, 1);
  windows.cache(&windows.pool, 0, 0);
  CHECK_EQ(windows.find().num_tokens, 4);
  CHECK_EQ(windows.find().num_shared_tokens, 12);
}

TEST(a_hit_may_end_inside_a_block_that_is_copied) {
  CacheGroup group = group_of(std::make_shared<FullAttention>(), 4, 0, /*hash_block_size=*/2);
  group.has_partial = true;
  Fixture f({group}, {}, /*hash_block_size=*/2);
  const BlockId first = f.cache(&f.pool, 0);
  const HashList& hashes = f.chain->known_hashes();
  const BlockId source = take(&f.pool, 1)[0];
  f.pool.publish_partial(source, hashes[2], hashes[0], 0);
  CHECK_EQ(f.find(false, /*with_partial=*/false).num_tokens, 4);
  CHECK(!f.find(false, /*with_partial=*/false).copies_partial());
  const PrefixHit& hit = f.find(false, /*with_partial=*/true);
  CHECK_EQ(hit.num_tokens, 6);
  CHECK(hit.blocks == std::vector<Ids>({{first}}));
  CHECK(hit.sources == Ids({source}));
  CHECK(hit.copies_partial());
}

TEST(hits_created_from_a_callers_lookup_are_on_the_device) {
  const PrefixHit hit = PrefixHit::of_device(8, {{3, 4}});
  CHECK_EQ(hit.num_tokens, 8);
  CHECK(hit.blocks == std::vector<Ids>({{3, 4}}));
  CHECK(!hit.copies_partial());
  CHECK_EQ(hit.first_host_token(full_groups(4)), 8);
}

}  // namespace

TEST_MAIN()
