// SPDX-License-Identifier: Apache-2.0
// Tests the CUDA runtime without a GPU: which calls a capture records or rejects, and which calls
// invalidate it.
#include <cuda_runtime_api.h>

#include <string>
#include <thread>

#include "tests/check.h"
#include "tests/child.h"
#include "tests/runtime_streams.h"

namespace {

using namespace kvcache::test;

constexpr auto kGlobal = cudaStreamCaptureModeGlobal;
constexpr auto kThreadLocal = cudaStreamCaptureModeThreadLocal;
constexpr auto kRelaxed = cudaStreamCaptureModeRelaxed;

cudaStream_t capturing(cudaStreamCaptureMode mode) {
  cudaStream_t stream = new_stream();
  CHECK_EQ(cudaStreamBeginCapture(stream, mode), cudaSuccess);
  return stream;
}

cudaError_t end(cudaStream_t stream, cudaGraph_t* graph = nullptr) {
  cudaGraph_t unused = nullptr;
  return cudaStreamEndCapture(stream, graph == nullptr ? &unused : graph);
}

cudaError_t query_in_another_thread(cudaStreamCaptureMode mode) {
  cudaEvent_t event = recorded(new_stream());
  cudaError_t error = cudaErrorUnknown;
  std::thread([&] {
    cudaThreadExchangeStreamCaptureMode(&mode);
    error = cudaEventQuery(event);
    while (error == cudaErrorNotReady) error = cudaEventQuery(event);
  }).join();
  return error;
}

}  // namespace

CHILD_TEST(a_graph_repeats_what_was_captured_and_nothing_ran_before) {
  cudaStream_t stream = capturing(kGlobal);
  note(stream, "a");
  note(stream, "b");
  cudaGraph_t graph = nullptr;
  CHECK_EQ(end(stream, &graph), cudaSuccess);
  CHECK_EQ(cudaDeviceSynchronize(), cudaSuccess);
  CHECK_EQ(ran, "");
  cudaGraphExec_t executable = nullptr;
  CHECK_EQ(cudaGraphInstantiateWithFlags(&executable, graph, 0), cudaSuccess);
  CHECK_EQ(cudaGraphDestroy(graph), cudaSuccess);
  for (int i = 0; i < 2; ++i) CHECK_EQ(cudaGraphLaunch(executable, stream), cudaSuccess);
  CHECK_EQ(cudaGraphExecDestroy(executable), cudaSuccess);
  CHECK_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  CHECK_EQ(ran, "abab");
}

CHILD_TEST(streams_join_by_events_and_must_be_joined_at_the_end) {
  cudaStream_t a = capturing(kGlobal), b = new_stream();
  note(a, "a");
  CHECK_EQ(cudaStreamWaitEvent(b, recorded(a), 0), cudaSuccess);
  note(b, "b");
  CHECK_EQ(cudaStreamWaitEvent(a, recorded(b), 0), cudaSuccess);
  note(a, "c");
  cudaGraph_t graph = nullptr;
  size_t num_nodes = 0;
  CHECK_EQ(end(a, &graph), cudaSuccess);
  CHECK_EQ(cudaGraphGetNodes(graph, nullptr, &num_nodes), cudaSuccess);
  CHECK_EQ(num_nodes, 3);
  cudaStreamCaptureStatus status;
  CHECK_EQ(cudaStreamIsCapturing(b, &status), cudaSuccess);
  CHECK_EQ(status, cudaStreamCaptureStatusNone);

  CHECK_EQ(cudaStreamBeginCapture(a, kGlobal), cudaSuccess);
  CHECK_EQ(cudaStreamWaitEvent(b, recorded(a), 0), cudaSuccess);
  note(b, "b");
  CHECK_EQ(end(b), cudaErrorStreamCaptureUnmatched);
  CHECK_EQ(end(a), cudaErrorStreamCaptureInvalidated);
  CHECK_EQ(cudaStreamBeginCapture(a, kGlobal), cudaSuccess);
  CHECK_EQ(cudaStreamWaitEvent(b, recorded(a), 0), cudaSuccess);
  note(b, "b");
  CHECK_EQ(end(a), cudaErrorStreamCaptureUnjoined);
}

CHILD_TEST(an_allocation_invalidates_a_capture_unless_the_mode_is_relaxed) {
  void* p = nullptr;
  for (const auto mode : {kGlobal, kThreadLocal}) {
    cudaStream_t stream = capturing(mode);
    CHECK_EQ(cudaMalloc(&p, 8), cudaErrorStreamCaptureUnsupported);
    cudaStreamCaptureStatus status;
    CHECK_EQ(cudaStreamIsCapturing(stream, &status), cudaSuccess);
    CHECK_EQ(status, cudaStreamCaptureStatusInvalidated);
    CHECK_EQ(end(stream), cudaErrorStreamCaptureInvalidated);
  }
  cudaStream_t stream = capturing(kRelaxed);
  CHECK_EQ(cudaMalloc(&p, 8), cudaSuccess);
  CHECK_EQ(end(stream), cudaSuccess);
  stream = capturing(kGlobal);
  auto mode = kRelaxed;
  CHECK_EQ(cudaThreadExchangeStreamCaptureMode(&mode), cudaSuccess);
  CHECK_EQ(mode, kGlobal);
  CHECK_EQ(cudaMalloc(&p, 8), cudaSuccess);
  CHECK_EQ(cudaThreadExchangeStreamCaptureMode(&mode), cudaSuccess);
  CHECK_EQ(end(stream), cudaSuccess);
}

CHILD_TEST(a_query_in_another_thread_invalidates_only_global_captures) {
  cudaStream_t stream = capturing(kGlobal);
  CHECK_EQ(query_in_another_thread(kGlobal), cudaErrorStreamCaptureUnsupported);
  CHECK_EQ(end(stream), cudaErrorStreamCaptureInvalidated);
  stream = capturing(kGlobal);
  CHECK_EQ(query_in_another_thread(kThreadLocal), cudaSuccess);
  CHECK_EQ(query_in_another_thread(kRelaxed), cudaSuccess);
  CHECK_EQ(end(stream), cudaSuccess);
  stream = capturing(kThreadLocal);
  CHECK_EQ(query_in_another_thread(kGlobal), cudaSuccess);
  CHECK_EQ(end(stream), cudaSuccess);
}

CHILD_TEST(a_capturing_stream_and_its_events_cannot_be_waited_for) {
  cudaStream_t stream = capturing(kRelaxed);
  CHECK_EQ(cudaStreamSynchronize(stream), cudaErrorStreamCaptureUnsupported);
  CHECK_EQ(end(stream), cudaErrorStreamCaptureInvalidated);
  stream = capturing(kRelaxed);
  cudaEvent_t event = recorded(stream);
  CHECK_EQ(cudaEventSynchronize(event), cudaErrorCapturedEvent);
  CHECK_EQ(end(stream), cudaErrorStreamCaptureInvalidated);
}

CHILD_TEST(waiting_for_an_event_of_an_ended_capture_fails_without_losing_work) {
  cudaStream_t a = capturing(kRelaxed), b = new_stream();
  cudaEvent_t event = recorded(a);
  CHECK_EQ(end(a), cudaSuccess);
  CHECK_EQ(cudaStreamWaitEvent(b, event, 0), cudaErrorCapturedEvent);
  note(b, "b");
  CHECK_EQ(cudaStreamSynchronize(b), cudaSuccess);
  CHECK_EQ(ran, "b");

  CHECK_EQ(cudaStreamBeginCapture(b, kRelaxed), cudaSuccess);
  CHECK_EQ(cudaStreamWaitEvent(b, event, 0), cudaErrorCapturedEvent);
  CHECK_EQ(end(b), cudaErrorStreamCaptureInvalidated);

  // Recording the event outside of a capture turns it into a regular event again.
  CHECK_EQ(cudaEventRecord(event, a), cudaSuccess);
  CHECK_EQ(cudaStreamWaitEvent(b, event, 0), cudaSuccess);
  CHECK_EQ(cudaStreamSynchronize(b), cudaSuccess);
}

CHILD_TEST(a_capture_cannot_wait_for_uncaptured_work) {
  cudaEvent_t outside = recorded(new_stream()), never = nullptr;
  CHECK_EQ(cudaEventCreate(&never), cudaSuccess);
  cudaStream_t stream = capturing(kGlobal);
  CHECK_EQ(cudaStreamWaitEvent(stream, never, 0), cudaSuccess);
  CHECK_EQ(cudaStreamWaitEvent(stream, outside, 0), cudaErrorStreamCaptureIsolation);
  CHECK_EQ(end(stream), cudaErrorStreamCaptureInvalidated);
}

CHILD_TEST(captures_do_not_merge_and_end_in_their_thread) {
  cudaStream_t a = capturing(kGlobal), b = capturing(kGlobal);
  CHECK_EQ(cudaStreamWaitEvent(b, recorded(a), 0), cudaErrorStreamCaptureMerge);
  CHECK_EQ(end(a), cudaErrorStreamCaptureInvalidated);
  CHECK_EQ(end(b), cudaErrorStreamCaptureInvalidated);
  a = capturing(kGlobal);
  cudaError_t error = cudaSuccess;
  std::thread([&] { error = end(a); }).join();
  CHECK_EQ(error, cudaErrorStreamCaptureWrongThread);
  CHECK_EQ(end(a), cudaSuccess);
}

CHILD_TEST(null_stream_work_invalidates_captures_of_blocking_streams) {
  CHECK_EQ(cudaStreamBeginCapture(nullptr, kGlobal), cudaErrorStreamCaptureUnsupported);
  void* p = nullptr;
  CHECK_EQ(cudaMalloc(&p, 8), cudaSuccess);
  cudaStream_t other = capturing(kGlobal);
  CHECK_EQ(cudaMemsetAsync(p, 0, 8, nullptr), cudaSuccess);
  CHECK_EQ(end(other), cudaSuccess);
  cudaStream_t blocking = new_stream(cudaStreamDefault);
  CHECK_EQ(cudaStreamBeginCapture(blocking, kRelaxed), cudaSuccess);
  CHECK_EQ(cudaMemsetAsync(p, 0, 8, nullptr), cudaErrorStreamCaptureImplicit);
  CHECK_EQ(end(blocking), cudaErrorStreamCaptureInvalidated);
}

CHILD_TEST(a_capture_refuses_batches_and_delays_the_reads_of_single_copies) {
  void *device = nullptr, *pinned = nullptr;
  CHECK_EQ(cudaMalloc(&device, 1), cudaSuccess);
  CHECK_EQ(cudaHostAlloc(&pinned, 1, 0), cudaSuccess);
  char* host = static_cast<char*>(pinned);
  *host = 1;
  cudaStream_t stream = capturing(kGlobal);
  const void* from = pinned;
  size_t bytes = 1, first = 0;
  cudaMemcpyAttributes attributes{};
  attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  CHECK_EQ(cudaMemcpyBatchAsync(&device, &from, &bytes, 1, &attributes, &first, 1, stream),
           cudaErrorStreamCaptureUnsupported);
  CHECK_EQ(end(stream), cudaErrorStreamCaptureInvalidated);

  CHECK_EQ(cudaStreamBeginCapture(stream, kGlobal), cudaSuccess);
  CHECK_EQ(cudaMemcpyAsync(device, pinned, 1, cudaMemcpyDefault, stream), cudaSuccess);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  CHECK_EQ(end(stream, &graph), cudaSuccess);
  CHECK_EQ(cudaGraphInstantiateWithFlags(&executable, graph, 0), cudaSuccess);
  *host = 2;
  CHECK_EQ(cudaGraphLaunch(executable, stream), cudaSuccess);
  char back = 0;
  CHECK_EQ(cudaMemcpyAsync(&back, device, 1, cudaMemcpyDefault, stream), cudaSuccess);
  CHECK_EQ(back, 2);
}

TEST_MAIN()
