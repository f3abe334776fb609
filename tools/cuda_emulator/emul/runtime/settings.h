// SPDX-License-Identifier: Apache-2.0
// The runtime's settings, which are read once from the environment. docs/gpu_less.md documents
// them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace kvcache::gpuless {

struct Settings {
  uint64_t seed = 1;               // KVCACHE_GPULESS_SEED: the order of streams
  bool late = true;                // KVCACHE_GPULESS_LATE=0: each task runs when it is submitted
  size_t device_bytes = 0;         // KVCACHE_GPULESS_DEVICE_BYTES: size of the device's memory
  size_t locked_bytes = 0;         // KVCACHE_GPULESS_LOCKED_BYTES: limit of registered host memory
  bool other_pointers = false;     // KVCACHE_GPULESS_DEVICE_POINTERS=different
  bool joined_neighbours = false;  // KVCACHE_GPULESS_NEIGHBOURS=joined
  bool batches_fail = false;       // KVCACHE_GPULESS_BATCHES=fail
  bool batches_crash = false;      // KVCACHE_GPULESS_BATCHES=crash
  bool no_loading_in_captures = false;  // KVCACHE_GPULESS_LOADING=lazy: as in drivers before 12.3
  std::string limits;                   // KVCACHE_GPULESS_LIMITS: see limits.h
  std::string kernels;                  // KVCACHE_GPULESS_KERNELS: the library of emulated kernels
};

const Settings& settings();

}  // namespace kvcache::gpuless
