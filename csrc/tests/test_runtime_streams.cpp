// SPDX-License-Identifier: Apache-2.0
// Tests the CUDA runtime without a GPU: the orders that streams and events enforce or allow.
#include <cuda_runtime_api.h>

#include <chrono>
#include <set>
#include <string>
#include <thread>

#include "tests/check.h"
#include "tests/child.h"
#include "tests/runtime_streams.h"

namespace {

using namespace kvcache::test;

// Returns the values of `ran` after `body` for several seeds.
template <class Body>
std::set<std::string> orders(Body&& body) {
  std::set<std::string> seen;
  for (int seed = 1; seed <= 30; ++seed) {
    const auto ended =
        kvcache::test::run_child({{"KVCACHE_GPULESS_SEED", std::to_string(seed).c_str()}}, [&] {
          body();
          std::fprintf(stderr, "%s", ran.c_str());
        });
    CHECK(ended.normally);
    seen.insert(ended.output);
  }
  return seen;
}

}  // namespace

TEST(streams_without_events_run_in_any_order_and_each_in_its_own) {
  const auto seen = orders([] {
    cudaStream_t a = new_stream(), b = new_stream();
    note(a, "a");
    note(a, "A");
    note(b, "b");
    CHECK_EQ(cudaDeviceSynchronize(), cudaSuccess);
  });
  CHECK(seen == (std::set<std::string>{"aAb", "abA", "baA"}));
}

TEST(work_waits_for_its_event) {
  const auto seen = orders([] {
    cudaStream_t a = new_stream(), b = new_stream();
    note(a, "a");
    CHECK_EQ(cudaStreamWaitEvent(b, recorded(a), 0), cudaSuccess);
    note(b, "b");
    CHECK_EQ(cudaDeviceSynchronize(), cudaSuccess);
  });
  CHECK(seen == std::set<std::string>{"ab"});
}

TEST(a_wait_refers_to_the_latest_record_before_it) {
  const auto seen = orders([] {
    cudaStream_t a = new_stream(), b = new_stream(), c = new_stream();
    note(a, "a");
    cudaEvent_t event = recorded(a);
    CHECK_EQ(cudaStreamWaitEvent(b, event, 0), cudaSuccess);
    note(c, "c");
    CHECK_EQ(cudaEventRecord(event, c), cudaSuccess);
    CHECK_EQ(cudaEventDestroy(event), cudaSuccess);
    note(b, "b");
    CHECK_EQ(cudaStreamSynchronize(b), cudaSuccess);
  });
  for (const std::string& order : seen) CHECK(order.find('a') < order.find('b'));
  CHECK_EQ(seen.count("ab"), 1);  // c may not have run
}

TEST(the_null_stream_waits_for_blocking_streams_and_they_for_it) {
  const auto blocking = orders([] {
    cudaStream_t a = new_stream(cudaStreamDefault);
    note(a, "a");
    note(nullptr, "0");
    note(a, "A");
    CHECK_EQ(cudaDeviceSynchronize(), cudaSuccess);
  });
  CHECK(blocking == std::set<std::string>{"a0A"});
  const auto not_blocking = orders([] {
    cudaStream_t a = new_stream();
    note(a, "a");
    note(nullptr, "0");
    note(a, "A");
    CHECK_EQ(cudaDeviceSynchronize(), cudaSuccess);
  });
  CHECK_EQ(not_blocking.size(), 3);
}

CHILD_TEST(events_are_queried_waited_for_and_timed) {
  cudaStream_t a = new_stream();
  cudaEvent_t unrecorded = nullptr, untimed = nullptr;
  CHECK_EQ(cudaEventCreate(&unrecorded), cudaSuccess);
  CHECK_EQ(cudaEventQuery(unrecorded), cudaSuccess);
  cudaEvent_t first = recorded(a);
  note(a, "a");
  cudaEvent_t second = recorded(a);
  float ms = -1;
  CHECK_EQ(cudaEventSynchronize(second), cudaSuccess);
  CHECK_EQ(ran, "a");
  CHECK_EQ(cudaEventQuery(second), cudaSuccess);
  CHECK_EQ(cudaEventElapsedTime(&ms, first, second), cudaSuccess);
  CHECK(ms >= 0);
  CHECK_EQ(cudaEventElapsedTime(&ms, unrecorded, second), cudaErrorInvalidResourceHandle);
  CHECK_EQ(cudaEventCreateWithFlags(&untimed, cudaEventDisableTiming), cudaSuccess);
  CHECK_EQ(cudaEventRecord(untimed, a), cudaSuccess);
  CHECK_EQ(cudaEventElapsedTime(&ms, first, untimed), cudaErrorInvalidResourceHandle);
}

TEST(work_is_not_ready_until_it_ran) {
  const auto seen = orders([] {
    cudaStream_t a = new_stream();
    note(a, "a");
    const cudaError_t error = cudaStreamQuery(a);
    CHECK_EQ(error == cudaSuccess, ran == "a");
    if (error != cudaSuccess) CHECK_EQ(error, cudaErrorNotReady);
  });
  CHECK(seen == (std::set<std::string>{"", "a"}));
}

CHILD_TEST(streams_proceed_without_runtime_calls) {
  note(new_stream(), "a");
  for (int i = 0; i < 500 && ran.empty(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  CHECK_EQ(ran, "a");
}

TEST(a_seed_repeats_its_order_and_late_0_runs_work_immediately) {
  const auto body = [] {
    cudaStream_t a = new_stream(), b = new_stream();
    for (const char* letter : {"1", "2", "3"}) {
      note(a, letter);
      note(b, "b");
    }
    CHECK_EQ(cudaDeviceSynchronize(), cudaSuccess);
    std::fprintf(stderr, "%s", ran.c_str());
  };
  const Variables seed = {{"KVCACHE_GPULESS_SEED", "7"}};
  CHECK_EQ(kvcache::test::run_child(seed, body).output,
           kvcache::test::run_child(seed, body).output);
  CHECK_EQ(kvcache::test::run_child({{"KVCACHE_GPULESS_LATE", "0"}}, body).output, "1b2b3b");
}

CHILD_TEST(priorities_are_clamped_and_destroyed_streams_are_rejected) {
  cudaStream_t stream = nullptr;
  int least = 1, greatest = 1, priority = 1;
  CHECK_EQ(cudaDeviceGetStreamPriorityRange(&least, &greatest), cudaSuccess);
  CHECK(greatest < least);
  CHECK_EQ(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, -100), cudaSuccess);
  CHECK_EQ(cudaStreamGetPriority(stream, &priority), cudaSuccess);
  CHECK_EQ(priority, greatest);
  note(stream, "a");
  CHECK_EQ(cudaStreamDestroy(stream), cudaSuccess);
  CHECK_EQ(ran, "a");
  CHECK_EQ(cudaStreamSynchronize(stream), cudaErrorInvalidResourceHandle);
}

CHILD_TEST(a_graph_launched_on_the_legacy_stream_is_work_there) {
  const cudaStream_t stream = new_stream();
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  CHECK_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), cudaSuccess);
  note(stream, "a");
  CHECK_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  CHECK_EQ(cudaGraphInstantiateWithFlags(&executable, graph, 0), cudaSuccess);
  CHECK_EQ(cudaGraphLaunch(executable, stream), cudaSuccess);
  CHECK_EQ(count("legacy_work"), 0);
  CHECK_EQ(cudaGraphLaunch(executable, nullptr), cudaSuccess);
  CHECK_EQ(count("legacy_work"), 1);
}

CHILD_TEST(waits_and_queries_of_the_host_are_counted) {
  const cudaStream_t stream = new_stream();
  const cudaEvent_t event = recorded(stream);
  (void)cudaEventQuery(event);
  (void)cudaStreamQuery(stream);
  CHECK_EQ(count("event_queries"), 2);
  cudaStreamCaptureStatus status{};
  CHECK_EQ(cudaStreamIsCapturing(stream, &status), cudaSuccess);
  CHECK_EQ(count("capture_queries"), 1);
  CHECK_EQ(count("waits"), 0);
  CHECK_EQ(cudaEventSynchronize(event), cudaSuccess);
  CHECK_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  CHECK_EQ(cudaDeviceSynchronize(), cudaSuccess);
  CHECK_EQ(count("waits"), 3);
}

TEST_MAIN()
