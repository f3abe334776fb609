// SPDX-License-Identifier: Apache-2.0
#include "worker/host_slots.h"

#include <random>

#include "tests/check.h"

using namespace kvcache;
using Slots = std::vector<int64_t>;

namespace {

constexpr int64_t kRows = 4, kColumns = 3, kNumSlots = 40;

// Two groups with shared positions and blocks of 4 and 5 tokens, and an encoder group with blocks
// of 4.
struct Fixture {
  std::vector<int32_t> tables, counts;
  Slots slots = Slots(3 * kNumSlots, -1);
  HostSlots host;

  static std::vector<int32_t> ids() {
    std::vector<int32_t> out;
    // The first id is 0, the null block.
    for (int32_t i = 0; i < 3 * kRows * kColumns; ++i) out.push_back(i);
    return out;
  }
  static std::vector<TableGroupView> groups() {
    std::vector<TableGroupView> out;
    for (int64_t g = 0; g < 3; ++g) {
      const int64_t fields[kNumFields] = {
          g * kRows * kColumns, kColumns, g == 1 ? 5 : 4, 1, 0, 1, 0, g};
      out.push_back(table_view(fields));
    }
    return out;
  }
  explicit Fixture(bool one_memory = true)
      : tables(ids()),
        counts(3 * kRows, kColumns),
        host(tables.data(), counts.data(), kRows, groups(), /*num_shared=*/2, slots.data(),
             kNumSlots, /*wide=*/true, one_memory) {}

  std::optional<std::string> compute(int64_t place, const std::vector<int32_t>& rows,
                                     const Slots& positions) {
    return host.compute(place, rows.data(), static_cast<int64_t>(rows.size()), nullptr,
                        positions.data(), static_cast<int64_t>(positions.size()));
  }
  int64_t slot_of(int64_t g, int32_t row, int64_t position) const {
    const int64_t size = g == 1 ? 5 : 4;
    if (row < 0) return -1;
    return tables[g * kRows * kColumns + row * kColumns + position / size] * size + position % size;
  }
};

TEST(slots_of_tokens_in_any_order_match_their_table_entries) {
  std::mt19937 random(0);
  for (int n = 0; n <= kNumSlots; ++n) {
    Fixture f;
    std::vector<int32_t> rows;
    Slots positions;
    for (int i = 0; i < n; ++i) {
      rows.push_back(static_cast<int32_t>(random() % (kRows + 1)) - 1);
      positions.push_back(static_cast<int64_t>(random() % 12));
      if (rows.back() < 0) positions.back() = static_cast<int64_t>(random()) << 20;
    }
    CHECK(!f.compute(HostSlots::kShared, rows, positions));
    for (int64_t g = 0; g < 2; ++g) {
      for (int i = 0; i < kNumSlots; ++i) {
        const int64_t wanted = i < n ? f.slot_of(g, rows[i], positions[i]) : -1;
        CHECK_EQ(f.slots[g * kNumSlots + i], wanted);
      }
    }
    for (int i = 0; i < kNumSlots; ++i) CHECK_EQ(f.slots[2 * kNumSlots + i], -1);
  }
}

TEST(consecutive_tokens_get_the_same_slots_as_unordered_tokens) {
  for (int64_t n : {7, 8, 9, 12}) {
    Fixture f;
    Slots positions;
    for (int64_t i = 0; i < n; ++i) positions.push_back(i);
    CHECK(!f.compute(0, std::vector<int32_t>(n, 2), positions));
    for (int64_t i = 0; i < n; ++i) CHECK_EQ(f.slots[i], f.slot_of(0, 2, i));
  }
}

TEST(slots_of_an_earlier_call_are_reset_to_minus_one) {
  Fixture f;
  CHECK(!f.compute(HostSlots::kShared, {1, 2, 3, 1, 2, 3, 1, 2, 3}, Slots(9, 1)));
  CHECK(!f.compute(HostSlots::kShared, {1, 2}, {5, 6}));
  for (int64_t g = 0; g < 2; ++g) {
    for (int64_t i = 2; i < kNumSlots; ++i) CHECK_EQ(f.slots[g * kNumSlots + i], -1);
  }
  f.slots[20] = 7;  // not written by this class, so the value stays
  CHECK(!f.compute(0, {1}, {5}));
  CHECK_EQ(f.slots[1], -1);
  CHECK_EQ(f.slots[20], 7);
  CHECK_EQ(f.slots[kNumSlots + 1], f.slot_of(1, 2, 6));  // slot of the other group
}

TEST(an_invalid_token_is_reported_and_nothing_is_written) {
  Fixture f;
  f.counts[2 * kRows + 1] = f.counts[kRows + 1] = 2;  // counts of row 1 in groups 1 and 2
  CHECK(!f.compute(HostSlots::kShared, {1}, {9}));
  const Slots before = f.slots;
  const auto wrong = [&](const std::vector<int32_t>& rows, const Slots& positions) {
    for (int64_t copies : {1, 5}) {  // the tokens alone, and the same tokens after other tokens
      std::vector<int32_t> r(3 * (copies - 1), 0);
      Slots p(3 * (copies - 1), 2);
      r.insert(r.end(), rows.begin(), rows.end());
      p.insert(p.end(), positions.begin(), positions.end());
      const auto text = f.compute(HostSlots::kShared, r, p);
      CHECK(text.has_value());
      if (copies == 1) return *text;
    }
    return std::string();
  };
  CHECK_EQ(wrong({4}, {0}), std::string("rows[0] is 4: expected -1 (a dummy request) to 3"));
  CHECK_EQ(wrong({0, -2}, {0, 0}),
           std::string("rows[1] is -2: expected -1 (a dummy request) to 3"));
  CHECK(wrong({0}, {12}).find("positions[0] is 12: expected 0 to 11") == 0);
  CHECK(wrong({0}, {-1}).find("positions[0] is -1: expected 0 to 11") == 0);
  CHECK(wrong({0, 1}, {11, 10}).find("positions[1] is 10: expected less, because row 1 holds") ==
        0);
  CHECK(f.slots == before);
  CHECK_EQ(f.host.num_on_device(0), 1);
}

TEST(context_slots_are_written_to_the_callers_array) {
  Fixture f;
  CHECK(!f.compute(2, {3, 3}, {0, 1}));
  const Slots before = f.slots;
  const int32_t rows[] = {3, 0};
  const int32_t starts[] = {0, 10, 14};
  Slots positions, out(14);
  for (int64_t i = 0; i < 14; ++i) positions.push_back(i < 10 ? i : i - 10);
  CHECK(!f.host.compute_into(0, rows, 2, starts, positions.data(), 14, out.data()));
  for (int64_t i = 0; i < 14; ++i) CHECK_EQ(out[i], f.slot_of(0, i < 10 ? 3 : 0, positions[i]));
  CHECK(f.slots == before);
  CHECK_EQ(f.host.num_on_device(2), 2);
  const int32_t late[] = {0, 10, 15};
  CHECK(f.host.compute_into(0, rows, 2, late, positions.data(), 14, out.data()).has_value());
}

TEST(num_on_device_follows_commits) {
  for (bool one_memory : {true, false}) {
    Fixture f(one_memory);
    CHECK(!f.compute(HostSlots::kShared, {1, 2, 3}, {1, 1, 1}));
    CHECK_EQ(f.host.num_on_device(0), one_memory ? 3 : 0);
    f.host.commit(HostSlots::kShared, 2);
    for (int64_t g = 0; g < 2; ++g) {
      CHECK_EQ(f.host.num_on_device(g), 2);
      CHECK_EQ(f.slots[g * kNumSlots + 2], -1);
      CHECK(f.slots[g * kNumSlots + 1] != -1);
    }
    f.host.commit(0, kNumSlots);  // does not increase the number of tokens
    CHECK_EQ(f.host.num_on_device(0), 2);
    f.host.note_on_device(2, 9);
    CHECK_EQ(f.host.num_on_device(2), 9);
    f.host.begin_step();
    for (int64_t g = 0; g < 3; ++g) CHECK_EQ(f.host.num_on_device(g), 0);
  }
}

}  // namespace

TEST_MAIN()
