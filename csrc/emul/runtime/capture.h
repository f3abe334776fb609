// Stream capture and graphs. Callers hold the runtime's lock.
//
// A capture begins in one stream and takes in each stream that waits for an event recorded in it.
// What it may not do is refused as CUDA does; most refusals invalidate the capture, and its end
// then reports that. A graph is its nodes in the order of capture, each with what it depends on.
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
  std::set<Stream*> streams;  // the origin among them
  bool invalid = false;
  bool ended = false;
  Graph* graph;  // the caller's from the end on
};

// For calls that are unsafe while a capture is under way (cudaMalloc, cudaEventQuery, ...). Where
// the calling thread may not make them, invalidates the captures that forbid it and returns the
// error.
cudaError_t refuse_while_capturing();
// For calls on one stream that a capture never allows (a synchronisation).
cudaError_t refuse_if_capturing(Stream& stream);
// For work in the null stream while a stream that waits for it captures.
cudaError_t refuse_implicit_dependency(const Stream& stream);

cudaError_t begin_capture(Stream& stream, cudaStreamCaptureMode mode);
cudaError_t end_capture(Stream& stream, Graph** graph);
void join_capture(Stream& stream, Capture& capture, const std::vector<int>& leaves);
cudaError_t exchange_thread_mode(cudaStreamCaptureMode* mode);

// Runs or records `work`. Every operation on a stream ends here.
cudaError_t submit_or_capture(Stream& stream, Work work);
// The same for a pause.
cudaError_t pause_or_capture(Stream& stream, double milliseconds);
// As tasks of the stream, in an order that the dependencies allow.
void launch_graph(const Graph& graph, Stream& stream);

}  // namespace kvcache::gpuless
