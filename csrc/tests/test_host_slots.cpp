// SPDX-License-Identifier: Apache-2.0
// Slots of tokens stay within the arrays, which a sanitizer checks here. `tests/worker` tests the
// rest of the class.
#include "worker/host_slots.h"

#include <numeric>
#include <random>

#include "tests/check.h"

using namespace kvcache;
using Slots = std::vector<int64_t>;

namespace {

constexpr int64_t kRows = 4, kColumns = 3, kNumSlots = 40, kSizes[] = {4, 5, 4};

TEST(slots_of_tokens_in_any_order_match_their_table_entries) {
  std::vector<TableGroupView> groups;  // the last group does not share positions
  for (int64_t g = 0; g < 3; ++g) {
    const int64_t fields[kNumFields] = {g * kRows * kColumns, kColumns, kSizes[g], 1, 0, 1, 0, g};
    groups.push_back(table_view(fields));
  }
  std::vector<int32_t> tables(3 * kRows * kColumns), counts(3 * kRows, kColumns);
  std::iota(tables.begin(), tables.end(), 0);
  const auto slot_of = [&](int64_t g, int32_t row, int64_t position) {
    const int64_t size = kSizes[g];
    if (row < 0) return int64_t{-1};
    return tables[(g * kRows + row) * kColumns + position / size] * size + position % size;
  };
  std::mt19937 random(0);
  for (int n = 0; n <= kNumSlots; ++n) {
    Slots slots(3 * kNumSlots, -1), positions, out(static_cast<size_t>(n));
    HostSlots host(tables.data(), counts.data(), kRows, groups, /*num_shared=*/2, slots.data(),
                   kNumSlots, /*wide=*/true, /*one_memory=*/true);
    std::vector<int32_t> rows;
    for (int i = 0; i < n; ++i) {
      rows.push_back(static_cast<int32_t>(random() % (kRows + 1)) - 1);
      positions.push_back(static_cast<int64_t>(random() % 12));
      if (rows.back() < 0) positions.back() = static_cast<int64_t>(random()) << 20;
    }
    CHECK(!host.compute(HostSlots::kShared, rows.data(), n, nullptr, positions.data(), n));
    CHECK(!host.compute_into(2, rows.data(), n, nullptr, positions.data(), n, out.data()));
    for (int64_t i = 0; i < kNumSlots; ++i) {
      for (int64_t g = 0; g < 3; ++g) {
        const int64_t wanted = i < n ? slot_of(g, rows[i], positions[i]) : -1;
        CHECK_EQ(slots[g * kNumSlots + i], g < 2 ? wanted : -1);
        if (g == 2 && i < n) CHECK_EQ(out[i], wanted);
      }
    }
  }
}

}  // namespace

TEST_MAIN()
