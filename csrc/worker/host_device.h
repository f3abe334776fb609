// SPDX-License-Identifier: Apache-2.0
// Marks functions that are compiled for both the CPU op and the CUDA kernel.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define KV_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define KV_HOST_DEVICE inline
#endif
