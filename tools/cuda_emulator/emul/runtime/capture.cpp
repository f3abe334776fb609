// SPDX-License-Identifier: Apache-2.0
#include "emul/runtime/capture.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "emul/runtime/api.h"
#include "emul/runtime/counters.h"

namespace kvcache::gpuless {
namespace {

thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;
unsigned long long next_id = 1;

std::vector<Capture*> captures() {
  std::vector<Capture*> found;
  for (const Stream* s : all_streams()) {
    if (s->capture != nullptr && s->capture->origin == s) found.push_back(s->capture);
  }
  return found;
}

// Returns whether `capture` forbids unsafe calls from the calling thread.
bool forbids(const Capture& capture) {
  if (thread_mode == cudaStreamCaptureModeRelaxed) return false;
  if (capture.mode == cudaStreamCaptureModeRelaxed) return false;
  if (capture.thread == std::this_thread::get_id()) return true;
  return capture.mode == cudaStreamCaptureModeGlobal && thread_mode == cudaStreamCaptureModeGlobal;
}

// Returns whether every node is a leaf of the origin stream or is required by such a leaf.
bool all_joined(const Capture& capture) {
  const std::vector<Node>& nodes = capture.graph->nodes;
  std::vector<bool> reached(nodes.size());
  for (const int leaf : capture.origin->capture_leaves) reached[size_t(leaf)] = true;
  for (size_t i = nodes.size(); i-- > 0;) {
    if (!reached[i]) return false;
    for (const int earlier : nodes[i].after) reached[size_t(earlier)] = true;
  }
  return true;
}

}  // namespace

cudaError_t refuse_while_capturing() {
  cudaError_t error = cudaSuccess;
  for (Capture* capture : captures()) {
    if (!forbids(*capture)) continue;
    capture->invalid = true;
    error = cudaErrorStreamCaptureUnsupported;
  }
  return error;
}

cudaError_t refuse_if_capturing(Stream& stream) {
  if (stream.capture == nullptr) return cudaSuccess;
  stream.capture->invalid = true;
  return cudaErrorStreamCaptureUnsupported;
}

cudaError_t refuse_implicit_dependency(const Stream& stream) {
  if (!stream.is_null()) return cudaSuccess;
  for (const Stream* s : all_streams()) {
    if (s->capture == nullptr || !s->is_blocking()) continue;
    s->capture->invalid = true;
    return cudaErrorStreamCaptureImplicit;
  }
  return cudaSuccess;
}

cudaError_t begin_capture(Stream& stream, cudaStreamCaptureMode mode) {
  if (stream.is_null()) return cudaErrorStreamCaptureUnsupported;
  if (stream.capture != nullptr) return cudaErrorIllegalState;
  auto* const capture = new Capture{
      next_id++, mode, std::this_thread::get_id(), &stream, {}, false, false, new Graph};
  join_capture(stream, *capture, {});
  return cudaSuccess;
}

cudaError_t end_capture(Stream& stream, Graph** graph) {
  *graph = nullptr;
  Capture* capture = stream.capture;
  if (capture == nullptr) return cudaErrorIllegalState;
  if (capture->origin != &stream) {
    capture->invalid = true;
    return cudaErrorStreamCaptureUnmatched;
  }
  if (capture->mode != cudaStreamCaptureModeRelaxed &&
      capture->thread != std::this_thread::get_id()) {
    return cudaErrorStreamCaptureWrongThread;
  }
  const bool joined = all_joined(*capture);
  for (Stream* s : capture->streams) {
    s->capture = nullptr;
    s->capture_leaves.clear();
  }
  capture->ended = true;
  // The capture object is kept, because events that were recorded in it still point to it.
  if (capture->invalid) return cudaErrorStreamCaptureInvalidated;
  if (!joined) {
    capture->invalid = true;
    return cudaErrorStreamCaptureUnjoined;
  }
  *graph = capture->graph;
  return cudaSuccess;
}

void join_capture(Stream& stream, Capture& capture, const std::vector<int>& leaves) {
  stream.capture = &capture;
  capture.streams.insert(&stream);
  for (const int leaf : leaves) {
    auto& own = stream.capture_leaves;
    if (std::find(own.begin(), own.end(), leaf) == own.end()) own.push_back(leaf);
  }
}

cudaError_t exchange_thread_mode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, thread_mode);
  return cudaSuccess;
}

cudaError_t submit_or_capture(Stream& stream, Work work) {
  if (const cudaError_t error = refuse_implicit_dependency(stream)) return error;
  if (stream.is_null()) count(Counter::kLegacyWork);
  if (stream.capture == nullptr) {
    submit(stream, std::move(work));
    return cudaSuccess;
  }
  if (stream.capture->invalid) return cudaErrorStreamCaptureInvalidated;
  std::vector<Node>& nodes = stream.capture->graph->nodes;
  nodes.push_back({std::move(work), stream.capture_leaves});
  stream.capture_leaves = {int(nodes.size()) - 1};
  return cudaSuccess;
}

cudaError_t pause_or_capture(Stream& stream, double milliseconds) {
  if (stream.capture != nullptr) {
    return submit_or_capture(stream, [milliseconds] {
      std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(milliseconds));
    });
  }
  if (const cudaError_t error = refuse_implicit_dependency(stream)) return error;
  submit_pause(stream, milliseconds);
  return cudaSuccess;
}

void launch_graph(const Graph& graph, Stream& stream) {
  std::vector<size_t> waiting(graph.nodes.size());
  for (size_t i = 0; i < waiting.size(); ++i) waiting[i] = i;
  std::vector<bool> taken(graph.nodes.size());
  while (!waiting.empty()) {
    std::vector<size_t> ready;  // indices into `waiting`
    for (size_t at = 0; at < waiting.size() && ready.size() < 8; ++at) {
      const std::vector<int>& after = graph.nodes[waiting[at]].after;
      if (std::all_of(after.begin(), after.end(), [&](int n) { return taken[size_t(n)]; })) {
        ready.push_back(at);
      }
    }
    const size_t at = ready[random_below(ready.size())];
    submit(stream, graph.nodes[waiting[at]].work);
    taken[waiting[at]] = true;
    waiting.erase(waiting.begin() + long(at));
  }
}

}  // namespace kvcache::gpuless
