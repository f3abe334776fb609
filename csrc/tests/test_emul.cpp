// SPDX-License-Identifier: Apache-2.0
// Tests that the emulator behaves like CUDA. Each test covers one behavior on which kernels rely.

#include <cstdlib>
#include <functional>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "emul/cuda_emul.h"

namespace {

constexpr unsigned kFull = 0xffffffffu;

// Runs a kernel in one block.
template <class F>
void run_block(unsigned num_threads, F&& kernel) {
  emul::launch(dim3(1), dim3(num_threads), 0, kernel);
}

__global__ void record_position(int* out) {
  const unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  const unsigned position = block * blockDim.x * blockDim.y * blockDim.z + thread;
  out[position] += int(position) + 1;
}

__global__ void __launch_bounds__(1024) block_sum(const int* in, int* out) {
  __shared__ int partial[1024];
  const unsigned t = threadIdx.x;
  partial[t] = in[blockIdx.x * blockDim.x + t];
  __syncthreads();
  for (unsigned stride = blockDim.x / 2; stride > 0; stride /= 2) {
    if (t < stride) partial[t] += partial[t + stride];
    __syncthreads();
  }
  if (t == 0) out[blockIdx.x] = partial[0];
}

__global__ void reverse_in_dynamic_shared(int* data) {
  KV_DYN_SHARED(int, buffer);
  buffer[threadIdx.x] = data[threadIdx.x];
  __syncthreads();
  data[threadIdx.x] = buffer[blockDim.x - 1 - threadIdx.x];
}

__global__ void barrier_only_for_first_half() {
  if (threadIdx.x < blockDim.x / 2) __syncthreads();
  __syncwarp();
}

// Lacks a barrier. The kernel is wrong on a GPU, but correct if the threads run in ascending order.
__global__ void previous_without_barrier(int* data) {
  KV_DYN_SHARED(int, buffer);
  buffer[threadIdx.x] = data[threadIdx.x];
  if (threadIdx.x > 0) data[threadIdx.x] = buffer[threadIdx.x - 1];
}

// Lacks a barrier, so a thread may begin its next round while other threads still read.
__global__ void next_in_rounds(int* data) {
  KV_DYN_SHARED(int, buffer);
  for (int round = 0; round < 2; ++round) {
    buffer[threadIdx.x] = int(threadIdx.x) + 100 * round;
    __syncthreads();
    if (threadIdx.x + 1 < blockDim.x) data[threadIdx.x] += buffer[threadIdx.x + 1];
  }
}

// Reads values of another warp, although its barrier covers only one warp.
__global__ void next_warp_after_syncwarp(int* data) {
  KV_DYN_SHARED(int, buffer);
  buffer[threadIdx.x] = int(threadIdx.x);
  __syncwarp();
  data[threadIdx.x] = buffer[(threadIdx.x + 32) % blockDim.x];
}

std::vector<int> iota(int n) {
  std::vector<int> values(n);
  std::iota(values.begin(), values.end(), 0);
  return values;
}

}  // namespace

// Sets the seed of the order of threads and blocks while the object exists.
struct Seed {
  explicit Seed(const std::string& seed) { setenv("KVCACHE_EMUL_SEED", seed.c_str(), 1); }
  ~Seed() { unsetenv("KVCACHE_EMUL_SEED"); }
};

// Returns the number of seeds from 1 to 20 for which a predicate is true.
template <class F>
int num_seeds(F&& holds) {
  int count = 0;
  for (int n = 1; n <= 20; ++n) {
    const Seed seed(std::to_string(n));
    count += int(holds());
  }
  return count;
}

template <class F>
void in_any_order(F&& body) {
  body();
  num_seeds([&] { return body(), true; });
}

TEST(every_thread_of_a_3d_grid_runs_once_with_its_own_index) {
  in_any_order([] {
    std::vector<int> out(3 * 2 * 4 * 5 * 3 * 4, 0);
    emul::launch(dim3(3, 2, 4), dim3(5, 3, 4), 0, [&] { record_position(out.data()); });
    for (int i = 0; i < int(out.size()); ++i) CHECK_EQ(out[i], i + 1);
  });
}

TEST(blocks_of_up_to_1024_threads_reduce_in_static_shared_memory) {
  const std::vector<int> in = iota(4 * 128), most = iota(1024);
  in_any_order([&] {
    std::vector<int> out(4);
    emul::launch(dim3(4), dim3(128), 0, [&] { block_sum(in.data(), out.data()); });
    for (int b = 0; b < 4; ++b) CHECK_EQ(out[b], 128 * 128 * b + 127 * 128 / 2);
    run_block(1024, [&] { block_sum(most.data(), out.data()); });
    CHECK_EQ(out[0], 1023 * 1024 / 2);
  });
}

TEST(dynamic_shared_memory_is_shared_by_the_block) {
  in_any_order([] {
    std::vector<int> data = iota(100);
    emul::launch(dim3(1), dim3(100), 400, [&] { reverse_in_dynamic_shared(data.data()); });
    for (int i = 0; i < 100; ++i) CHECK_EQ(data[i], 99 - i);
  });
}

TEST(dynamic_shared_memory_is_aligned_and_poisoned_for_every_block) {
  emul::launch(dim3(3), dim3(1), 17, [] {
    KV_DYN_SHARED(unsigned char, buffer);
    CHECK_EQ(reinterpret_cast<uintptr_t>(buffer) % 16, 0);
    for (int i = 0; i < 17; ++i) CHECK_EQ(int(buffer[i]), 0xCD);
    buffer[16] = 1;
  });
}

TEST(syncthreads_votes_over_the_block) {
  run_block(96, [] {
    CHECK_EQ(__syncthreads_count(threadIdx.x % 3 == 0), 32);
    CHECK_EQ(__syncthreads_or(threadIdx.x == 95), 1);
    CHECK_EQ(__syncthreads_or(0), 0);
    CHECK_EQ(__syncthreads_and(1), 1);
    CHECK_EQ(__syncthreads_and(threadIdx.x != 40), 0);
  });
}

TEST(shuffle_reads_any_lane) {
  run_block(64, [] {
    const int warp_base = int(threadIdx.x) / 32 * 32;
    const int lane = int(threadIdx.x) % 32;
    CHECK_EQ(__shfl_sync(kFull, int(threadIdx.x), 7), warp_base + 7);
    CHECK_EQ(__shfl_sync(kFull, double(threadIdx.x), lane + 1), warp_base + (lane + 1) % 32);
  });
}

TEST(shuffle_up_down_xor_keep_the_own_value_past_the_edge) {
  run_block(32, [] {
    const int lane = int(threadIdx.x);
    for (const int width : {32, 16}) {
      const int first = lane / width * width;  // shuffles stay in their half
      CHECK_EQ(__shfl_sync(kFull, lane, 18, width), first + 18 % width);
      CHECK_EQ(__shfl_up_sync(kFull, lane, 4, width), lane - first >= 4 ? lane - 4 : lane);
      CHECK_EQ(__shfl_down_sync(kFull, lane, 5, width), lane - first + 5 < width ? lane + 5 : lane);
      CHECK_EQ(__shfl_xor_sync(kFull, lane, 8, width), lane ^ 8);
    }
    CHECK_EQ(__shfl_xor_sync(kFull, lane, 16), lane ^ 16);
    // With width 16, only the earlier half is reached.
    CHECK_EQ(__shfl_xor_sync(kFull, lane, 16, 16), lane < 16 ? lane : lane - 16);
  });
}

TEST(back_to_back_shuffles_do_not_mix) {
  in_any_order([] {
    run_block(64, [] {
      int sum = int(threadIdx.x);
      for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(kFull, sum, offset);
      CHECK_EQ(sum, threadIdx.x < 32 ? 31 * 16 : 31 * 16 + 32 * 32);
    });
  });
}

TEST(votes_combine_the_predicates_of_a_warp) {
  run_block(32, [] {
    const int lane = int(threadIdx.x);
    CHECK_EQ(__ballot_sync(kFull, lane % 4 == 1), 0x22222222u);
    CHECK_EQ(__any_sync(kFull, lane == 31), 1);
    CHECK_EQ(__any_sync(kFull, 0), 0);
    CHECK_EQ(__all_sync(kFull, 1), 1);
    CHECK_EQ(__all_sync(kFull, lane != 0), 0);
  });
}

TEST(last_partial_warp_votes_and_shuffles_among_its_lanes) {
  run_block(40, [] {
    const bool last = threadIdx.x >= 32;
    CHECK_EQ(__ballot_sync(kFull, 1), last ? 0xffu : kFull);
    CHECK_EQ(__all_sync(kFull, 1), 1);
    CHECK_EQ(__shfl_sync(kFull, int(threadIdx.x), 7), last ? 39 : 7);
  });
}

TEST(a_shuffle_from_a_missing_lane_returns_the_poison_pattern) {
  run_block(8, [] { CHECK_EQ(__shfl_sync(kFull, threadIdx.x, 20), 0xCDCDCDCDu); });
}

TEST(halves_of_a_warp_synchronize_separately_with_partial_masks) {
  run_block(32, [] {
    const int lane = int(threadIdx.x);
    if (lane < 16) {
      CHECK_EQ(__shfl_sync(0x0000ffffu, lane, 3), 3);
      CHECK_EQ(__ballot_sync(0x0000ffffu, 1), 0x0000ffffu);
    } else {
      CHECK_EQ(__ballot_sync(0xffff0000u, lane > 29), 0xc0000000u);
    }
    __syncwarp();
  });
}

TEST(active_mask_contains_only_the_calling_lane) {
  run_block(40, [] { CHECK_EQ(__activemask(), 1u << threadIdx.x % 32); });
}

TEST(atomics_combine_the_values_of_all_threads) {
  int sum = 0, highest = -1, lowest = 1000, last = -1;
  unsigned all_bits = 0, common_bits = kFull, owner = kFull;
  float float_sum = 0;
  emul::launch(dim3(4), dim3(64), 0, [&] {
    const int i = int(blockIdx.x * 64 + threadIdx.x);
    atomicAdd(&sum, i);
    atomicAdd(&float_sum, 0.5f);
    atomicMax(&highest, i);
    atomicMin(&lowest, i);
    atomicOr(&all_bits, 1u << i % 32);
    atomicAnd(&common_bits, ~(1u << i % 16));
    atomicCAS(&owner, kFull, unsigned(i));
    CHECK_EQ(atomicExch(&last, i), i - 1);
  });
  CHECK_EQ(sum, 255 * 256 / 2);
  CHECK_EQ(float_sum, 128.0f);
  CHECK_EQ(highest, 255);
  CHECK_EQ(lowest, 0);
  CHECK_EQ(all_bits, kFull);
  CHECK_EQ(common_bits, 0xffff0000u);
  CHECK_EQ(owner, 0);
  CHECK_EQ(last, 255);
}

TEST(atomic_add_of_an_int_wraps_around) {
  int value = 0x7fffffff;
  CHECK_EQ(atomicAdd(&value, 1), 0x7fffffff);
  CHECK_EQ(value, -0x7fffffff - 1);
}

TEST(integer_functions_match_cuda) {
  CHECK_EQ(__popc(0xf0u), 4);
  CHECK_EQ(__popcll(0xf00000000ull), 4);
  CHECK_EQ(__ffs(0), 0);
  CHECK_EQ(__ffs(8), 4);
  CHECK_EQ(__ffsll(1ll << 40), 41);
  CHECK_EQ(__clz(0), 32);
  CHECK_EQ(__clz(1), 31);
  CHECK_EQ(min(3, -2), -2);
  CHECK_EQ(max(int64_t{3}, int64_t{9}), 9);
}

TEST(exited_threads_do_not_take_part_in_later_barriers) {
  int num_after = 0;
  run_block(64, [&] {
    if (threadIdx.x % 2 == 1) return;
    __syncthreads();
    CHECK_EQ(__syncthreads_count(1), 32);
    CHECK_EQ(__ballot_sync(kFull, 1), 0x55555555u);
    ++num_after;
  });
  CHECK_EQ(num_after, 32);
}

TEST(divergent_barrier_is_reported_with_block_counts_and_lines) {
  in_any_order([] {
    const auto launch = [] { emul::launch(dim3(3), dim3(32), 0, barrier_only_for_first_half); };
    CHECK_THROWS(launch(), ",0,0), 32 threads: 16 waiting at");
    CHECK_THROWS(launch(), "16 waiting at __syncwarp of 32 lanes (");
    CHECK_THROWS(launch(), "test_emul.cpp:");
  });
  CHECK_THROWS(run_block(32, barrier_only_for_first_half), "barrier deadlock in block (0,0,0)");
}

TEST(barriers_that_do_not_match_are_reported) {
  const auto on_different_lines = [] {
    if (threadIdx.x < 16) __syncthreads();
    __syncthreads();
  };
  CHECK_THROWS(run_block(32, on_different_lines), "barrier deadlock");
  const auto lanes_that_never_arrive = [] {
    if (threadIdx.x < 4) __shfl_sync(0xffu, 1, 0);
    __syncthreads();
  };
  CHECK_THROWS(run_block(32, lanes_that_never_arrive), "4 waiting at __shfl_*sync of 8 lanes");
  CHECK_THROWS(run_block(32, [] { __syncwarp(1); }), "lane 1 is not in its own mask");
}

TEST(next_launch_works_after_a_deadlock) {
  CHECK_THROWS(run_block(32, barrier_only_for_first_half), "barrier deadlock");
  const std::vector<int> in = iota(256);
  int out = 0;
  run_block(256, [&] { block_sum(in.data(), &out); });
  CHECK_EQ(out, 255 * 128);
}

TEST(exception_of_a_thread_reaches_the_caller_and_the_next_launch_works) {
  const auto throw_after_barrier = [] {
    __syncthreads();
    if (threadIdx.x == 33) throw std::out_of_range("thread 33");
    __syncthreads();
  };
  for (int repeat = 0; repeat < 3; ++repeat) {
    CHECK_THROWS(run_block(64, throw_after_barrier), "thread 33");
    int count = 0;
    run_block(64, [&] { count = __syncthreads_count(1); });
    CHECK_EQ(count, 64);
  }
}

TEST(failed_check_in_a_kernel_reaches_the_caller) {
  CHECK_THROWS(run_block(32, [] { CHECK_EQ(threadIdx.x / 31, 0); }), "1 != 0");
}

TEST(trap_throws_with_its_position) {
  const auto kernel = [] {
    if (blockIdx.x == 1 && threadIdx.x == 2) __trap();
  };
  CHECK_THROWS(emul::launch(dim3(2), dim3(4), 0, kernel), "block (1,0,0), thread (2,0,0)");
}

TEST(launch_from_a_kernel_is_rejected) {
  const auto kernel = [] { run_block(1, [] {}); };
  CHECK_THROWS(run_block(1, kernel), "can not launch a kernel");
}

TEST(invalid_launches_are_rejected) {
  const auto launch = [](dim3 grid, dim3 block, size_t shared) {
    emul::launch(grid, block, shared, [] {});
  };
  CHECK_THROWS(launch(dim3(0), dim3(1), 0), "grid must not be empty, got (0,1,1)");
  CHECK_THROWS(launch(dim3(1), dim3(1, 0), 0), "block must not be empty");
  CHECK_THROWS(launch(dim3(1), dim3(1025), 0), "block must be at most");
  CHECK_THROWS(launch(dim3(1), dim3(32, 33), 0), "at most 1024 threads");
  CHECK_THROWS(launch(dim3(1), dim3(1, 1, 65), 0), "block must be at most");
  CHECK_THROWS(launch(dim3(1, 65536), dim3(1), 0), "at most 65535");
  CHECK_THROWS(launch(dim3(1, 1, 65536), dim3(1), 0), "at most 65535");
  CHECK_THROWS(launch(dim3(1), dim3(1), 227 * 1024 + 1), "at most 227 KiB");
  launch(dim3(1), dim3(1), 227 * 1024);
}

// Each block of the cluster stores one number per thread, and reads the numbers of the next block.
__global__ void next_in_cluster(int* out, unsigned cluster) {
  KV_DYN_SHARED(int, buffer);
  const unsigned rank = blockIdx.x % cluster;
  buffer[threadIdx.x] = int(blockIdx.x * blockDim.x + threadIdx.x);
  emul::cluster_sync();
  out[blockIdx.x * blockDim.x + threadIdx.x] =
      *emul::shared_of_block(buffer + threadIdx.x, (rank + 1) % cluster);
  emul::cluster_sync();
}

TEST(blocks_of_a_cluster_read_each_others_shared_memory) {
  for (unsigned cluster : {1u, 2u, 4u}) {
    std::vector<int> out(8 * 64);
    emul::launch_clusters(dim3(8), dim3(64), 64 * sizeof(int), cluster,
                          [&] { next_in_cluster(out.data(), cluster); });
    for (unsigned b = 0; b < 8; ++b) {
      const unsigned next = b / cluster * cluster + (b + 1) % cluster;
      for (int t = 0; t < 64; ++t) CHECK_EQ(out[b * 64 + t], int(next) * 64 + t);
    }
  }
}

TEST(each_block_of_a_cluster_has_its_own_barriers) {
  std::vector<int> votes(4);
  emul::launch_clusters(dim3(4), dim3(32), 0, 2, [&] {
    const int rounds = blockIdx.x % 2 == 0 ? 1 : 3;  // one block has more rounds than the other
    for (int i = 0; i < rounds; ++i) {
      votes[blockIdx.x] = __syncthreads_count(threadIdx.x < blockIdx.x);
    }
    emul::cluster_sync();
  });
  for (int b = 0; b < 4; ++b) CHECK_EQ(votes[b], b);
}

TEST(shared_memory_of_a_block_that_has_exited_is_not_read) {
  const auto kernel = [] {
    KV_DYN_SHARED(int, buffer);
    buffer[threadIdx.x] = 1;
    if (blockIdx.x == 1) return;  // exits without waiting for the reads of the other block
    for (int i = 0; i < 50; ++i) __syncthreads();
    buffer[threadIdx.x] = *emul::shared_of_block(buffer + threadIdx.x, 1);
  };
  CHECK_THROWS(emul::launch_clusters(dim3(2), dim3(32), 128, 2, kernel), "block 1 has exited");
}

TEST(a_block_missing_at_a_cluster_barrier_is_reported) {
  const auto kernel = [] {
    if (blockIdx.x == 0) emul::cluster_sync();
    __syncthreads();
    emul::cluster_sync();
  };
  CHECK_THROWS(emul::launch_clusters(dim3(2), dim3(32), 0, 2, kernel), "waiting at cluster_sync");
}

TEST(invalid_clusters_are_rejected) {
  const auto launch = [](dim3 grid, dim3 block, unsigned cluster) {
    emul::launch_clusters(grid, block, 0, cluster, [] {});
  };
  CHECK_THROWS(launch(dim3(3), dim3(32), 2),
               "clusters of 2 blocks: expected 1 to 8 blocks, and a divisor");
  CHECK_THROWS(launch(dim3(16), dim3(32), 16), "clusters of 16 blocks");
  CHECK_THROWS(launch(dim3(2), dim3(33), 2), "a partial warp");
  launch(dim3(8), dim3(32), 8);
}

template <void (*kKernel)(int*)>
void launch_with_shared(size_t bytes) {
  std::vector<int> data = iota(32);
  emul::launch_kernel<kKernel>(dim3(1), dim3(32), bytes, 1, data.data());
}

TEST(shared_memory_above_48_kib_needs_an_opt_in_of_the_kernel) {
  constexpr int kOptIn = 100 * 1024;
  const auto attribute = cudaFuncAttributeMaxDynamicSharedMemorySize;
  launch_with_shared<reverse_in_dynamic_shared>(48 * 1024);
  CHECK_THROWS(launch_with_shared<reverse_in_dynamic_shared>(48 * 1024 + 1),
               "this kernel may have 49152");
  CHECK_EQ(cudaFuncSetAttribute(reverse_in_dynamic_shared, attribute, kOptIn), cudaSuccess);
  launch_with_shared<reverse_in_dynamic_shared>(kOptIn);
  CHECK_THROWS(launch_with_shared<reverse_in_dynamic_shared>(kOptIn + 1),
               "this kernel may have 102400");
  CHECK_THROWS(launch_with_shared<previous_without_barrier>(kOptIn), "this kernel may have 49152");
  CHECK_EQ(cudaFuncSetAttribute(reverse_in_dynamic_shared, attribute, 227 * 1024 + 1),
           cudaErrorInvalidValue);
  launch_with_shared<reverse_in_dynamic_shared>(kOptIn);
}

TEST(misaligned_access_ends_the_launch_and_the_next_one_works) {
  alignas(16) unsigned words[12] = {};
  const auto load = [&](int first) {
    uint4 value{};
    run_block(32, [&] {
      if (threadIdx.x == 31) value = *reinterpret_cast<const uint4*>(words + first);
      __syncthreads();
    });
    return value.x;
  };
  words[4] = 7;
  CHECK_EQ(load(4), 7);
  CHECK_THROWS(load(1), "misaligned address at ");
  CHECK_THROWS(load(6), "needs 16 bytes, and the address ends in 8");
  CHECK_EQ(load(4), 7);
  const auto store = [&](int first) {
    run_block(1, [&] { *reinterpret_cast<uint2*>(words + first) = uint2{1, 2}; });
  };
  CHECK_THROWS(store(3), "needs 8 bytes");
  store(2);
  CHECK_EQ(words[3], 2);
}

// --- the order of threads and blocks

TEST(the_order_depends_only_on_the_seed) {
  const auto order = [](const char* text) {
    const Seed seed(text);
    std::vector<int> seen;
    emul::launch(dim3(7), dim3(40), 0, [&] {
      seen.push_back(int(blockIdx.x * 40 + threadIdx.x));
      __syncthreads();
      seen.push_back(int(threadIdx.x));
    });
    return seen;
  };
  CHECK(order("1") == order("1"));
  CHECK(order("1") != order("2"));
  CHECK_EQ(order("")[39], 39);
  CHECK_THROWS(order("one"), "KVCACHE_EMUL_SEED is one: expected a number");
}

// Checks that the kernel writes the wanted entries in the default order. Returns for how many seeds
// it does.
template <class F>
int num_right(unsigned num_threads, const std::vector<int>& data, int first, int last, F&& kernel,
              const std::function<int(int)>& wanted) {
  const auto is_right = [&] {
    std::vector<int> found = data;
    emul::launch(dim3(1), dim3(num_threads), num_threads * sizeof(int),
                 [&] { kernel(found.data()); });
    for (int i = first; i < last; ++i) {
      if (found[i] != wanted(i)) return false;
    }
    return true;
  };
  CHECK(is_right());
  return num_seeds(is_right);
}

TEST(seeds_reveal_missing_barriers) {
  const auto previous = [](int i) { return i - 1; };
  CHECK_EQ(num_right(64, iota(64), 1, 64, previous_without_barrier, previous), 0);
  const std::vector<int> zeros(128);
  const auto in_rounds = [](int i) { return 2 * i + 2 + 100; };
  CHECK_EQ(num_right(64, zeros, 0, 63, next_in_rounds, in_rounds), 0);
  const auto next_warp = [](int i) { return (i + 32) % 128; };
  CHECK(num_right(128, zeros, 0, 128, next_warp_after_syncwarp, next_warp) < 10);
}

TEST(seeds_reveal_a_block_that_depends_on_an_earlier_block) {
  const auto is_right = [] {
    std::vector<int> sums(8, 0);
    emul::launch(dim3(8), dim3(1), 0, [&] {
      sums[blockIdx.x] = int(blockIdx.x) + (blockIdx.x > 0 ? sums[blockIdx.x - 1] : 0);
    });
    return sums[7] == 28;
  };
  CHECK(is_right());
  CHECK_EQ(num_seeds(is_right), 0);
}

TEST(two_os_threads_launch_at_the_same_time) {
  const std::vector<int> in = iota(20 * 256);
  std::vector<int> out[2] = {std::vector<int>(20), std::vector<int>(20)};
  int num_threads = 0;
  const auto work = [&](int which) {
    for (int repeat = 0; repeat < 20; ++repeat) {
      emul::launch(dim3(20), dim3(256), 0, [&] {
        block_sum(in.data(), out[which].data());
        atomicAdd(&num_threads, 1);
      });
    }
  };
  std::thread first(work, 0), second(work, 1);
  first.join();
  second.join();
  CHECK_EQ(num_threads, 2 * 20 * 20 * 256);
  CHECK(out[0] == out[1]);
  for (int b = 0; b < 20; ++b) CHECK_EQ(out[0][b], 256 * 256 * b + 255 * 128);
}

TEST(runtime_functions_work_on_host_memory) {
  int* device = nullptr;
  const int host[4] = {1, 2, 3, 4};
  int back[4] = {};
  cudaStream_t stream = nullptr;
  CHECK_EQ(cudaMalloc(&device, sizeof(host)), cudaSuccess);
  CHECK_EQ(cudaMemcpyAsync(device, host, sizeof(host), cudaMemcpyHostToDevice, stream),
           cudaSuccess);
  CHECK_EQ(cudaMemsetAsync(device, 0, sizeof(int), stream), cudaSuccess);
  CHECK_EQ(cudaMemcpyAsync(back, device, sizeof(host), cudaMemcpyDeviceToHost, stream),
           cudaSuccess);
  CHECK_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  CHECK_EQ(cudaFree(device), cudaSuccess);
  CHECK_EQ(back[0], 0);
  CHECK_EQ(back[3], 4);
  CHECK_EQ(std::string(cudaGetErrorString(cudaSuccess)), "no error");
}

TEST_MAIN()
