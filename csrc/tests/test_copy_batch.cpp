// SPDX-License-Identifier: Apache-2.0
// Tests when CopyBatch uses batches, and how it handles a batch that the runtime rejects.

#include "check.h"
// Must be included first, because it replaces the CUDA runtime.
#include "scripted_cuda.h"
// Must be included after the scripted runtime.
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

TEST(one_batch_call_launches_all_copies) {
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

TEST(settled_sources_may_be_read_in_any_order) {
  script = {};
  Memory memory;
  carry(memory);
  CHECK_EQ(script.order, int{cudaMemcpySrcAccessOrderStream});
  CopyBatch batch(kStream, true, true, /*settled=*/true);
  for (int i = 0; i < kCopies; ++i) batch.add(memory.to + i, memory.from + i, sizeof(int));
  batch.flush();
  CHECK_EQ(script.order, int{cudaMemcpySrcAccessOrderAny});
}

TEST(leftover_copies_of_a_failed_batch_are_dropped) {
  script = {};
  Memory memory, other;
  {
    CopyBatch left(kStream, true, true);
    left.add(memory.to, memory.from, sizeof(int));
  }
  carry(other);
  CHECK(other.has_arrived());
  CHECK_EQ(memory.to[0], 0);
}

TEST(batches_can_be_switched_off) {
  script = {};
  Memory memory;
  carry(memory, kStream, /*batched=*/false);
  CHECK(memory.has_arrived());
  CHECK_EQ(script.num_batches, 0);
  CHECK_EQ(script.num_singles, kCopies);
}

TEST(the_environment_switches_batches_off_and_on) {
  const auto num_batches = [](const char* value) {
    script = {};
    Memory memory;
    setenv("KVCACHE_BATCH_COPIES", value, 1);
    carry(memory);
    unsetenv("KVCACHE_BATCH_COPIES");
    CHECK(memory.has_arrived());
    return script.num_batches;
  };
  for (const char* off : {"0", "false", "False", "OFF", "no"}) CHECK_EQ(num_batches(off), 0);
  for (const char* on : {"", "1", "true", "on", "yes"}) CHECK_EQ(num_batches(on), 1);
}

TEST(an_unset_or_empty_variable_keeps_the_default) {
  unsetenv("KVCACHE_A_SWITCH");
  CHECK(!kvcache::switched_on("KVCACHE_A_SWITCH"));
  CHECK(kvcache::switched_on("KVCACHE_A_SWITCH", true));
  for (const auto& [value, is_on] :
       {std::pair("", false), std::pair("no", false), std::pair("1", true)}) {
    setenv("KVCACHE_A_SWITCH", value, 1);
    CHECK_EQ(kvcache::switched_on("KVCACHE_A_SWITCH"), is_on);
  }
}

TEST(the_default_stream_captures_and_mapped_addresses_prevent_batches) {
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

TEST(copies_of_a_rejected_batch_are_launched_one_by_one) {
  for (cudaError_t error : {cudaErrorInvalidValue, cudaErrorNotSupported,
                            cudaErrorCallRequiresNewerDriver, cudaErrorStreamCaptureUnsupported}) {
    script = {};
    script.batch_answer = error;
    const bool for_good =
        error == cudaErrorNotSupported || error == cudaErrorCallRequiresNewerDriver;
    for (const int round : {1, 2}) {  // an unsupported call is not retried
      Memory memory;
      carry(memory);
      CHECK(memory.has_arrived());
      CHECK_EQ(script.num_batches, for_good ? 1 : round);
      CHECK_EQ(script.num_singles, round * kCopies);
      CHECK_EQ(int{cudaGetLastError()}, int{cudaSuccess});  // a later launch must not report it
    }
    kvcache::driver_has_no_batches() = false;
  }
}

TEST(the_error_identifies_the_rejected_copy) {
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

TEST(device_errors_are_not_retried) {
  script = {};
  script.batch_answer = cudaErrorIllegalAddress;
  Memory memory;
  CHECK_EQ(refused(memory), std::string("a batch of 5 copies failed: another error"));
  CHECK_EQ(script.num_singles, 0);
  CHECK_EQ(int{cudaGetLastError()}, int{cudaSuccess});
}

TEST(batches_are_split_at_the_maximum_size) {
  script = {};
  const auto most = static_cast<int>(kvcache::kMaxDescriptors);
  std::vector<int> from(2 * kvcache::kMaxDescriptors + 1, 7), to(from.size());
  CopyBatch batch(kStream, true, true);
  for (size_t i = 0; i < from.size(); ++i) batch.add(&to[i], &from[i], sizeof(int));
  CHECK_EQ(script.num_batches, 2);
  CHECK_EQ(to[static_cast<size_t>(2 * most - 1)], 7);
  CHECK_EQ(to.back(), 0);
  batch.flush();  // flushes the remaining copy
  CHECK(from == to);
  CHECK_EQ(script.num_singles, 1);
}

}  // namespace

TEST_MAIN()
