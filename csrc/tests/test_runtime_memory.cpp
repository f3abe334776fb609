// SPDX-License-Identifier: Apache-2.0
// Tests the CUDA runtime without a GPU: allocations, pinned and registered memory, and copies.
#include <cuda_runtime_api.h>

#include <array>
#include <cstring>
#include <vector>

#include "tests/check.h"
#include "tests/child.h"
#include "tests/runtime_streams.h"

namespace {

using namespace kvcache::test;

constexpr size_t kPage = 4096;

char* device_bytes(size_t n) {
  void* p = nullptr;
  CHECK_EQ(cudaMalloc(&p, n), cudaSuccess);
  return static_cast<char*>(p);
}

// Page-aligned memory that the test owns.
struct Pages {
  explicit Pages(size_t n) : bytes(n * kPage) {
    memory = static_cast<char*>(std::aligned_alloc(kPage, bytes));
    std::memset(memory, 0, bytes);
  }
  ~Pages() { std::free(memory); }
  char* memory;
  size_t bytes;
};

cudaPointerAttributes attributes_of(const void* p) {
  cudaPointerAttributes attributes;
  CHECK_EQ(cudaPointerGetAttributes(&attributes, p), cudaSuccess);
  return attributes;
}

}  // namespace

TEST(host_access_to_device_memory_is_reported) {
  dies_saying("host code touched device memory", [] { *device_bytes(64) = 1; });
}

CHILD_TEST(device_memory_is_limited_and_freed_memory_is_reusable,
           {"KVCACHE_GPULESS_DEVICE_BYTES", "8192"}) {
  void* p = nullptr;
  CHECK_EQ(cudaMalloc(&p, 8193), cudaErrorMemoryAllocation);
  CHECK(p == nullptr);
  CHECK_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
  CHECK_EQ(cudaGetLastError(), cudaSuccess);
  char* all = device_bytes(8192);
  CHECK_EQ(cudaMalloc(&p, 1), cudaErrorMemoryAllocation);
  CHECK_EQ(cudaFree(all), cudaSuccess);
  CHECK(device_bytes(1) != nullptr);
}

CHILD_TEST(a_copy_of_freed_memory_or_across_the_end_of_an_allocation_is_an_error) {
  char *a = device_bytes(100), *b = device_bytes(100);
  CHECK_EQ(cudaMemcpy(a, b, 100, cudaMemcpyDefault), cudaSuccess);
  CHECK_EQ(cudaMemcpy(a, b, 101, cudaMemcpyDefault), cudaErrorInvalidValue);
  CHECK_EQ(cudaMemcpy(a + 1, b, 100, cudaMemcpyDefault), cudaErrorInvalidValue);
  CHECK_EQ(cudaMemset(a + 50, 0, 51), cudaErrorInvalidValue);
  CHECK_EQ(cudaFree(b), cudaSuccess);
  CHECK_EQ(cudaMemcpy(a, b, 100, cudaMemcpyDefault), cudaErrorInvalidValue);
  CHECK_EQ(cudaFree(b), cudaErrorInvalidValue);
}

CHILD_TEST(the_direction_of_a_copy_is_checked) {
  char* device = device_bytes(8);
  char host[8] = {};
  CHECK_EQ(cudaMemcpy(device, host, 8, cudaMemcpyDeviceToHost), cudaErrorInvalidValue);
  CHECK_EQ(cudaMemcpy(host, device, 8, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  CHECK_EQ(cudaMemcpy(host, device, 8, cudaMemcpyDeviceToHost), cudaSuccess);
}

CHILD_TEST(overlapping_copies_and_fills_of_pageable_memory_are_errors) {
  char* device = nullptr;
  void* pinned = nullptr;
  CHECK_EQ(cudaMalloc(reinterpret_cast<void**>(&device), 64), cudaSuccess);
  CHECK_EQ(cudaMallocHost(&pinned, 64), cudaSuccess);
  cudaStream_t stream = nullptr;
  CHECK_EQ(cudaStreamCreate(&stream), cudaSuccess);
  const auto copy = [&](size_t to, size_t from) {
    return cudaMemcpyAsync(device + to, device + from, 16, cudaMemcpyDefault, stream);
  };
  CHECK_EQ(copy(8, 0), cudaErrorInvalidValue);
  CHECK_EQ(copy(0, 15), cudaErrorInvalidValue);
  CHECK_EQ(copy(16, 0), cudaSuccess);
  // Copies columns within one matrix.
  CHECK_EQ(cudaMemcpy2DAsync(device + 8, 16, device, 16, 8, 4, cudaMemcpyDefault, stream),
           cudaSuccess);
  char pageable[16];
  CHECK_EQ(cudaMemset(pageable, 1, 16), cudaErrorInvalidValue);
  CHECK_EQ(cudaMemset(pinned, 1, 16), cudaSuccess);
  CHECK_EQ(cudaMemset(device, 1, 16), cudaSuccess);
}

CHILD_TEST(registered_ranges_share_no_page) {
  Pages p(4);
  CHECK_EQ(cudaHostRegister(p.memory, 100, cudaHostRegisterDefault), cudaSuccess);
  CHECK_EQ(cudaHostRegister(p.memory + 200, 100, 0), cudaErrorHostMemoryAlreadyRegistered);
  CHECK_EQ(cudaHostRegister(p.memory + kPage, kPage, 0), cudaSuccess);
  CHECK_EQ(cudaHostUnregister(p.memory + 1), cudaErrorHostMemoryNotRegistered);
  CHECK_EQ(cudaHostUnregister(p.memory), cudaSuccess);
  CHECK_EQ(cudaHostRegister(p.memory + 200, 100, 0), cudaSuccess);
  CHECK_EQ(cudaHostRegister(p.memory, 0, 0), cudaErrorInvalidValue);
  CHECK_EQ(cudaHostRegister(p.memory + 3 * kPage, 1, 0x80), cudaErrorInvalidValue);
}

CHILD_TEST(pointer_attributes_cover_registered_memory_from_its_first_byte) {
  Pages p(2);
  CHECK_EQ(attributes_of(p.memory).type, cudaMemoryTypeUnregistered);
  CHECK_EQ(cudaHostRegister(p.memory + 8, kPage, 0), cudaSuccess);
  CHECK_EQ(attributes_of(p.memory).type, cudaMemoryTypeUnregistered);
  CHECK_EQ(attributes_of(p.memory + 8).type, cudaMemoryTypeHost);
  CHECK(attributes_of(p.memory + 9).devicePointer == p.memory + 9);
  CHECK_EQ(attributes_of(p.memory + 8 + kPage).type, cudaMemoryTypeUnregistered);
  char* device = device_bytes(8);
  CHECK_EQ(attributes_of(device + 7).type, cudaMemoryTypeDevice);
  CHECK(attributes_of(device).hostPointer == nullptr);
}

CHILD_TEST(registration_fails_beyond_the_limit_of_locked_memory,
           {"KVCACHE_GPULESS_LOCKED_BYTES", "8192"}) {
  Pages p(4);
  CHECK_EQ(cudaHostRegister(p.memory, 3 * kPage, 0), cudaErrorMemoryAllocation);
  CHECK_EQ(cudaHostRegister(p.memory, 2 * kPage, 0), cudaSuccess);
  void* pinned = nullptr;
  CHECK_EQ(cudaHostAlloc(&pinned, 1, 0), cudaErrorMemoryAllocation);
  CHECK_EQ(cudaHostUnregister(p.memory), cudaSuccess);
  CHECK_EQ(cudaHostAlloc(&pinned, 1, 0), cudaSuccess);
  CHECK_EQ(cudaFreeHost(pinned), cudaSuccess);
}

CHILD_TEST(device_pointers_of_host_memory_can_differ_and_reach_the_same_bytes,
           {"KVCACHE_GPULESS_DEVICE_POINTERS", "different"}) {
  Pages p(2);
  p.memory[5] = 7;
  CHECK_EQ(cudaHostRegister(p.memory, p.bytes, 0), cudaSuccess);
  CHECK_EQ(p.memory[5], 7);
  void* seen = nullptr;
  CHECK_EQ(cudaHostGetDevicePointer(&seen, p.memory + 5, 0), cudaSuccess);
  CHECK(seen != p.memory + 5);
  CHECK(attributes_of(p.memory + 5).devicePointer == seen);
  CHECK_EQ(*static_cast<char*>(seen), 7);
  p.memory[5] = 8;
  CHECK_EQ(*static_cast<char*>(seen), 8);
  int same = 1;
  cudaDeviceGetAttribute(&same, cudaDevAttrCanUseHostPointerForRegisteredMem, 0);
  CHECK_EQ(same, 0);
  CHECK_EQ(cudaHostUnregister(p.memory), cudaSuccess);
  CHECK_EQ(p.memory[5], 8);
}

CHILD_TEST(an_operand_partly_in_a_registered_range_is_an_error) {
  Pages p(2);
  char* device = device_bytes(p.bytes);
  CHECK_EQ(cudaMemcpy(device, p.memory, p.bytes, cudaMemcpyDefault), cudaSuccess);
  CHECK_EQ(cudaHostRegister(p.memory + kPage, kPage, 0), cudaSuccess);
  CHECK_EQ(cudaMemcpy(device, p.memory, p.bytes, cudaMemcpyDefault), cudaErrorInvalidValue);
  CHECK_EQ(cudaMemcpy(device, p.memory, kPage, cudaMemcpyDefault), cudaSuccess);
}

TEST(a_pageable_source_is_read_during_the_call_and_a_pinned_one_later) {
  int num_late = 0;
  for (const char* seed : {"1", "2", "3", "4", "5", "6", "7", "8"}) {
    const auto ended = kvcache::test::run_child({{"KVCACHE_GPULESS_SEED", seed}}, [] {
      char* device = device_bytes(2);
      char pageable = 1, back[2] = {};
      void* pinned = nullptr;
      CHECK_EQ(cudaHostAlloc(&pinned, 1, 0), cudaSuccess);
      *static_cast<char*>(pinned) = 1;
      cudaStream_t stream = new_stream();
      cudaMemcpyAsync(device, &pageable, 1, cudaMemcpyDefault, stream);
      cudaMemcpyAsync(device + 1, pinned, 1, cudaMemcpyDefault, stream);
      pageable = *static_cast<char*>(pinned) = 2;
      // With a pageable destination, the call returns when the bytes have arrived.
      CHECK_EQ(cudaMemcpyAsync(back, device, 2, cudaMemcpyDefault, stream), cudaSuccess);
      CHECK_EQ(back[0], 1);
      if (back[1] == 2) throw kvcache::test::Failure("late");
    });
    num_late += !ended.normally;
    CHECK(ended.normally || ended.output == "late\n");
  }
  CHECK(num_late > 4);
}

CHILD_TEST(rows_of_a_pitched_copy_land_where_they_belong) {
  const std::array<char, 6> rows = {1, 2, 3, 4, 5, 6};
  std::array<char, 8> back = {};
  char* device = device_bytes(8);
  CHECK_EQ(cudaMemset(device, 9, 8), cudaSuccess);
  CHECK_EQ(cudaMemcpy2DAsync(device, 4, rows.data(), 3, 2, 2, cudaMemcpyDefault, nullptr),
           cudaSuccess);
  CHECK_EQ(cudaMemcpy(back.data(), device, 8, cudaMemcpyDefault), cudaSuccess);
  CHECK(back == (std::array<char, 8>{1, 2, 9, 9, 4, 5, 9, 9}));
}

namespace {

cudaError_t batch(cudaStream_t stream, std::vector<void*> to, std::vector<const void*> from,
                  std::vector<size_t> bytes, int order = cudaMemcpySrcAccessOrderStream) {
  cudaMemcpyAttributes attributes{};
  attributes.srcAccessOrder = static_cast<cudaMemcpySrcAccessOrder>(order);
  size_t first = 0;
  return cudaMemcpyBatchAsync(to.data(), from.data(), bytes.data(), to.size(), &attributes, &first,
                              1, stream);
}

}  // namespace

CHILD_TEST(batches_copy_and_reject_invalid_arguments) {
  char* device = device_bytes(4);
  char host[4] = {1, 2, 3, 4}, back[4] = {};
  cudaStream_t stream = new_stream();
  CHECK_EQ(batch(nullptr, {device}, {host}, {4}), cudaErrorInvalidValue);
  CHECK_EQ(batch(stream, {device}, {host}, {4}, 0), cudaErrorInvalidValue);
  CHECK_EQ(batch(stream, {device, device}, {host, host}, {4, 5}), cudaErrorInvalidValue);
  CHECK_EQ(batch(stream, {device, device}, {host, host}, {4, 0}), cudaErrorInvalidValue);
  CHECK_EQ(batch(stream, {device, device + 2}, {host + 2, host}, {2, 2}), cudaSuccess);
  CHECK_EQ(batch(stream, {back}, {device}, {4}), cudaSuccess);
  CHECK_EQ(back[0], 3);
  CHECK_EQ(back[3], 2);
}

CHILD_TEST(copies_are_counted_by_kind_and_by_the_memory_that_they_touch) {
  char* device = device_bytes(8);
  char pageable[8] = {};
  void* pinned = nullptr;
  CHECK_EQ(cudaMallocHost(&pinned, 8), cudaSuccess);
  CHECK_EQ(count("allocations"), 2);
  cudaStream_t stream = new_stream();
  CHECK_EQ(cudaMemcpyAsync(pinned, device, 8, cudaMemcpyDefault, stream), cudaSuccess);
  CHECK_EQ(count("copies"), 1);
  CHECK_EQ(count("pageable_copies") + count("legacy_work") + count("waits"), 0);
  CHECK_EQ(cudaMemcpyAsync(pageable, device, 8, cudaMemcpyDefault, nullptr), cudaSuccess);
  CHECK_EQ(count("copies"), 2);
  CHECK_EQ(count("pageable_copies"), 1);
  CHECK_EQ(count("legacy_work"), 1);
  CHECK_EQ(count("waits"), 1);
  auto* const host = static_cast<char*>(pinned);
  CHECK_EQ(batch(stream, {device, device + 4}, {host, pageable}, {4, 4}), cudaSuccess);
  CHECK_EQ(count("batches"), 1);
  CHECK_EQ(count("batched_copies"), 2);
  CHECK_EQ(count("pageable_copies"), 2);
  CHECK_EQ(count("copies"), 2);
  CHECK_EQ(cudaMemsetAsync(device, 0, 8, stream), cudaSuccess);
  CHECK_EQ(count("fills"), 1);
}

CHILD_TEST(queries_of_pointers_and_of_the_device_are_counted) {
  char* device = device_bytes(8);
  (void)attributes_of(device);
  unsigned flags = 0;
  CHECK_EQ(cudaHostGetFlags(&flags, device), cudaErrorInvalidValue);
  void* mapped = nullptr;
  CHECK_EQ(cudaHostGetDevicePointer(&mapped, device, 0), cudaErrorInvalidValue);
  CHECK_EQ(count("pointer_queries"), 3);
  int value = 0;
  CHECK_EQ(cudaDeviceGetAttribute(&value, cudaDevAttrWarpSize, 0), cudaSuccess);
  size_t free_bytes = 0, total = 0;
  CHECK_EQ(cudaMemGetInfo(&free_bytes, &total), cudaSuccess);
  CHECK_EQ(count("device_queries"), 2);
}

TEST(a_copy_may_cross_registered_neighbours_if_configured) {
  for (const bool joined : {false, true}) {
    in_child({{"KVCACHE_GPULESS_NEIGHBOURS", joined ? "joined" : "apart"}}, [&] {
      char* device = device_bytes(2 * kPage);
      const Pages host(3);
      CHECK_EQ(cudaHostRegister(host.memory, kPage, 0), cudaSuccess);
      CHECK_EQ(cudaHostRegister(host.memory + kPage, kPage, 0), cudaSuccess);
      const auto across = joined ? cudaSuccess : cudaErrorInvalidValue;
      CHECK_EQ(cudaMemcpy(device, host.memory, 2 * kPage, cudaMemcpyDefault), across);
      // Copies must not extend into memory that is not registered.
      CHECK_EQ(cudaMemcpy(device, host.memory + kPage, kPage + 1, cudaMemcpyDefault),
               cudaErrorInvalidValue);
    });
  }
}

CHILD_TEST(batches_can_be_made_to_fail, {"KVCACHE_GPULESS_BATCHES", "fail"}) {
  char* device = device_bytes(4);
  char host[4] = {};
  cudaStream_t stream = new_stream();
  CHECK_EQ(batch(stream, {device}, {host}, {4}), cudaErrorInvalidValue);
  CHECK_EQ(cudaMemcpyAsync(device, host, 4, cudaMemcpyDefault, stream), cudaSuccess);
}

TEST(errors_have_their_names_and_texts) {
  CHECK_EQ(std::string(cudaGetErrorName(cudaErrorInvalidValue)), "cudaErrorInvalidValue");
  CHECK_EQ(std::string(cudaGetErrorString(cudaErrorInvalidValue)), "invalid argument");
  CHECK_EQ(std::string(cudaGetErrorString(cudaErrorStreamCaptureUnsupported)),
           "operation not permitted when stream is capturing");
  CHECK_EQ(std::string(cudaGetErrorName(static_cast<cudaError_t>(12345))),
           "unrecognized error code");
}

TEST_MAIN()
