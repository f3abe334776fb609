// SPDX-License-Identifier: Apache-2.0
// Helpers for tests of the runtime without a GPU. They run functions on streams and record the
// order in which the functions ran.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "tests/check.h"

extern "C" const char* kvcache_gpuless_counter(size_t i);
extern "C" long kvcache_gpuless_count(size_t i);

namespace kvcache::test {

// Returns the value of the runtime's counter with this name.
inline long count(const std::string& name) {
  for (size_t i = 0; kvcache_gpuless_counter(i) != nullptr; ++i) {
    if (name == kvcache_gpuless_counter(i)) return kvcache_gpuless_count(i);
  }
  throw Failure("no counter is called " + name);
}

inline std::string ran;  // one letter per host function that ran

inline void note(cudaStream_t stream, const char* letter) {
  const auto append = [](void* text) { ran += static_cast<const char*>(text); };
  CHECK_EQ(cudaLaunchHostFunc(stream, append, const_cast<char*>(letter)), cudaSuccess);
}

inline cudaStream_t new_stream(unsigned flags = cudaStreamNonBlocking) {
  cudaStream_t stream = nullptr;
  CHECK_EQ(cudaStreamCreateWithFlags(&stream, flags), cudaSuccess);
  return stream;
}

inline cudaEvent_t recorded(cudaStream_t stream) {
  cudaEvent_t event = nullptr;
  CHECK_EQ(cudaEventCreate(&event), cudaSuccess);
  CHECK_EQ(cudaEventRecord(event, stream), cudaSuccess);
  return event;
}

}  // namespace kvcache::test
