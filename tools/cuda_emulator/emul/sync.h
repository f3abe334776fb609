// SPDX-License-Identifier: Apache-2.0
// Barriers, warp shuffles and votes. The last argument, `site`, is the caller's source line; it is
// never passed explicitly.
#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "emul/scheduler.h"
#include "emul/thread.h"

inline void __syncthreads(emul::Site site = emul::Site::here()) {
  emul::emulator().sync_block(emul::Wait::kSyncThreads, false, site);
}

inline int __syncthreads_count(int predicate, emul::Site site = emul::Site::here()) {
  return emul::emulator().sync_block(emul::Wait::kSyncThreadsVote, predicate != 0, site);
}

inline int __syncthreads_or(int predicate, emul::Site site = emul::Site::here()) {
  return __syncthreads_count(predicate, site) > 0;
}

inline int __syncthreads_and(int predicate, emul::Site site = emul::Site::here()) {
  return __syncthreads_count(predicate == 0, site) == 0;
}

inline void __syncwarp(unsigned mask = emul::kFullMask, emul::Site site = emul::Site::here()) {
  emul::emulator().sync_warp(emul::Wait::kSyncWarp, mask, 0, site);
}

namespace emul {

// Participates in a shuffle. Returns source_lane's value, or `value` if in_range is false.
template <class T>
T shuffle(unsigned mask, T value, unsigned source_lane, bool in_range, Site site) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>, "shuffles move 8 bytes at most");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  emulator().sync_warp(Wait::kShuffle, mask, bits, site);
  if (!in_range) return value;
  bits = emulator().read(source_lane);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

// Returns the first lane in the caller's segment of `width` lanes.
inline unsigned segment_begin(int width) {
  if (width < 1 || width > 32 || (width & (width - 1)) != 0) {
    throw std::logic_error("shuffle: width must be a power of two up to 32, got " +
                           std::to_string(width));
  }
  return emulator().current().lane() & ~unsigned(width - 1);
}

}  // namespace emul

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32,
              emul::Site site = emul::Site::here()) {
  const unsigned begin = emul::segment_begin(width);
  return emul::shuffle(mask, value, begin + (unsigned(source) & unsigned(width - 1)), true, site);
}

template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32,
                 emul::Site site = emul::Site::here()) {
  const int source = int(emul::emulator().current().lane()) - int(delta % 32);
  const bool in_range = source >= int(emul::segment_begin(width));
  return emul::shuffle(mask, value, unsigned(source), in_range, site);
}

template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32,
                   emul::Site site = emul::Site::here()) {
  const unsigned source = emul::emulator().current().lane() + delta % 32;
  const bool in_range = source < emul::segment_begin(width) + unsigned(width);
  return emul::shuffle(mask, value, source, in_range, site);
}

// As in CUDA, may read from earlier segments but not from later segments.
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32,
                  emul::Site site = emul::Site::here()) {
  const unsigned source = emul::emulator().current().lane() ^ (unsigned(lane_mask) % 32);
  const bool in_range = source < emul::segment_begin(width) + unsigned(width);
  return emul::shuffle(mask, value, source, in_range, site);
}

inline unsigned __ballot_sync(unsigned mask, int predicate, emul::Site site = emul::Site::here()) {
  emul::Emulator& emulator = emul::emulator();
  emulator.sync_warp(emul::Wait::kVote, mask, predicate != 0, site);
  unsigned ballot = 0;
  for (unsigned lanes = emulator.current().participants; lanes != 0; lanes &= lanes - 1) {
    const unsigned lane = unsigned(__builtin_ctz(lanes));
    ballot |= unsigned(emulator.read(lane)) << lane;
  }
  return ballot;
}

inline int __any_sync(unsigned mask, int predicate, emul::Site site = emul::Site::here()) {
  return __ballot_sync(mask, predicate, site) != 0;
}

inline int __all_sync(unsigned mask, int predicate, emul::Site site = emul::Site::here()) {
  return __ballot_sync(mask, predicate == 0, site) == 0;
}

// Returns only the calling lane. This is valid, because CUDA does not guarantee convergence. As a
// result, code that assumes that __activemask() contains all lanes in a branch fails its tests.
inline unsigned __activemask() { return 1u << emul::emulator().current().lane(); }
