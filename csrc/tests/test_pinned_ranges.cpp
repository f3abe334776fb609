// SPDX-License-Identifier: Apache-2.0
// Tests that PinnedRanges queries the driver once per range and device, and again after the range
// has ended.
#include "check.h"
#include "ops/pinned_ranges.h"

namespace {

using kvcache::PinnedRanges;

// A driver that counts queries.
struct Driver {
  int num_asked = 0;
  std::optional<int64_t> answer = 64;

  std::optional<int64_t> operator()(const char*) {
    ++num_asked;
    return answer;
  }
};

char memory[100];

TEST(the_driver_is_queried_once_per_range_and_device) {
  PinnedRanges ranges;
  Driver driver;
  ranges.add(memory + 10, 40);
  ranges.add(memory + 50, 40);
  for (int at : {10, 17, 49}) CHECK_EQ(*ranges.shift(0, memory + at, driver), 64);
  CHECK_EQ(driver.num_asked, 1);
  driver.answer = -8;
  CHECK_EQ(*ranges.shift(0, memory + 50, driver), -8);
  CHECK_EQ(*ranges.shift(1, memory + 10, driver), -8);
  CHECK_EQ(*ranges.shift(0, memory + 10, driver), 64);
  CHECK_EQ(driver.num_asked, 3);
  for (int at : {9, 90, 9, 99}) CHECK_EQ(*ranges.shift(0, memory + at, driver), -8);
  CHECK_EQ(driver.num_asked, 7);  // each time, outside of ranges
}

TEST(an_unpinned_range_is_forgotten) {
  PinnedRanges ranges;
  Driver driver;
  ranges.add(memory, 50);
  CHECK_EQ(*ranges.shift(0, memory, driver), 64);
  ranges.remove(memory);
  driver.answer = std::nullopt;  // the memory is no longer pinned
  CHECK(!ranges.shift(0, memory, driver));
  ranges.add(memory, 20);  // replaces it with a smaller range at a different device address
  driver.answer = 128;
  CHECK_EQ(*ranges.shift(0, memory, driver), 128);
  CHECK_EQ(*ranges.shift(0, memory + 20, driver), 128);
  CHECK_EQ(driver.num_asked, 4);
}

TEST(a_missing_device_address_is_not_cached) {
  PinnedRanges ranges;
  Driver driver;
  driver.answer = std::nullopt;
  ranges.add(memory, 50);
  CHECK(!ranges.shift(0, memory, driver));
  driver.answer = 0;
  CHECK_EQ(*ranges.shift(0, memory, driver), 0);
}

}  // namespace

TEST_MAIN()
