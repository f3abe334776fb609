// SPDX-License-Identifier: Apache-2.0
// Combines the extents of a group whose elements are distributed over the lanes of a warp.
#pragma once

#ifndef __CUDACC__
#include "emul/cuda_emul.h"
#endif

#include "ops/group_scales.h"

namespace kvcache {

constexpr unsigned kWarp = 32, kFullWarp = 0xFFFFFFFFu;

// Combines the extents of as many neighboring lanes. All lanes of the warp must take part.
template <unsigned lanes = kWarp>
__device__ __forceinline__ void merge_lanes(Magnitudes& extent) {
#pragma unroll
  for (unsigned step = lanes / 2; step > 0; step /= 2) {
    extent.merge(__shfl_xor_sync(kFullWarp, extent.number, step),
                 __shfl_xor_sync(kFullWarp, extent.any, step));
  }
}
template <unsigned lanes = kWarp>
__device__ __forceinline__ void merge_lanes(Range& extent) {
#pragma unroll
  for (unsigned step = lanes / 2; step > 0; step /= 2) {
    extent.merge(__shfl_xor_sync(kFullWarp, extent.least, step),
                 __shfl_xor_sync(kFullWarp, extent.most, step),
                 __shfl_xor_sync(kFullWarp, extent.any, step));
  }
}

}  // namespace kvcache
