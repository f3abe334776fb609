// SPDX-License-Identifier: Apache-2.0
// The prologue and epilogue of every function in the runtime's C interface. They handle the lock,
// the sticky error and the thread's last error.
//
// One lock guards the runtime's whole state. It is recursive, because host functions on a stream
// run while the lock is held.
#pragma once

#include <cuda_runtime_api.h>

#include <mutex>

#define KV_GPULESS_API extern "C" __attribute__((visibility("default")))

namespace kvcache::gpuless {

std::recursive_mutex& runtime_mutex();

// Holds the lock. While a Python thread waits for the lock, it releases the GIL, because the thread
// that holds the lock may need the GIL to run an operator that a graph captured.
class RuntimeLock {
 public:
  RuntimeLock();
  ~RuntimeLock() { runtime_mutex().unlock(); }
  RuntimeLock(const RuntimeLock&) = delete;
};

// Sets the calling thread's last error, which cudaGetLastError reports. Returns `error`.
cudaError_t failed(cudaError_t error);

// Sets an error from which no later call can recover, such as an illegal access or a trap. If
// several occur, the first one is kept.
void set_sticky(cudaError_t error);
cudaError_t sticky_error();

// Prints a line that starts with "gpu-less: ". Used for faults that an error code does not explain.
void say(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Runs `body`, which returns a cudaError_t, under the lock. Returns the sticky error if there is
// one.
template <class Body>
cudaError_t call(Body&& body) {
  const RuntimeLock lock;
  if (sticky_error() != cudaSuccess) return failed(sticky_error());
  const cudaError_t error = body();
  if (sticky_error() != cudaSuccess) return failed(sticky_error());  // set while work was running
  return error == cudaSuccess ? error : failed(error);
}

}  // namespace kvcache::gpuless
