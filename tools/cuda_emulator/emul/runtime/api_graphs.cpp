// SPDX-License-Identifier: Apache-2.0
// Functions of the runtime's C interface for captures and graphs.
#include "emul/runtime/api.h"
#include "emul/runtime/capture.h"
#include "emul/runtime/counters.h"

using namespace kvcache::gpuless;

namespace {

Graph* graph_of(cudaGraph_t handle) { return reinterpret_cast<Graph*>(handle); }
Graph* graph_of(cudaGraphExec_t handle) { return reinterpret_cast<Graph*>(handle); }

}  // namespace

KV_GPULESS_API cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  return call([&] {
    Stream* stream = stream_of(handle);
    return stream == nullptr ? cudaErrorInvalidResourceHandle : begin_capture(*stream, mode);
  });
}

KV_GPULESS_API cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  return call([&] {
    Stream* stream = stream_of(handle);
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    return end_capture(*stream, reinterpret_cast<Graph**>(graph));
  });
}

KV_GPULESS_API cudaError_t cudaStreamIsCapturing(cudaStream_t handle,
                                                 cudaStreamCaptureStatus* status) {
  return call([&] {
    count(Counter::kCaptureQueries);
    const Stream* stream = stream_of(handle);
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    if (const cudaError_t error = refuse_implicit_dependency(*stream)) return error;
    const Capture* capture = stream->capture;
    *status = capture == nullptr ? cudaStreamCaptureStatusNone
              : capture->invalid ? cudaStreamCaptureStatusInvalidated
                                 : cudaStreamCaptureStatusActive;
    return cudaSuccess;
  });
}

// Does not report dependencies, because callers request only the status, the id and the graph.
#undef cudaStreamGetCaptureInfo
KV_GPULESS_API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle,
                                                    cudaStreamCaptureStatus* status,
                                                    unsigned long long* id, cudaGraph_t* graph,
                                                    const cudaGraphNode_t** dependencies,
                                                    const cudaGraphEdgeData** edges,
                                                    size_t* num_dependencies) {
  if (const cudaError_t error = cudaStreamIsCapturing(handle, status)) return error;
  return call([&] {
    const Capture* capture = stream_of(handle)->capture;
    if (dependencies != nullptr) *dependencies = nullptr;
    if (edges != nullptr) *edges = nullptr;
    if (num_dependencies != nullptr) *num_dependencies = 0;
    if (capture == nullptr) return cudaSuccess;
    if (id != nullptr) *id = capture->id;
    if (graph != nullptr) *graph = reinterpret_cast<cudaGraph_t>(capture->graph);
    return cudaSuccess;
  });
}

KV_GPULESS_API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  return call([&] { return exchange_thread_mode(mode); });
}

KV_GPULESS_API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable,
                                                         cudaGraph_t graph, unsigned long long) {
  return call([&] {
    *executable = nullptr;
    if (graph == nullptr) return cudaErrorInvalidValue;
    *executable = reinterpret_cast<cudaGraphExec_t>(new Graph(*graph_of(graph)));
    return cudaSuccess;
  });
}

KV_GPULESS_API cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t handle) {
  return call([&] {
    Stream* stream = stream_of(handle);
    if (stream == nullptr || executable == nullptr) return cudaErrorInvalidResourceHandle;
    // Graphs inside graphs are not supported.
    if (stream->capture != nullptr) return cudaErrorNotSupported;
    if (const cudaError_t error = refuse_implicit_dependency(*stream)) return error;
    if (stream->is_null()) count(Counter::kLegacyWork);
    launch_graph(*graph_of(executable), *stream);
    return cudaSuccess;
  });
}

KV_GPULESS_API cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  return call([&] {
    delete graph_of(graph);
    return cudaSuccess;
  });
}

// Launches in flight hold their own copies of the work.
KV_GPULESS_API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  return call([&] {
    delete graph_of(executable);
    return cudaSuccess;
  });
}

// Nodes have no handles, so only their number is returned.
KV_GPULESS_API cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes,
                                             size_t* count) {
  return call([&] {
    if (graph == nullptr || nodes != nullptr) return cudaErrorInvalidValue;
    *count = graph_of(graph)->nodes.size();
    return cudaSuccess;
  });
}
