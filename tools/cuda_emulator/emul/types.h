// SPDX-License-Identifier: Apache-2.0
// CUDA's keywords, built-in types and built-in variables.
#pragma once

#include <string>

#define __global__
#define __device__
#define __host__
#define __forceinline__ __inline__ __attribute__((always_inline))
#define __launch_bounds__(...)

// A launch's blocks run one after another, so one copy per OS thread is enough. Only
// -fsanitize=bounds detects out-of-range indices in this memory; AddressSanitizer does not, and the
// memory is not poisoned between blocks. Dynamic shared memory has both checks.
#define __shared__ static thread_local

struct uint2 {
  unsigned x, y;
} __attribute__((aligned(8)));
struct uint3 {
  unsigned x, y, z;
};
struct int4 {
  int x, y, z, w;
} __attribute__((aligned(16)));
struct uint4 {
  unsigned x, y, z, w;
} __attribute__((aligned(16)));

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned nx = 1, unsigned ny = 1, unsigned nz = 1) : x(nx), y(ny), z(nz) {}
};

inline thread_local uint3 threadIdx{0, 0, 0};
inline thread_local uint3 blockIdx{0, 0, 0};
inline thread_local dim3 blockDim;
inline thread_local dim3 gridDim;

namespace emul {

inline std::string to_string(const uint3& v) {
  return "(" + std::to_string(v.x) + "," + std::to_string(v.y) + "," + std::to_string(v.z) + ")";
}

}  // namespace emul
