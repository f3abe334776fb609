// SPDX-License-Identifier: Apache-2.0
#include "core/manager/clock.h"

#include "tests/check.h"

using namespace kvcache;
namespace {

TEST(the_system_clock_is_read_until_the_time_is_set) {
  Clock clock;
  CHECK_EQ(clock.now_ms(), 0);
  CHECK(clock.read());
  CHECK(clock.now_ms() >= 0);
  clock.set(1'000'000);
  CHECK(!clock.read());
  CHECK_EQ(clock.now_ms(), 1'000'000);
}

TEST(setting_an_earlier_time_is_rejected) {
  Clock clock;
  clock.set(7);
  clock.set(7);
  CHECK_THROWS(clock.set(6), "the clock is set to 6 ms: expected 7 or more");
  CHECK_EQ(clock.now_ms(), 7);
}

}  // namespace

TEST_MAIN()
