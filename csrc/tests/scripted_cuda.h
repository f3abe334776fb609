// SPDX-License-Identifier: Apache-2.0
// A stand-in for the copy functions of the CUDA 13 runtime. It executes copies immediately, counts
// calls, and returns the results that the test has set.
#pragma once

#include <cstddef>
#include <cstring>
#include <functional>

#define CUDART_VERSION 13010

using cudaStream_t = struct Stream*;

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorCallRequiresNewerDriver = 36,
  cudaErrorIllegalAddress = 700,
  cudaErrorNotSupported = 801,
  cudaErrorStreamCaptureUnsupported = 900,
};
enum cudaMemcpyKind { cudaMemcpyDefault = 4 };
enum cudaMemcpySrcAccessOrder {
  cudaMemcpySrcAccessOrderStream = 1,
  cudaMemcpySrcAccessOrderAny = 3
};
enum cudaMemcpyFlags { cudaMemcpyFlagDefault = 0, cudaMemcpyFlagPreferOverlapWithCompute = 1 };
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone = 0, cudaStreamCaptureStatusActive = 1 };
enum cudaDeviceAttr { cudaDevAttrCanUseHostPointerForRegisteredMem = 91 };
struct cudaMemcpyAttributes {
  cudaMemcpySrcAccessOrder srcAccessOrder;
  unsigned flags;
};

// The results that the test has set, and the calls that were made.
struct Script {
  cudaError_t batch_answer = cudaSuccess;
  std::function<cudaError_t(const void*)> single_answer = [](const void*) { return cudaSuccess; };
  bool capturing = false;
  int same_address = 1;
  int num_batches = 0, num_singles = 0;
  unsigned flags = 0;
  int order = 0;  // srcAccessOrder of the last batch
  cudaError_t last_error = cudaSuccess;
};
inline Script script;

inline cudaError_t answer(cudaError_t error) {
  if (error != cudaSuccess) script.last_error = error;
  return error;
}
inline cudaError_t cudaGetLastError() {
  const cudaError_t error = script.last_error;
  script.last_error = cudaSuccess;
  return error;
}
inline const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorInvalidValue ? "invalid argument" : "another error";
}
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = script.same_address;
  return cudaSuccess;
}
inline cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = script.capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t n, cudaMemcpyKind,
                                   cudaStream_t) {
  ++script.num_singles;
  const cudaError_t error = script.single_answer(from);
  if (error == cudaSuccess) std::memcpy(to, from, n);
  return answer(error);
}
inline cudaError_t cudaMemcpyBatchAsync(void* const* to, const void* const* from,
                                        const size_t* sizes, size_t count,
                                        cudaMemcpyAttributes* attributes, size_t*, size_t,
                                        cudaStream_t) {
  ++script.num_batches;
  script.flags = attributes->flags;
  script.order = attributes->srcAccessOrder;
  if (script.batch_answer != cudaSuccess) return answer(script.batch_answer);
  for (size_t i = 0; i < count; ++i) std::memcpy(to[i], from[i], sizes[i]);
  return cudaSuccess;
}
