// SPDX-License-Identifier: Apache-2.0
#include "core/manager/step_fills.h"

#include "tests/check.h"

using namespace kvcache;

namespace {

TEST(blocks_map_to_the_row_that_fills_them_until_the_next_step) {
  StepFills fills;
  CHECK_EQ(fills.row_of(3), -1);
  fills.add(3, 7);
  CHECK_EQ(fills.row_of(3), 7);
  CHECK(fills.fills(3) && !fills.fills(4));
  fills.begin();
  CHECK(!fills.fills(3));
}

}  // namespace

TEST_MAIN()
