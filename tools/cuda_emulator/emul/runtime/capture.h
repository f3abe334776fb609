// SPDX-License-Identifier: Apache-2.0
// Stream capture and graphs. Callers hold the runtime's lock.
//
// A capture starts in one stream, and extends to each stream that waits for an event recorded in
// the capture. Forbidden calls are rejected as in CUDA. Most rejections invalidate the capture,
// which is reported when the capture ends. A graph consists of nodes in capture order, each with
// its dependencies.
#pragma once

#include <cuda_runtime_api.h>

#include <set>
#include <thread>
#include <vector>

#include "emul/runtime/streams.h"

namespace kvcache::gpuless {

struct Node {
  Work work;
  std::vector<int> after;  // earlier nodes
};

struct Graph {
  std::vector<Node> nodes;
};

struct Capture {
  unsigned long long id;
  cudaStreamCaptureMode mode;
  std::thread::id thread;
  Stream* origin;
  std::set<Stream*> streams;  // captured streams, including the origin stream
  bool invalid = false;
  bool ended = false;
  Graph* graph;  // owned by the caller after the capture has ended
};

// Checks calls that are unsafe during a capture (cudaMalloc, cudaEventQuery, ...). If any captures
// forbid such calls in the calling thread, invalidates these captures and returns the error.
cudaError_t refuse_while_capturing();
// Checks calls on a stream that are never allowed during a capture (synchronization).
cudaError_t refuse_if_capturing(Stream& stream);
// Checks work in the null stream, which is not allowed while a stream that waits for the null
// stream is capturing.
cudaError_t refuse_implicit_dependency(const Stream& stream);

cudaError_t begin_capture(Stream& stream, cudaStreamCaptureMode mode);
cudaError_t end_capture(Stream& stream, Graph** graph);
void join_capture(Stream& stream, Capture& capture, const std::vector<int>& leaves);
cudaError_t exchange_thread_mode(cudaStreamCaptureMode* mode);

// Submits `work` to the stream or, during a capture, records it. Every stream operation calls this
// function.
cudaError_t submit_or_capture(Stream& stream, Work work);
// Submits or records a pause.
cudaError_t pause_or_capture(Stream& stream, double milliseconds);
// Runs a graph's nodes as tasks in the stream, in an order that the dependencies allow.
void launch_graph(const Graph& graph, Stream& stream);

}  // namespace kvcache::gpuless
