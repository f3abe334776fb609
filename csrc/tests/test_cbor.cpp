// SPDX-License-Identifier: Apache-2.0
#include "core/hashing/cbor.h"

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "tests/check.h"

using namespace kvcache;

namespace {

std::string expected(const std::vector<int32_t>& values) {
  std::string out;
  for (const int32_t value : values) append_int(&out, value);
  return out;
}

// Also checks that only the promised bytes after the end are overwritten.
std::string written(const std::vector<int32_t>& values) {
  const size_t most = values.size() * kMaxHeadBytes;
  std::vector<uint8_t> buffer(most + kIntsOverwritten + 16, 0xEE);
  const uint8_t* end =
      write_ints(buffer.data(), values.data(), static_cast<int64_t>(values.size()));
  for (const uint8_t* p = end + kIntsOverwritten; p < buffer.data() + buffer.size(); ++p) {
    CHECK_EQ(int{*p}, 0xEE);
  }
  return {reinterpret_cast<const char*>(buffer.data()), reinterpret_cast<const char*>(end)};
}

TEST(boundary_values_are_encoded_in_the_shortest_form) {
  const std::vector<int32_t> limits = {0,  23,  24,  255,  256,  65535,  65536,  INT32_MAX,
                                       -1, -24, -25, -256, -257, -65536, -65537, INT32_MIN};
  CHECK(written(limits) == expected(limits));
  for (const int32_t value : limits) CHECK(written({value}) == expected({value}));
}

TEST(batch_encoding_equals_encoding_one_by_one) {
  std::mt19937 random(7);
  for (int n = 0; n < 70; ++n) {
    for (int round = 0; round < 50; ++round) {
      std::vector<int32_t> values(static_cast<size_t>(n));
      for (int32_t& value : values) {
        value = static_cast<int32_t>(random() >> (random() % 32));
        if (random() % 8 == 0) value = ~value;
      }
      CHECK(written(values) == expected(values));
    }
  }
}

}  // namespace

TEST_MAIN()
