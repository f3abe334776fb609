// SPDX-License-Identifier: Apache-2.0
#include "core/growing_array.h"

#include <cstdint>
#include <random>
#include <vector>

#include "tests/check.h"

using kvcache::GrowingArray;

namespace {

constexpr size_t kMostValues = GrowingArray<int64_t>::kMostCopied / sizeof(int64_t);

TEST(the_array_holds_the_same_values_as_a_vector) {
  std::mt19937 random(7);
  for (int round = 0; round < 20; ++round) {
    GrowingArray<int64_t> array;
    std::vector<int64_t> vector;
    for (int i = 0; i < 40; ++i) {
      const size_t n = random() % (kMostValues / 5);
      std::vector<int64_t> values(n);
      for (int64_t& value : values) value = static_cast<int64_t>(random());
      switch (random() % 6) {
        case 0:
          array.push_back(i);
          vector.push_back(i);
          break;
        case 1:  // makes the array longer or shorter
          array.resize(array.size() / 2 + n);
          vector.resize(vector.size() / 2 + n);
          break;
        case 2:
          array.reserve(n);
          break;
        case 3:
          array.assign(values.data(), n);
          vector = values;
          break;
        default:
          array.append(values.data(), n);
          vector.insert(vector.end(), values.begin(), values.end());
      }
      CHECK(array == vector);
      CHECK(array.capacity() >= array.size());
    }
  }
}

TEST(growth_copies_at_most_the_bound) {
  GrowingArray<int64_t> array;
  array.resize(kMostValues + 1);
  array[kMostValues] = 3;
  const size_t before = array.capacity();
  CHECK(before * sizeof(int64_t) > GrowingArray<int64_t>::kMostCopied);
  array.resize(8 * before);  // the kernel moves the pages
  CHECK_EQ(array[kMostValues], 3);
  CHECK_EQ(array[8 * before - 1], 0);
}

TEST(a_large_reserve_provides_room_to_grow) {
  GrowingArray<int64_t> array;
  array.reserve(2 * kMostValues);
  CHECK_EQ(array.capacity(), 4 * kMostValues);
  GrowingArray<int64_t> small;
  small.reserve(10);
  CHECK_EQ(small.capacity(), 10);
}

}  // namespace

TEST_MAIN()
