// Marks functions shared by the CPU op and the CUDA kernel, compiled for both.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define KV_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define KV_HOST_DEVICE inline
#endif
