// SPDX-License-Identifier: Apache-2.0
#include "core/manager/token_intake.h"

#include "tests/serving_fixture.h"

using namespace kvcache;
using namespace kvcache::test;

namespace {

struct Fixture : Serving {
  int64_t num_known(int32_t row) { return rows[row].chain->num_tokens(); }
};

TEST(token_ids_are_distributed_by_row_and_removed_again) {
  Fixture f;
  f.add_row(3), f.add_row(5);
  const int32_t asked[] = {1, 0}, ids[] = {7, 8, 9}, counts[] = {2, 1};
  StepRequest request;
  request.rows = asked;
  request.num_tokens = counts;
  request.num_rows = 2;
  request.token_ids = ids;
  request.num_ids = 3;
  request.num_token_ids = counts;
  f.intake.take_in(request);
  CHECK(f.num_known(1) == 7 && f.num_known(0) == 4);
  CHECK_EQ(f.rows[1].chain->tokens()[6], 8);
  CHECK_EQ(f.rows[0].chain->tokens()[3], 9);
  f.intake.take_back(request, 0);
  CHECK(f.num_known(1) == 5 && f.num_known(0) == 4);
  request.num_token_ids = nullptr;  // one id per row
  request.num_ids = 2;
  f.intake.take_in(request);
  CHECK(f.num_known(1) == 6 && f.num_known(0) == 5);
  f.intake.take_back(request, 1);
  CHECK(f.num_known(1) == 6 && f.num_known(0) == 4);
}

TEST(rejected_token_ids_leave_no_ids_behind) {
  Fixture f;
  f.add_row(3), f.add_row(5);
  const int32_t asked[] = {0, 1}, ids[] = {7, -1}, counts[] = {1, 1};
  StepRequest request;
  request.rows = asked;
  request.num_tokens = counts;
  request.num_rows = 2;
  request.token_ids = ids;
  request.num_ids = 2;
  CHECK_THROWS(f.intake.take_in(request), "token_ids[0] is -1");
  CHECK(f.num_known(0) == 3 && f.num_known(1) == 5);
}

TEST(token_ids_are_removed_if_a_request_of_the_step_is_rejected) {
  Fixture f;
  f.add_row(3);
  const int32_t asked = 0, id = 7, count = 1;
  StepRequest request;
  request.rows = &asked;
  request.num_tokens = &count;
  request.num_rows = 1;
  request.token_ids = &id;
  request.num_ids = 1;
  request.new_rows = {{f.chain_of(8, /*block_size=*/8), 8}};
  CHECK_THROWS(f.intake.take_in(request), "passed to a manager with block_size 4");
  CHECK_EQ(f.num_known(0), 3);
}

TEST(only_rows_that_fill_a_block_are_hashed) {
  Fixture f;
  for (int32_t row : {0, 1}) {
    f.add_row(9);
    f.rows[row].num_computed = 3 + row;
    f.publisher.refresh(row);
  }
  f.intake.hash_filled(0);
  CHECK(f.rows[0].chain->known_hashes().empty());
  f.intake.hash_filled(1);
  CHECK_EQ(f.rows[1].chain->known_hashes().size(), 2);
  const int32_t asked = 0, count = 1;
  StepRequest request;
  request.rows = &asked;
  request.num_tokens = &count;
  request.num_rows = 1;
  f.intake.take_in(request);
  CHECK_EQ(f.rows[0].chain->known_hashes().size(), 2);
}

}  // namespace

TEST_MAIN()
