// SPDX-License-Identifier: Apache-2.0
// Functions of the runtime's C interface for copies and fills.
#include "emul/runtime/api.h"
#include "emul/runtime/capture.h"
#include "emul/runtime/copies.h"
#include "emul/runtime/counters.h"

using namespace kvcache::gpuless;

namespace {

// Calls `body` with the stream that belongs to a handle.
template <class Body>
cudaError_t on_stream(cudaStream_t handle, Body&& body) {
  return call([&] {
    Stream* stream = stream_of(handle);
    return stream == nullptr ? cudaErrorInvalidResourceHandle : body(*stream);
  });
}

// Calls `body`, and then waits for the null stream.
template <class Body>
cudaError_t and_wait(Body&& body) {
  return on_stream(nullptr, [&](Stream& stream) {
    if (const cudaError_t error = refuse_while_capturing()) return error;
    const cudaError_t error = body(stream);
    count(Counter::kWaits);
    drain(stream);
    return error;
  });
}

}  // namespace

KV_GPULESS_API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes,
                                           cudaMemcpyKind kind, cudaStream_t stream) {
  return on_stream(stream, [&](Stream& s) { return copy({to, from, bytes}, kind, s); });
}

KV_GPULESS_API cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes,
                                      cudaMemcpyKind kind) {
  return and_wait([&](Stream& s) { return copy({to, from, bytes}, kind, s); });
}

KV_GPULESS_API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes,
                                               cudaStream_t stream) {
  return on_stream(stream,
                   [&](Stream& s) { return copy({to, from, bytes}, cudaMemcpyDefault, s); });
}

KV_GPULESS_API cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from,
                                             size_t from_pitch, size_t width, size_t height,
                                             cudaMemcpyKind kind, cudaStream_t stream) {
  return on_stream(stream, [&](Stream& s) {
    return copy({to, from, width, height, to_pitch, from_pitch}, kind, s);
  });
}

KV_GPULESS_API cudaError_t cudaMemcpyBatchAsync(void* const* to, const void* const* from,
                                                const size_t* bytes, size_t count,
                                                cudaMemcpyAttributes* attributes,
                                                size_t* first_of_attributes, size_t num_attributes,
                                                cudaStream_t stream) {
  return on_stream(stream, [&](Stream& s) {
    return copy_batch(to, from, bytes, count, attributes, first_of_attributes, num_attributes, s);
  });
}

KV_GPULESS_API cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  return on_stream(stream, [&](Stream& s) { return fill(to, value, bytes, s); });
}

KV_GPULESS_API cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  return and_wait([&](Stream& s) { return fill(to, value, bytes, s); });
}
