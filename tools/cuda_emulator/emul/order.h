// SPDX-License-Identifier: Apache-2.0
// The order in which blocks and threads run.
//
// CUDA does not guarantee any order. With KVCACHE_EMUL_SEED=<number>, each launch draws a random
// order from the seed and the launch dimensions: the grid's blocks and each block's threads run in
// any order, and some warps pause while others proceed to their next barrier. The same seed results
// in the same order. Without a seed, blocks and threads run from first to last, and warps take
// turns.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "emul/types.h"

namespace emul {

class Order {
 public:
  // Draws the order for the next launch.
  void draw(dim3 grid, dim3 block) {
    const char* seed = std::getenv("KVCACHE_EMUL_SEED");
    random_ = seed != nullptr && seed[0] != '\0';
    if (!random_) return;
    char* end = nullptr;
    state_ = std::strtoull(seed, &end, 10);
    if (*end != '\0') {
      throw std::invalid_argument("KVCACHE_EMUL_SEED is " + std::string(seed) +
                                  ": expected a number");
    }
    for (uint64_t n : {grid.x, grid.y, grid.z, block.x, block.y, block.z}) state_ = next() + n;
  }

  bool is_random() const { return random_; }

  // Returns the indices from 0 to n - 1 in the order of execution.
  std::vector<uint64_t> of(uint64_t n) {
    std::vector<uint64_t> order(n);
    std::iota(order.begin(), order.end(), uint64_t{0});
    shuffle(order);
    return order;
  }

  template <class T>
  void shuffle(std::vector<T>& order) {
    if (!random_) return;
    for (size_t n = order.size(); n > 1; --n) std::swap(order[n - 1], order[next() % n]);
  }

  // Returns whether a warp proceeds in this round. Always true without a seed.
  bool goes_on() { return !random_ || next() % 4 != 0; }

 private:
  // A random number generator (SplitMix64).
  uint64_t next() {
    uint64_t x = state_ += 0x9E3779B97F4A7C15u;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
  }

  bool random_ = false;
  uint64_t state_ = 0;
};

}  // namespace emul
