// SPDX-License-Identifier: Apache-2.0
// Tests that a block copy takes few launches, because the parameters of each launch hold as many
// regions and pairs as possible. `tests/ops` checks what the launches copy.

#include <vector>

#include "check.h"
#include "ops/copy_launch.h"

namespace {

using namespace kvcache;

constexpr size_t kSmall = 4096, kLarge = 32760;

struct Copy {
  std::vector<CopyRegion> regions;
  std::vector<int32_t> pairs;
  BlockCopy data{};

  Copy(int64_t num_regions, int64_t num_pairs, int64_t region_bytes = 4096) {
    for (int64_t i = 0; i < num_regions; ++i) {
      regions.push_back({i << 20, region_bytes, i << 20, region_bytes, region_bytes});
    }
    for (int64_t i = 0; i < num_pairs; ++i) {
      pairs.insert(pairs.end(), {static_cast<int32_t>(i) - 1, static_cast<int32_t>(i + 7)});
    }
    data.regions = regions.data();
    data.num_regions = num_regions;
    data.pairs = pairs.data();
    data.num_pairs = num_pairs;
    data.pairs_on_cpu = true;
  }
};

template <size_t kBytes>
std::vector<CopyShare> shares_of(const Copy& copy, const std::vector<VectorRegion>& regions) {
  std::vector<CopyShare> shares;
  for_each_share<kBytes>(copy.data, regions,
                         [&](const CopyShare& share) { shares.push_back(share); });
  return shares;
}

template <size_t kBytes>
size_t num_launches(const Copy& copy) {
  return shares_of<kBytes>(copy, vector_regions(copy.data)).size();
}

}  // namespace

TEST(the_launch_capacity_matches_its_parameter_size) {
  CHECK(sizeof(CopyLaunch<kSmall>) <= kSmall && sizeof(CopyLaunch<kLarge>) <= kLarge);
  CHECK_EQ(num_launches<kSmall>(Copy(1, 400)), 1u);
  CHECK_EQ(num_launches<kSmall>(Copy(40, 256)), 1u);
  CHECK(num_launches<kSmall>(Copy(1, 1000)) > 1u);
  CHECK_EQ(num_launches<kLarge>(Copy(1, 4000)), 1u);
  CHECK_EQ(num_launches<kLarge>(Copy(256, 2500)), 1u);
}

TEST(device_ids_need_one_launch) {
  Copy copy(80, 100'000);
  copy.data.pairs_on_cpu = false;
  CHECK_EQ(num_launches<kSmall>(copy), 1u);
  Copy more(600, 100'000);
  more.data.pairs_on_cpu = false;
  CHECK_EQ(num_launches<kLarge>(more), 1u);
}

TEST(holds_is_consistent_with_the_shares) {
  for (int64_t num_regions : {1, 7, 40, 41, 42, 100}) {
    for (int64_t num_pairs : {1, 100, 250, 260, 300, 496, 500, 510}) {
      const bool one = num_launches<kSmall>(Copy(num_regions, num_pairs)) == 1;
      // At least half of the parameters is reserved for pairs, so regions use no more than the
      // other half.
      const bool held = CopyLaunch<kSmall>::holds(num_regions, num_pairs);
      if (one) CHECK(held);
      if (held && num_regions <= 40) CHECK(one);
    }
  }
}

TEST(tasks_of_a_launch_stay_below_2_to_the_31) {
  Copy copy(1, 100, int64_t{1} << 38);  // 2^26 chunks of 4 KiB
  for (const CopyShare& share : shares_of<kSmall>(copy, vector_regions(copy.data))) {
    CHECK(share.num_pairs * share.page_chunks <= INT32_MAX);
  }
  copy.data.pairs_on_cpu = false;
  CHECK_EQ(num_launches<kSmall>(copy), 4u);  // 31 pairs per launch
}

TEST(each_region_has_its_own_vector_size) {
  Copy copy(3, 1);
  copy.regions[1].num_bytes = 20;
  copy.regions[2].source_stride = 24;
  const std::vector<VectorRegion> regions = vector_regions(copy.data);
  CHECK_EQ(regions[0].vector_bytes, 16);
  CHECK_EQ(regions[1].vector_bytes, 4);
  CHECK_EQ(regions[2].vector_bytes, 8);
  const std::vector<CopyShare> shares = shares_of<kSmall>(copy, regions);
  CHECK_EQ(shares.size(), 1u);
  CHECK(!shares[0].is_wide());
}

TEST_MAIN()
