// Helpers for tests of the runtime without a GPU: streams whose work leaves a trace.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "tests/check.h"

namespace kvcache::test {

inline std::string ran;  // a letter per host function that ran

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
