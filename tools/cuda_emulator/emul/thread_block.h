// SPDX-License-Identifier: Apache-2.0
// The threads in the running block or cluster, and the completion of their barriers and warp
// operations.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "emul/thread.h"
#include "emul/types.h"

namespace emul {

class ThreadBlock {
 public:
  std::vector<Thread> threads;

  void number_threads(dim3 block, unsigned num_blocks) {
    block_threads_ = block.x * block.y * block.z;
    num_true_.assign(num_blocks, 0);
    threads.assign(size_t(block_threads_) * num_blocks, Thread{});
    unsigned linear = 0;
    for (unsigned b = 0; b < num_blocks; ++b) {
      for (unsigned z = 0; z < block.z; ++z) {
        for (unsigned y = 0; y < block.y; ++y) {
          for (unsigned x = 0; x < block.x; ++x, ++linear) {
            threads[linear].index = {x, y, z};
            threads[linear].block = b;
            threads[linear].linear = linear;
          }
        }
      }
    }
  }

  // Called for warps without a runnable thread, so every published operand has been read. Completes
  // all warp operations that can complete. If there are none, completes the barriers of blocks; if
  // there are none of these either, completes the cluster's barrier. Returns whether any operation
  // completed.
  bool release(const std::vector<bool>& warps) {
    bool released = false;
    for (unsigned first = 0; first < threads.size(); first += kWarpLanes) {
      if (warps[first / kWarpLanes]) released |= release_warp(first);
    }
    for (unsigned b = 0; b < num_true_.size() && !released; ++b) {
      released = release_barrier(b * block_threads_, block_threads_, is_block_wait);
    }
    return released || release_barrier(0, unsigned(threads.size()), is_cluster_wait);
  }

  // Returns the number of threads in the block whose predicate was true at the last completed
  // barrier.
  int num_true(unsigned block) const { return num_true_[block]; }

  bool is_live(unsigned block) const {
    const auto first = threads.begin() + std::ptrdiff_t(block * block_threads_);
    return std::any_of(first, first + std::ptrdiff_t(block_threads_),
                       [](const Thread& thread) { return thread.wait != Wait::kExited; });
  }

  // Returns the value that another lane offered in the warp operation that the reader has just
  // completed.
  uint64_t read(const Thread& reader, unsigned lane) const {
    // CUDA leaves this value undefined. With this pattern, a kernel that uses the value fails its
    // tests.
    if ((reader.participants >> lane & 1) == 0) return 0xCDCDCDCDCDCDCDCDu;
    return threads[reader.linear - reader.lane() + lane].published;
  }

  std::string describe_deadlock() const {
    std::map<std::string, int> num_threads_by_wait;
    for (const Thread& thread : threads) ++num_threads_by_wait[describe_wait(thread)];
    std::string text = "barrier deadlock in block " + to_string(blockIdx) + ", " +
                       std::to_string(threads.size()) + " threads: ";
    const char* separator = "";
    for (const auto& [wait, num_threads] : num_threads_by_wait) {
      text += separator + std::to_string(num_threads) + " " + wait;
      separator = ", ";
    }
    return text;
  }

 private:
  // Completes every warp operation whose lanes have all arrived. Lanes that have exited do not
  // participate, nor do missing lanes in a partial last warp.
  bool release_warp(unsigned first) {
    bool released = false;
    for (unsigned i = first; i < warp_end(first); ++i) {
      const Thread& thread = threads[i];
      if (!is_warp_wait(thread.wait)) continue;
      const unsigned arrived = lanes_arrived_with(first, thread);
      const unsigned expected = thread.mask & live_lanes(first);
      if (expected != arrived) continue;
      complete_warp_operation(first, arrived);
      released = true;
    }
    return released;
  }

  unsigned lanes_arrived_with(unsigned first, const Thread& thread) const {
    unsigned lanes = 0;
    for (unsigned i = first; i < warp_end(first); ++i) {
      const bool same = threads[i].wait == thread.wait && threads[i].mask == thread.mask;
      lanes |= unsigned(same) << (i - first);
    }
    return lanes;
  }

  unsigned live_lanes(unsigned first) const {
    unsigned lanes = 0;
    for (unsigned i = first; i < warp_end(first); ++i) {
      lanes |= unsigned(threads[i].wait != Wait::kExited) << (i - first);
    }
    return lanes;
  }

  void complete_warp_operation(unsigned first, unsigned lanes) {
    for (unsigned i = first; i < warp_end(first); ++i) {
      if ((lanes >> (i - first) & 1) == 0) continue;
      threads[i].published = threads[i].offered;
      threads[i].participants = lanes;
      threads[i].wait = Wait::kNone;
    }
  }

  unsigned warp_end(unsigned first) const {
    return std::min(first + kWarpLanes, unsigned(threads.size()));
  }

  // Completes a barrier for `count` threads if all live threads wait at the same barrier. Calls of
  // __syncthreads on different source lines are different barriers: hardware may accept threads
  // that wait at different barriers, but CUDA's rules do not allow this.
  bool release_barrier(unsigned begin, unsigned count, bool (*is_wait)(Wait)) {
    const Thread* first = nullptr;
    int num_true = 0;
    for (unsigned i = begin; i < begin + count; ++i) {
      const Thread& thread = threads[i];
      if (thread.wait == Wait::kExited) continue;
      if (!is_wait(thread.wait)) return false;
      if (first == nullptr) first = &thread;
      if (thread.wait != first->wait || !(thread.site == first->site)) return false;
      num_true += int(thread.offered);
    }
    if (first == nullptr) return false;
    num_true_[first->block] = num_true;
    for (unsigned i = begin; i < begin + count; ++i) {
      if (threads[i].wait != Wait::kExited) threads[i].wait = Wait::kNone;
    }
    return true;
  }

  unsigned block_threads_ = 0;
  std::vector<int> num_true_;  // number of true predicates per block
};

}  // namespace emul
