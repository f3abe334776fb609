// SPDX-License-Identifier: Apache-2.0
// The library of emulated kernels, which consists of this file and csrc/ops/*.cu, compiled by g++
// with KVCACHE_GPULESS.
#include "emul/runtime/bind.h"

extern "C" __attribute__((visibility("default"))) const kvcache::gpuless::Bound*
kvcache_gpuless_bound_kernels(size_t* count) {
  const auto& all = kvcache::gpuless::bound_kernels();
  *count = all.size();
  return all.data();
}
