// The threads of the running block, and when their barriers and warp operations complete.
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

  void number_threads(dim3 block) {
    threads.assign(size_t(block.x) * block.y * block.z, Thread{});
    unsigned linear = 0;
    for (unsigned z = 0; z < block.z; ++z) {
      for (unsigned y = 0; y < block.y; ++y) {
        for (unsigned x = 0; x < block.x; ++x, ++linear) {
          threads[linear].index = {x, y, z};
          threads[linear].linear = linear;
        }
      }
    }
  }

  // Called for warps of which no thread can run, so every published operand has been read.
  // Completes all their operations that it can, else the block's barrier. Returns whether it
  // completed any.
  bool release(const std::vector<bool>& warps) {
    bool released = false;
    for (unsigned first = 0; first < threads.size(); first += kWarpLanes) {
      if (warps[first / kWarpLanes]) released |= release_warp(first);
    }
    return released || release_barrier();
  }

  // How many threads voted for it at the barrier that just completed.
  int num_true() const { return num_true_; }

  // The value that another lane offered in the warp operation that the reader just completed.
  uint64_t read(const Thread& reader, unsigned lane) const {
    // CUDA leaves the value undefined; poison makes a kernel that uses it fail its test.
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
  // Completes every warp operation whose lanes all arrived. Exited lanes do not take part, nor do
  // lanes that a last, partial warp does not have.
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

  // Completes the block's barrier when all live threads wait at the same one. Two __syncthreads on
  // different lines are different: hardware may let that pass, CUDA's rules do not.
  bool release_barrier() {
    const Thread* first = nullptr;
    int num_true = 0;
    for (const Thread& thread : threads) {
      if (thread.wait == Wait::kExited) continue;
      if (!is_block_wait(thread.wait)) return false;
      if (first == nullptr) first = &thread;
      if (thread.wait != first->wait || !(thread.site == first->site)) return false;
      num_true += int(thread.offered);
    }
    for (Thread& thread : threads) {
      if (thread.wait != Wait::kExited) thread.wait = Wait::kNone;
    }
    num_true_ = num_true;
    return true;
  }

  int num_true_ = 0;
};

}  // namespace emul
