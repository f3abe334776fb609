// SPDX-License-Identifier: Apache-2.0
// CUDA errors: each thread's last error, the sticky error, and error names and descriptions.
#include <cstdarg>
#include <cstdio>

#include "emul/runtime/api.h"

namespace kvcache::gpuless {
namespace {

thread_local cudaError_t last_error = cudaSuccess;
cudaError_t sticky = cudaSuccess;

struct Text {
  cudaError_t error;
  const char* name;
  const char* text;
};

#define KV_ERROR(error, text) {error, #error, text}
constexpr Text kTexts[] = {
    KV_ERROR(cudaSuccess, "no error"),
    KV_ERROR(cudaErrorInvalidValue, "invalid argument"),
    KV_ERROR(cudaErrorMemoryAllocation, "out of memory"),
    KV_ERROR(cudaErrorInitializationError, "initialization error"),
    KV_ERROR(cudaErrorCudartUnloading, "driver shutting down"),
    KV_ERROR(cudaErrorInvalidConfiguration, "invalid configuration argument"),
    KV_ERROR(cudaErrorInvalidPitchValue, "invalid pitch argument"),
    KV_ERROR(cudaErrorInvalidSymbol, "invalid device symbol"),
    KV_ERROR(cudaErrorInvalidMemcpyDirection, "invalid copy direction for memcpy"),
    KV_ERROR(cudaErrorInsufficientDriver,
             "CUDA driver version is insufficient for CUDA runtime version"),
    KV_ERROR(cudaErrorInvalidDeviceFunction, "invalid device function"),
    KV_ERROR(cudaErrorNoDevice, "no CUDA-capable device is detected"),
    KV_ERROR(cudaErrorInvalidDevice, "invalid device ordinal"),
    KV_ERROR(cudaErrorInvalidResourceHandle, "invalid resource handle"),
    KV_ERROR(cudaErrorIllegalState, "the operation cannot be performed in the present state"),
    KV_ERROR(cudaErrorSymbolNotFound, "named symbol not found"),
    KV_ERROR(cudaErrorNotReady, "device not ready"),
    KV_ERROR(cudaErrorIllegalAddress, "an illegal memory access was encountered"),
    KV_ERROR(cudaErrorLaunchOutOfResources, "too many resources requested for launch"),
    KV_ERROR(cudaErrorPeerAccessUnsupported,
             "peer access is not supported between these two devices"),
    KV_ERROR(cudaErrorHostMemoryAlreadyRegistered,
             "part or all of the requested memory range is already mapped"),
    KV_ERROR(cudaErrorHostMemoryNotRegistered,
             "pointer does not correspond to a registered memory region"),
    KV_ERROR(cudaErrorMisalignedAddress, "misaligned address"),
    KV_ERROR(cudaErrorLaunchFailure, "unspecified launch failure"),
    KV_ERROR(cudaErrorNotPermitted, "operation not permitted"),
    KV_ERROR(cudaErrorNotSupported, "operation not supported"),
    KV_ERROR(cudaErrorStreamCaptureUnsupported, "operation not permitted when stream is capturing"),
    KV_ERROR(cudaErrorStreamCaptureInvalidated,
             "operation failed due to a previous error during capture"),
    KV_ERROR(cudaErrorStreamCaptureMerge,
             "operation would result in a merge of separate capture sequences"),
    KV_ERROR(cudaErrorStreamCaptureUnmatched,
             "capture was not ended in the same stream as it began"),
    KV_ERROR(cudaErrorStreamCaptureUnjoined, "capturing stream has unjoined work"),
    KV_ERROR(cudaErrorStreamCaptureIsolation,
             "dependency created on uncaptured work in another stream"),
    KV_ERROR(cudaErrorStreamCaptureImplicit,
             "operation would make the legacy stream depend on a capturing blocking stream"),
    KV_ERROR(cudaErrorCapturedEvent,
             "operation not permitted on an event last recorded in a capturing stream"),
    KV_ERROR(cudaErrorStreamCaptureWrongThread,
             "attempt to terminate a thread-local capture sequence from another thread"),
    KV_ERROR(cudaErrorUnknown, "unknown error"),
};
#undef KV_ERROR

const Text* text_of(cudaError_t error) {
  for (const Text& t : kTexts) {
    if (t.error == error) return &t;
  }
  return nullptr;
}

}  // namespace

cudaError_t failed(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

void set_sticky(cudaError_t error) {
  if (sticky == cudaSuccess) sticky = error;
}

cudaError_t sticky_error() { return sticky; }

void say(const char* format, ...) {
  char line[1024];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(line, sizeof line, format, arguments);
  va_end(arguments);
  std::fprintf(stderr, "gpu-less: %s\n", line);
}

}  // namespace kvcache::gpuless

using namespace kvcache::gpuless;

KV_GPULESS_API cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = sticky;
  return error;
}

KV_GPULESS_API cudaError_t cudaPeekAtLastError() { return last_error; }

KV_GPULESS_API const char* cudaGetErrorName(cudaError_t error) {
  const Text* text = text_of(error);
  return text == nullptr ? "unrecognized error code" : text->name;
}

KV_GPULESS_API const char* cudaGetErrorString(cudaError_t error) {
  const Text* text = text_of(error);
  return text == nullptr ? "unrecognized error code" : text->text;
}
