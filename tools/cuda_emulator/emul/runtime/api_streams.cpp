// SPDX-License-Identifier: Apache-2.0
// Functions of the runtime's C interface for streams and events.
#include <algorithm>

#include "emul/runtime/api.h"
#include "emul/runtime/capture.h"
#include "emul/runtime/counters.h"
#include "emul/runtime/streams.h"

using namespace kvcache::gpuless;

namespace {

// An event stores what was last recorded: the completion of a task, or a position in a capture.
struct Event {
  unsigned flags = 0;
  CompletionPtr recorded;  // null if the event was never recorded, which counts as reached
  Capture* capture = nullptr;
  std::vector<int> leaves;
};

Event* event_of(cudaEvent_t handle) { return reinterpret_cast<Event*>(handle); }

// Work in a capturing stream is recorded, so its state cannot be queried or waited for.
cudaError_t refuse_waiting(Stream* stream) {
  if (stream == nullptr) return cudaErrorInvalidResourceHandle;
  if (const cudaError_t error = refuse_if_capturing(*stream)) return error;
  if (const cudaError_t error = refuse_implicit_dependency(*stream)) return error;
  return refuse_while_capturing();
}

cudaError_t refuse_waiting(Event* event) {
  if (event == nullptr) return cudaErrorInvalidResourceHandle;
  if (event->capture != nullptr) {
    event->capture->invalid = true;
    return cudaErrorCapturedEvent;
  }
  return refuse_while_capturing();
}

bool is_reached(const Event& event) { return !event.recorded || event.recorded->reached; }

cudaError_t wait_in_capture(Stream& stream, const Event& event) {
  if (event.capture == nullptr) {
    if (!event.recorded) return cudaSuccess;  // an event that was never recorded counts as reached
    stream.capture->invalid = true;
    return cudaErrorStreamCaptureIsolation;
  }
  if (event.capture != stream.capture) {
    stream.capture->invalid = true;
    event.capture->invalid = true;
    return cudaErrorStreamCaptureMerge;
  }
  join_capture(stream, *event.capture, event.leaves);
  return cudaSuccess;
}

}  // namespace

KV_GPULESS_API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* handle, unsigned flags,
                                                        int priority) {
  return call([&] {
    if ((flags & ~unsigned(cudaStreamNonBlocking)) != 0) return cudaErrorInvalidValue;
    // Like CUDA, clamps priorities to the range that is reported.
    *handle = reinterpret_cast<cudaStream_t>(create_stream(flags, std::clamp(priority, -5, 0)));
    return cudaSuccess;
  });
}

KV_GPULESS_API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* handle, unsigned flags) {
  return cudaStreamCreateWithPriority(handle, flags, 0);
}

KV_GPULESS_API cudaError_t cudaStreamCreate(cudaStream_t* handle) {
  return cudaStreamCreateWithPriority(handle, cudaStreamDefault, 0);
}

KV_GPULESS_API cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  return call([&] {
    Stream* stream = stream_of(handle);
    if (stream == nullptr || stream->is_null()) return cudaErrorInvalidResourceHandle;
    if (const cudaError_t error = refuse_if_capturing(*stream)) return error;
    destroy_stream(stream);
    return cudaSuccess;
  });
}

KV_GPULESS_API cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  return call([&] {
    const Stream* stream = stream_of(handle);
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    *priority = stream->priority;
    return cudaSuccess;
  });
}

KV_GPULESS_API cudaError_t cudaStreamGetFlags(cudaStream_t handle, unsigned* flags) {
  return call([&] {
    const Stream* stream = stream_of(handle);
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    *flags = stream->flags;
    return cudaSuccess;
  });
}

KV_GPULESS_API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

KV_GPULESS_API cudaError_t cudaStreamQuery(cudaStream_t handle) {
  return call([&] {
    Stream* stream = stream_of(handle);
    count(Counter::kEventQueries);
    if (const cudaError_t error = refuse_waiting(stream)) return error;
    let_time_pass();
    return !stream->last || stream->last->reached ? cudaSuccess : cudaErrorNotReady;
  });
}

KV_GPULESS_API cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  return call([&] {
    Stream* stream = stream_of(handle);
    if (const cudaError_t error = refuse_waiting(stream)) return error;
    count(Counter::kWaits);
    drain(*stream);
    return cudaSuccess;
  });
}

KV_GPULESS_API cudaError_t cudaDeviceSynchronize() {
  return call([&] {
    if (const cudaError_t error = refuse_while_capturing()) return error;
    count(Counter::kWaits);
    drain_all();
    return cudaSuccess;
  });
}

KV_GPULESS_API cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function,
                                              void* data) {
  return call([&] {
    Stream* stream = stream_of(handle);
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    return submit_or_capture(*stream, [=] { function(data); });
  });
}

KV_GPULESS_API cudaError_t cudaStreamAddCallback(cudaStream_t handle, cudaStreamCallback_t function,
                                                 void* data, unsigned) {
  return call([&] {
    Stream* stream = stream_of(handle);
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    if (const cudaError_t error = refuse_if_capturing(*stream)) return error;
    return submit_or_capture(*stream, [=] { function(handle, cudaSuccess, data); });
  });
}

KV_GPULESS_API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* handle, unsigned flags) {
  return call([&] {
    auto* const event = new Event;
    event->flags = flags;
    *handle = reinterpret_cast<cudaEvent_t>(event);
    return cudaSuccess;
  });
}

KV_GPULESS_API cudaError_t cudaEventCreate(cudaEvent_t* handle) {
  return cudaEventCreateWithFlags(handle, cudaEventDefault);
}

// Destroying an event is safe, because tasks that wait for the event reference its completion.
KV_GPULESS_API cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  return call([&] {
    if (handle == nullptr) return cudaErrorInvalidResourceHandle;
    delete event_of(handle);
    return cudaSuccess;
  });
}

KV_GPULESS_API cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream_handle,
                                                    unsigned flags) {
  return call([&] {
    Event* event = event_of(handle);
    Stream* stream = stream_of(stream_handle);
    if (event == nullptr || stream == nullptr) return cudaErrorInvalidResourceHandle;
    if (const cudaError_t error = refuse_implicit_dependency(*stream)) return error;
    // An external event in a graph is recorded each time the graph runs.
    if (flags == cudaEventRecordExternal) return cudaErrorNotSupported;
    event->capture = stream->capture;
    event->leaves = stream->capture_leaves;
    event->recorded = stream->capture != nullptr ? nullptr : submit(*stream, nullptr);
    return cudaSuccess;
  });
}

KV_GPULESS_API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, cudaEventRecordDefault);
}

KV_GPULESS_API cudaError_t cudaStreamWaitEvent(cudaStream_t stream_handle, cudaEvent_t handle,
                                               unsigned) {
  return call([&] {
    const Event* event = event_of(handle);
    Stream* stream = stream_of(stream_handle);
    if (event == nullptr || stream == nullptr) return cudaErrorInvalidResourceHandle;
    // The event was recorded in a capture, so there is no submitted work to wait for.
    if (event->capture != nullptr && event->capture->ended) {
      if (stream->capture != nullptr) stream->capture->invalid = true;
      return cudaErrorCapturedEvent;
    }
    if (stream->capture != nullptr) return wait_in_capture(*stream, *event);
    if (event->capture != nullptr) {
      if (stream->is_null()) return cudaErrorStreamCaptureImplicit;
      join_capture(*stream, *event->capture, event->leaves);
      return cudaSuccess;
    }
    if (event->recorded) submit(*stream, nullptr, {event->recorded});
    return cudaSuccess;
  });
}

KV_GPULESS_API cudaError_t cudaEventQuery(cudaEvent_t handle) {
  return call([&] {
    Event* event = event_of(handle);
    count(Counter::kEventQueries);
    if (const cudaError_t error = refuse_waiting(event)) return error;
    let_time_pass();
    return is_reached(*event) ? cudaSuccess : cudaErrorNotReady;
  });
}

KV_GPULESS_API cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  return call([&] {
    Event* event = event_of(handle);
    if (const cudaError_t error = refuse_waiting(event)) return error;
    count(Counter::kWaits);
    if (event->recorded) run_until(event->recorded);
    return cudaSuccess;
  });
}

KV_GPULESS_API cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t from, cudaEvent_t to) {
  return call([&] {
    const Event *first = event_of(from), *second = event_of(to);
    if (first == nullptr || second == nullptr) return cudaErrorInvalidResourceHandle;
    const bool timed = ((first->flags | second->flags) & cudaEventDisableTiming) == 0;
    if (!timed || !first->recorded || !second->recorded) return cudaErrorInvalidResourceHandle;
    if (!is_reached(*first) || !is_reached(*second)) return cudaErrorNotReady;
    *ms = float(second->recorded->time_ms - first->recorded->time_ms);
    return cudaSuccess;
  });
}
