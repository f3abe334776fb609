// SPDX-License-Identifier: Apache-2.0
// The prologue and epilogue of every function in the runtime's C interface, which handle the lock,
// the sticky error and the thread's last error.
//
// One lock guards all state of the runtime. It is recursive, because host functions on a stream run
// while the lock is held.
#pragma once

#include <cuda_runtime_api.h>

#include <mutex>

#define KV_GPULESS_API extern "C" __attribute__((visibility("default")))

namespace kvcache::gpuless {

std::recursive_mutex& runtime_mutex();

// Holds the lock. A Python thread that waits for the lock releases the GIL, because the thread that
// holds the lock may need the GIL to run an operator captured by a graph.
class RuntimeLock {
 public:
  RuntimeLock();
  ~RuntimeLock() { runtime_mutex().unlock(); }
  RuntimeLock(const RuntimeLock&) = delete;
};

// Sets the calling thread's last error, which cudaGetLastError reports. Returns `error`.
cudaError_t failed(cudaError_t error);

// Sets an error from which no later call recovers, such as an illegal access or a trap. The first
// such error is kept.
void set_sticky(cudaError_t error);
cudaError_t sticky_error();

// Prints a line that starts with "gpu-less: ", for faults that a return code does not explain.
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
