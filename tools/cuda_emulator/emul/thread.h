// SPDX-License-Identifier: Apache-2.0
// A CUDA thread in the running block, and the operation for which the thread waits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "emul/fiber.h"
#include "emul/types.h"

namespace emul {

inline constexpr unsigned kWarpLanes = 32;
inline constexpr unsigned kFullMask = 0xffffffffu;

// A location in a kernel's source. As a default argument, here() returns the caller's line.
struct Site {
  const char* file = "";
  int line = 0;

  static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return Site{file, line};
  }
};

inline bool operator==(const Site& a, const Site& b) {
  return a.line == b.line && (a.file == b.file || std::strcmp(a.file, b.file) == 0);
}

inline std::string to_string(const Site& site) {
  return std::string(site.file) + ":" + std::to_string(site.line);
}

enum class Wait {
  kNotBegun,
  kNone,
  kSyncThreads,
  kSyncThreadsVote,
  kSyncCluster,
  kSyncWarp,
  kShuffle,
  kVote,
  kExited
};

inline bool is_block_wait(Wait wait) {
  return wait == Wait::kSyncThreads || wait == Wait::kSyncThreadsVote;
}

inline bool is_cluster_wait(Wait wait) { return wait == Wait::kSyncCluster; }

inline bool is_warp_wait(Wait wait) {
  return wait == Wait::kSyncWarp || wait == Wait::kShuffle || wait == Wait::kVote;
}

inline const char* wait_name(Wait wait) {
  switch (wait) {
    case Wait::kSyncThreads:
      return "__syncthreads";
    case Wait::kSyncThreadsVote:
      return "__syncthreads_count/or/and";
    case Wait::kSyncCluster:
      return "cluster_sync";
    case Wait::kSyncWarp:
      return "__syncwarp";
    case Wait::kShuffle:
      return "__shfl_*sync";
    case Wait::kVote:
      return "__ballot/any/all_sync";
    default:
      return "nothing";
  }
}

struct Thread {
  uint3 index;
  unsigned block;         // rank of the thread's block in its cluster; 0 without clusters
  unsigned linear;        // x + y * blockDim.x + z * blockDim.x * blockDim.y, after the threads of
                          // the cluster's earlier blocks
  Wait wait;              // the operation that it waits for; kNone: runnable
  unsigned mask;          // lanes in its current warp operation
  Site site;              // the source location where it waits
  Fiber* fiber;           // the fiber on whose stack it waits
  uint64_t offered;       // operand of a shuffle or vote
  uint64_t published;     // operand of the last completed operation, which other lanes read
  unsigned participants;  // lanes in the last completed warp operation

  unsigned lane() const { return linear % kWarpLanes; }
};

inline std::string describe_wait(const Thread& thread) {
  if (thread.wait == Wait::kExited) return "exited";
  std::string text = std::string("waiting at ") + wait_name(thread.wait);
  if (is_warp_wait(thread.wait)) {
    text += " of " + std::to_string(__builtin_popcount(thread.mask)) + " lanes";
  }
  return text + " (" + to_string(thread.site) + ")";
}

}  // namespace emul
