// SPDX-License-Identifier: Apache-2.0
// Tests that emulated asynchronous copies arrive when the kernel waits for them, and not earlier.

#include <vector>

#include "check.h"
#include "ops/async_copy.h"

namespace {

constexpr unsigned kThreads = 4;
constexpr uint32_t kPoison = 0xCDCDCDCD;  // the initial content of dynamic shared memory

// Returns the values in the shared memory of four threads after `kernel(place, source)`.
template <class F>
std::vector<uint32_t> found_after(F&& kernel) {
  std::vector<uint32_t> source{10, 11, 12, 13}, found(kThreads);
  emul::launch(dim3(1), dim3(kThreads), kThreads * sizeof(uint32_t), [&] {
    KV_DYN_SHARED(uint32_t, shared);
    kernel(shared + threadIdx.x, source.data() + threadIdx.x);
    found[threadIdx.x] = shared[threadIdx.x];
  });
  return found;
}

const std::vector<uint32_t> kArrived{10, 11, 12, 13}, kNotArrived(kThreads, kPoison);

}  // namespace

TEST(a_copy_arrives_at_the_wait_for_its_group) {
  CHECK(found_after([](uint32_t* place, const uint32_t* source) {
          kvcache::async_copy(place, source);
          kvcache::async_copy_commit();
          kvcache::async_copy_wait<0>();
        }) == kArrived);
}

TEST(without_a_wait_nothing_arrives) {
  CHECK(found_after([](uint32_t* place, const uint32_t* source) {
          kvcache::async_copy(place, source);
          kvcache::async_copy_commit();
          __syncthreads();
        }) == kNotArrived);
}

TEST(a_wait_covers_only_committed_groups) {
  CHECK(found_after([](uint32_t* place, const uint32_t* source) {
          kvcache::async_copy(place, source);
          kvcache::async_copy_wait<0>();
        }) == kNotArrived);
}

TEST(a_wait_can_leave_the_last_groups_in_flight) {
  const auto two_groups = [](uint32_t* place, const uint32_t* source) {
    const uint32_t zero = 0;
    kvcache::async_copy(place, &zero);
    kvcache::async_copy_commit();
    kvcache::async_copy(place, source);
    kvcache::async_copy_commit();
    kvcache::async_copy_wait<1>();
  };
  CHECK(found_after(two_groups) == std::vector<uint32_t>(kThreads, 0));
  CHECK(found_after([&](uint32_t* place, const uint32_t* source) {
          two_groups(place, source);
          kvcache::async_copy_wait<0>();
        }) == kArrived);
}

TEST(a_wait_covers_only_copies_of_the_calling_thread) {
  const std::vector<uint32_t> only_the_first{10, kPoison, kPoison, kPoison};
  CHECK(found_after([](uint32_t* place, const uint32_t* source) {
          kvcache::async_copy(place, source);
          kvcache::async_copy_commit();
          if (threadIdx.x == 0) kvcache::async_copy_wait<0>();
          __syncthreads();
        }) == only_the_first);
}

TEST(copies_of_a_thread_that_exited_do_not_arrive_in_the_next_block) {
  std::vector<uint32_t> source{10}, found(2);
  emul::launch(dim3(2), dim3(1), sizeof(uint32_t), [&] {
    KV_DYN_SHARED(uint32_t, shared);
    if (blockIdx.x == 0) {
      kvcache::async_copy(shared, source.data());
      kvcache::async_copy_commit();
    }
    if (blockIdx.x == 1) kvcache::async_copy_wait<0>();
    found[blockIdx.x] = shared[0];
  });
  CHECK_EQ(found[1], kPoison);
}

TEST(a_source_changed_in_flight_is_reported) {
  uint32_t source = 7;
  CHECK_THROWS(found_after([&](uint32_t* place, const uint32_t*) {
                 kvcache::async_copy(place, &source);
                 kvcache::async_copy_commit();
                 source = 8 + threadIdx.x;
                 kvcache::async_copy_wait<0>();
               }),
               "changed before the wait");
}

TEST(a_misaligned_address_is_reported) {
  alignas(16) static char memory[64];
  const auto copy = [](size_t to, size_t from) {
    emul::launch(dim3(1), dim3(1), 0, [=] {
      kvcache::async_copy(reinterpret_cast<uint4*>(memory + 16 + to),
                          reinterpret_cast<const uint4*>(memory + 32 + from));
    });
  };
  copy(0, 0);
  CHECK_THROWS(copy(0, 8), "misaligned address of an asynchronous copy of 16 bytes");
  CHECK_THROWS(copy(8, 0), "misaligned address of an asynchronous copy of 16 bytes");
}

TEST_MAIN()
