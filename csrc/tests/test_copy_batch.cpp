// CopyBatch: when it hands over batches, and what it does where the runtime refuses one.

#include "check.h"
// The scripted runtime in the place of CUDA's.
#include "scripted_cuda.h"
// After it.
#include "ops/copy_batch.h"

namespace {

using kvcache::CopyBatch;

const auto kStream = reinterpret_cast<cudaStream_t>(8);
constexpr int kCopies = 5;

struct Memory {
  int from[kCopies] = {1, 2, 3, 4, 5};
  int to[kCopies] = {};
  bool has_arrived() const { return std::memcmp(from, to, sizeof(to)) == 0; }
};

void carry(Memory& memory, cudaStream_t stream = kStream, bool batched = true,
           bool with_host = true) {
  CopyBatch batch(stream, batched, with_host);
  for (int i = 0; i < kCopies; ++i) batch.add(memory.to + i, memory.from + i, sizeof(int));
  batch.flush();
}

std::string refused(Memory& memory) {
  try {
    carry(memory);
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

TEST(one_call_carries_all_beside_the_computing) {
  script = {};
  Memory memory;
  carry(memory);
  CHECK(memory.has_arrived());
  CHECK_EQ(script.num_batches, 1);
  CHECK_EQ(script.num_singles, 0);
  CHECK_EQ(script.flags, unsigned{cudaMemcpyFlagPreferOverlapWithCompute});
  carry(memory, kStream, true, /*with_host=*/false);
  CHECK_EQ(script.flags, unsigned{cudaMemcpyFlagDefault});
}

TEST(batches_can_be_switched_off) {
  script = {};
  Memory memory, other;
  carry(memory, kStream, /*batched=*/false);
  setenv("KVCACHE_BATCH_COPIES", "0", 1);
  carry(other);
  unsetenv("KVCACHE_BATCH_COPIES");
  CHECK(memory.has_arrived() && other.has_arrived());
  CHECK_EQ(script.num_batches, 0);
  CHECK_EQ(script.num_singles, 2 * kCopies);
}

TEST(no_batch_on_the_default_stream_in_a_capture_or_where_addresses_differ) {
  for (int reason = 0; reason < 3; ++reason) {
    script = {};
    script.capturing = reason == 1;
    script.same_address = reason == 2 ? 0 : 1;
    Memory memory;
    carry(memory, reason == 0 ? nullptr : kStream);
    CHECK(memory.has_arrived());
    CHECK_EQ(script.num_batches, 0);
    CHECK_EQ(script.num_singles, kCopies);
  }
}

TEST(what_a_batch_refuses_goes_one_by_one) {
  for (cudaError_t error : {cudaErrorInvalidValue, cudaErrorNotSupported,
                            cudaErrorCallRequiresNewerDriver, cudaErrorStreamCaptureUnsupported}) {
    script = {};
    script.batch_answer = error;
    Memory memory;
    carry(memory);
    CHECK(memory.has_arrived());
    CHECK_EQ(script.num_batches, 1);
    CHECK_EQ(script.num_singles, kCopies);
    CHECK_EQ(int{cudaGetLastError()}, int{cudaSuccess});  // a later launch must not find it
  }
}

TEST(the_copy_that_is_wrong_is_named) {
  script = {};
  script.batch_answer = cudaErrorInvalidValue;
  Memory memory;
  script.single_answer = [&](const void* from) {
    return from == memory.from + 3 ? cudaErrorInvalidValue : cudaSuccess;
  };
  const std::string text = refused(memory);
  char expected[100];
  std::snprintf(expected, sizeof(expected),
                "copy 3 (4 bytes from %p to %p) failed: ", static_cast<void*>(memory.from + 3),
                static_cast<void*>(memory.to + 3));
  CHECK_EQ(text.rfind(expected, 0), 0);
  CHECK(text.find("invalid argument; expected each side within one") != std::string::npos);
  CHECK_EQ(int{cudaGetLastError()}, int{cudaSuccess});
}

TEST(an_error_of_the_device_is_no_reason_to_try_again) {
  script = {};
  script.batch_answer = cudaErrorIllegalAddress;
  Memory memory;
  CHECK_EQ(refused(memory), std::string("a batch of 5 copies failed: another error"));
  CHECK_EQ(script.num_singles, 0);
}

TEST(a_call_carries_so_many_at_most) {
  script = {};
  const auto most = static_cast<int>(kvcache::kMaxDescriptors);
  std::vector<int> from(2 * kvcache::kMaxDescriptors + 1, 7), to(from.size());
  CopyBatch batch(kStream, true, true);
  for (size_t i = 0; i < from.size(); ++i) batch.add(&to[i], &from[i], sizeof(int));
  CHECK_EQ(script.num_batches, 2);
  CHECK_EQ(to[static_cast<size_t>(2 * most - 1)], 7);
  CHECK_EQ(to.back(), 0);
  batch.flush();  // the one that is left
  CHECK(from == to);
  CHECK_EQ(script.num_singles, 1);
}

}  // namespace

TEST_MAIN()
