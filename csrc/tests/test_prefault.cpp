#include "core/prefault.h"

#include <sys/mman.h>
#include <unistd.h>

#include <memory>
#include <vector>

#include "core/pool/block_pool.h"
#include "core/zeroed_array.h"
#include "tests/check.h"

using kvcache::BlockPool;
using kvcache::Prefault;
using kvcache::ZeroedArray;

namespace {

constexpr size_t kNumBytes = 64 << 12;

size_t num_resident(const ZeroedArray<char>& array) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  std::vector<unsigned char> pages((array.num_bytes() + page - 1) / page);
  CHECK_EQ(mincore(const_cast<char*>(array.data()), array.num_bytes(), pages.data()), 0);
  size_t n = 0;
  for (unsigned char each : pages) n += each & 1;
  return n * page;
}

TEST(arrays_made_in_its_life_are_committed) {
  Prefault prefault(/*is_enabled=*/true);
  ZeroedArray<char> array(kNumBytes);
  CHECK_EQ(num_resident(array), 0);
  prefault.commit();
  ZeroedArray<char> later(kNumBytes);
  CHECK_EQ(num_resident(array), kNumBytes);
  CHECK_EQ(num_resident(later), 0);
  CHECK_EQ(prefault.num_bytes(), static_cast<int64_t>(kNumBytes));
  CHECK(prefault.seconds() > 0);
  for (size_t i = 0; i < kNumBytes; ++i) CHECK_EQ(array[i], 0);
}

TEST(content_is_kept) {
  Prefault prefault(/*is_enabled=*/true);
  ZeroedArray<char> array(kNumBytes);
  array[5] = 7;
  prefault.commit();
  CHECK_EQ(array[5], 7);
}

TEST(nothing_is_committed_where_it_is_disabled) {
  Prefault prefault(/*is_enabled=*/false);
  ZeroedArray<char> array(kNumBytes);
  prefault.commit();
  CHECK_EQ(num_resident(array), 0);
  CHECK_EQ(prefault.num_bytes(), 0);
}

TEST(more_than_half_of_the_available_memory_is_left_uncommitted) {
  CHECK(kvcache::available_memory() > 0);
  Prefault prefault(/*is_enabled=*/true);
  ZeroedArray<char> small(kNumBytes);
  ZeroedArray<char> large(static_cast<size_t>(kvcache::available_memory()));
  prefault.commit();
  CHECK_EQ(prefault.num_bytes(), 0);
  CHECK_EQ(num_resident(small), 0);
}

TEST(a_destroyed_array_is_forgotten) {
  Prefault prefault(/*is_enabled=*/true);
  std::make_unique<ZeroedArray<char>>(kNumBytes).reset();
  prefault.commit();
  CHECK_EQ(prefault.num_bytes(), 0);
}

TEST(nested_ones_are_independent) {
  Prefault outer(/*is_enabled=*/true);
  {
    Prefault inner(/*is_enabled=*/true);
    ZeroedArray<char> array(kNumBytes);
    inner.commit();
    CHECK_EQ(inner.num_bytes(), static_cast<int64_t>(kNumBytes));
  }
  {
    const Prefault abandoned(/*is_enabled=*/true);  // as after an exception in a constructor
  }
  ZeroedArray<char> array(kNumBytes);
  outer.commit();
  CHECK_EQ(outer.num_bytes(), static_cast<int64_t>(kNumBytes));
}

TEST(small_pages_are_committed_one_by_one) {
  ZeroedArray<char> array(size_t{8} << 20, kvcache::Pages::kSmall);
  array[size_t{4} << 20] = 1;
  CHECK_EQ(num_resident(array), static_cast<size_t>(sysconf(_SC_PAGESIZE)));
}

TEST(all_arrays_of_a_pool_are_committed) {
  Prefault prefault(/*is_enabled=*/true);
  const BlockPool pool(1000);
  prefault.commit();
  CHECK(prefault.num_bytes() >= 1000 * 84);
}

}  // namespace

TEST_MAIN()
