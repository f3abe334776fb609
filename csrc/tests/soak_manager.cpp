// SPDX-License-Identifier: Apache-2.0
// Runs random operations on managers for a given time: soak_manager SECONDS [SEED]. Prints seeds
// and the rate. Each seed creates a manager with different options. A failure prints its seed.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <random>

#include "tests/manager_driver.h"

namespace {

constexpr int kOperations = 20'000;  // operations per seed
// One in kOneIn operations is followed by a check of tables and invariants.
constexpr int kOneIn = 50;

double seconds() {
  using Clock = std::chrono::steady_clock;
  return std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
}

}  // namespace

int main(int argc, char** argv) {
  const double wanted = argc > 1 ? std::atof(argv[1]) : 60;
  const uint64_t first = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : std::random_device{}();
  const double started = seconds();
  double told = started;
  for (uint64_t seed = first;; ++seed) {
    try {
      kvcache::test::ManagerDriver(seed).run(kOperations, kOneIn);
    } catch (const std::exception& error) {
      std::printf("FAILED seed %llu: %s\n", static_cast<unsigned long long>(seed), error.what());
      return 1;
    }
    const double now = seconds();
    const bool is_done = now - started >= wanted;
    if (!is_done && now - told < 60) continue;
    told = now;
    const double operations = static_cast<double>(seed - first + 1) * kOperations;
    std::printf("seeds %llu to %llu: %.0f operations in %.0f s, %.0f per second\n",
                static_cast<unsigned long long>(first), static_cast<unsigned long long>(seed),
                operations, now - started, operations / (now - started));
    std::fflush(stdout);
    if (is_done) return 0;
  }
}
