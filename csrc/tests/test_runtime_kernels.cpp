// SPDX-License-Identifier: Apache-2.0
// Tests the CUDA runtime without a GPU: lookup of kernels by name, delayed launches, and launch
// checks. RUNTIME_KERNELS is the path of the library built from runtime_kernels.cpp. RUNTIME_LIMITS
// is the path of runtime_limits.txt.
#include <cuda_runtime_api.h>

#include <array>
#include <chrono>
#include <string>

#include "tests/check.h"
#include "tests/child.h"

// Declared as in nvcc's generated code.
extern "C" void __cudaRegisterFunction(void**, const char*, char*, const char*, int, uint3*, uint3*,
                                       dim3*, dim3*, int*);
extern "C" const char* kvcache_gpuless_unbound_kernel(size_t);

namespace {

struct Numbers {
  int* out;
  int value;
};

// The addresses of these variables are used as host stubs.
const char write_stub = 0, shared_stub = 0, trap_stub = 0, missing_stub = 0, foreign_stub = 0;

void add(const char* stub, const char* mangled) {
  __cudaRegisterFunction(nullptr, stub, nullptr, mangled, -1, nullptr, nullptr, nullptr, nullptr,
                         nullptr);
}

void add_all() {
  add(&write_stub, "_ZN7kvcache12write_kernelENS_7NumbersE");
  add(&shared_stub, "_ZN7kvcache13shared_kernelIiEEvPT_");
  add(&trap_stub, "_ZN7kvcache11trap_kernelEv");
}

// A test in a child process with the kernels, and with these environment variables.
#define KERNEL_TEST(name, ...)                                                  \
  static void kernels_##name();                                                 \
  CHILD_TEST(name, {"KVCACHE_GPULESS_KERNELS", RUNTIME_KERNELS}, __VA_ARGS__) { \
    add_all();                                                                  \
    kernels_##name();                                                           \
  }                                                                             \
  static void kernels_##name()

int* device_ints(size_t n) {
  void* p = nullptr;
  CHECK_EQ(cudaMalloc(&p, n * sizeof(int)), cudaSuccess);
  return static_cast<int*>(p);
}

template <class... T>
cudaError_t launch(const char* stub, dim3 grid, dim3 block, size_t shared_bytes, T... parameters) {
  std::array<void*, sizeof...(T) + 1> arguments = {&parameters..., nullptr};
  return cudaLaunchKernel(stub, grid, block, arguments.data(), shared_bytes, nullptr);
}

template <size_t n>
std::array<int, n> fetch(const int* device) {
  std::array<int, n> host{};
  CHECK_EQ(cudaMemcpy(host.data(), device, sizeof host, cudaMemcpyDefault), cudaSuccess);
  return host;
}

}  // namespace

KERNEL_TEST(a_kernel_runs_with_the_parameters_of_its_launch) {
  int* out = device_ints(4);
  CHECK_EQ(launch(&write_stub, dim3(2), dim3(2), 0, Numbers{out, 7}), cudaSuccess);
  CHECK(fetch<4>(out) == (std::array<int, 4>{7, 7, 7, 7}));
}

KERNEL_TEST(shared_memory_beyond_48_kib_requires_an_opt_in_per_kernel) {
  int* out = device_ints(4);
  const dim3 one(1), four(4);
  CHECK_EQ(launch(&shared_stub, one, four, 48 * 1024, out), cudaSuccess);
  CHECK(fetch<4>(out) == (std::array<int, 4>{3, 2, 1, 0}));
  CHECK_EQ(launch(&shared_stub, one, four, 48 * 1024 + 1, out), cudaErrorInvalidValue);
  const auto attribute = cudaFuncAttributeMaxDynamicSharedMemorySize;
  CHECK_EQ(cudaFuncSetAttribute(&shared_stub, attribute, 228 * 1024), cudaErrorInvalidValue);
  CHECK_EQ(cudaFuncSetAttribute(&write_stub, attribute, 64 * 1024), cudaSuccess);
  CHECK_EQ(launch(&shared_stub, one, four, 64 * 1024, out), cudaErrorInvalidValue);
  CHECK_EQ(cudaFuncSetAttribute(&shared_stub, attribute, 64 * 1024), cudaSuccess);
  CHECK_EQ(launch(&shared_stub, one, four, 64 * 1024, out), cudaSuccess);
}

KERNEL_TEST(dimensions_beyond_the_limits_are_rejected) {
  const Numbers n{device_ints(1), 0};
  for (const dim3 grid : {dim3(0), dim3(1, 65536), dim3(1, 1, 65536), dim3(1u << 31)}) {
    CHECK_EQ(launch(&write_stub, grid, dim3(1), 0, n), cudaErrorInvalidConfiguration);
  }
  for (const dim3 block : {dim3(0), dim3(1025), dim3(1, 1, 65), dim3(32, 33)}) {
    CHECK_EQ(launch(&write_stub, dim3(1), block, 0, n), cudaErrorInvalidConfiguration);
  }
}

KERNEL_TEST(a_kernel_that_cannot_run_is_an_error_at_its_launch) {
  add(&missing_stub, "_ZN7kvcache14missing_kernelEv");
  add(&foreign_stub, "_ZN2at6native11some_kernelEv");
  CHECK_EQ(launch(&missing_stub, dim3(1), dim3(1), 0), cudaErrorInvalidDeviceFunction);
  CHECK_EQ(launch(&foreign_stub, dim3(1), dim3(1), 0), cudaErrorInvalidDeviceFunction);
  CHECK_EQ(launch("not registered", dim3(1), dim3(1), 0), cudaErrorInvalidDeviceFunction);
  CHECK_EQ(std::string(kvcache_gpuless_unbound_kernel(0)), "kvcache::missing_kernel()");
  CHECK(kvcache_gpuless_unbound_kernel(1) == nullptr);
}

// The file has a line per kernel, with registers, static shared memory, and threads per block from
// cuobjdump.
KERNEL_TEST(launches_are_checked_against_the_limits_of_the_machine_code,
            {"KVCACHE_GPULESS_LIMITS", RUNTIME_LIMITS}) {
  int* out = device_ints(1024);
  const Numbers n{out, 7};
  // write_kernel: 40 registers, 128 threads.
  CHECK_EQ(launch(&write_stub, dim3(1), dim3(128), 0, n), cudaSuccess);
  CHECK_EQ(launch(&write_stub, dim3(1), dim3(160), 0, n), cudaErrorInvalidValue);
  CHECK_EQ(launch(&write_stub, dim3(1), dim3(43, 3), 0, n), cudaErrorInvalidValue);
  // shared_kernel: 80 registers, 40 KiB, 1024 threads. 25 warps with 2,560 registers each fit.
  CHECK_EQ(launch(&shared_stub, dim3(1), dim3(800), 4096, out), cudaSuccess);
  CHECK_EQ(launch(&shared_stub, dim3(1), dim3(832), 4096, out), cudaErrorLaunchOutOfResources);
  CHECK_EQ(launch(&shared_stub, dim3(1), dim3(4), 8 * 1024, out), cudaSuccess);
  CHECK_EQ(launch(&shared_stub, dim3(1), dim3(4), 8 * 1024 + 1, out), cudaErrorInvalidValue);
  const auto attribute = cudaFuncAttributeMaxDynamicSharedMemorySize;
  CHECK_EQ(cudaFuncSetAttribute(&shared_stub, attribute, 188 * 1024), cudaErrorInvalidValue);
  CHECK_EQ(cudaFuncSetAttribute(&shared_stub, attribute, 187 * 1024), cudaSuccess);
  CHECK_EQ(launch(&shared_stub, dim3(1), dim3(4), 187 * 1024, out), cudaSuccess);
  // trap_kernel is not in the file, as if it belonged to another library.
  CHECK_EQ(launch(&trap_stub, dim3(1), dim3(1), 0), cudaErrorInvalidDeviceFunction);
  CHECK_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

KERNEL_TEST(attributes_and_occupancy_match_the_machine_code,
            {"KVCACHE_GPULESS_LIMITS", RUNTIME_LIMITS}) {
  cudaFuncAttributes found{};
  CHECK_EQ(cudaFuncGetAttributes(&found, &shared_stub), cudaSuccess);
  CHECK_EQ(found.numRegs, 80);
  CHECK_EQ(found.sharedSizeBytes, size_t(40 * 1024));
  CHECK_EQ(found.maxDynamicSharedSizeBytes, 8 * 1024);
  CHECK_EQ(found.maxThreadsPerBlock, 1024);
  const auto blocks = [](const char* stub, int threads, size_t shared_bytes) {
    int n = -1;
    CHECK_EQ(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&n, stub, threads, shared_bytes),
             cudaSuccess);
    return n;
  };
  CHECK_EQ(blocks(&write_stub, 128, 0), 12);  // limited by registers: 4 warps with 1,280 each
  CHECK_EQ(blocks(&write_stub, 32, 0), 32);   // limited by the number of thread blocks
  CHECK_EQ(blocks(&write_stub, 128, 48 * 1024), 4);  // shared memory
  CHECK_EQ(blocks(&shared_stub, 32, 0), 5);          // limited by static shared memory
  CHECK_EQ(blocks(&shared_stub, 1024, 0), 0);        // not enough registers for one block
  CHECK_EQ(blocks(&write_stub, 256, 0), 0);          // exceeds __launch_bounds__
}

KERNEL_TEST(a_spin_kernel_blocks_only_its_own_stream) {
  const char spin_stub = 0;
  add(&spin_stub, "_ZN2at4cuda12_GLOBAL__N_111spin_kernelEl");
  cudaStream_t held = nullptr, other = nullptr;
  CHECK_EQ(cudaStreamCreateWithFlags(&held, cudaStreamNonBlocking), cudaSuccess);
  CHECK_EQ(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking), cudaSuccess);
  int64_t cycles = 400'000'000;  // 200 ms
  void* arguments[] = {&cycles};
  const auto begin = std::chrono::steady_clock::now();
  const auto passed = [&] { return std::chrono::steady_clock::now() - begin; };
  CHECK_EQ(cudaLaunchKernel(&spin_stub, dim3(1), dim3(1), arguments, 0, held), cudaSuccess);
  int* out = device_ints(1);
  CHECK_EQ(cudaMemsetAsync(out, 0, sizeof(int), other), cudaSuccess);
  CHECK_EQ(cudaStreamSynchronize(other), cudaSuccess);
  CHECK_EQ(cudaStreamQuery(held), cudaErrorNotReady);
  CHECK(passed() < std::chrono::milliseconds(200));
  CHECK_EQ(cudaStreamSynchronize(held), cudaSuccess);
  CHECK(passed() >= std::chrono::milliseconds(200));
}

KERNEL_TEST(a_trap_is_a_sticky_error) {
  (void)launch(&trap_stub, dim3(1), dim3(1), 0);  // the kernel may have run already
  CHECK_EQ(cudaDeviceSynchronize(), cudaErrorLaunchFailure);
  void* p = nullptr;
  CHECK_EQ(cudaGetLastError(), cudaErrorLaunchFailure);
  CHECK_EQ(cudaMalloc(&p, 8), cudaErrorLaunchFailure);
  CHECK_EQ(cudaGetLastError(), cudaErrorLaunchFailure);
}

TEST(a_kernel_that_accesses_freed_memory_is_reported_by_name) {
  const auto body = [] {
    setenv("KVCACHE_GPULESS_KERNELS", RUNTIME_KERNELS, 1);
    add_all();
    int* out = device_ints(1);
    CHECK_EQ(cudaFree(out), cudaSuccess);
    launch(&write_stub, dim3(1), dim3(1), 0, Numbers{out, 7});
    cudaDeviceSynchronize();
  };
  kvcache::test::dies_saying("in kernel kvcache::write_kernel(kvcache::Numbers): device memory",
                             body);
}

TEST(host_memory_with_a_separate_device_pointer_is_accessible_only_through_it) {
  const kvcache::test::Variables variables = {{"KVCACHE_GPULESS_KERNELS", RUNTIME_KERNELS},
                                              {"KVCACHE_GPULESS_DEVICE_POINTERS", "different"}};
  const auto write_by = [](bool device_pointer) {
    add_all();
    void *host = nullptr, *device = nullptr;
    CHECK_EQ(cudaHostAlloc(&host, sizeof(int), 0), cudaSuccess);
    CHECK_EQ(cudaHostGetDevicePointer(&device, host, 0), cudaSuccess);
    auto* out = static_cast<int*>(device_pointer ? device : host);
    CHECK_EQ(launch(&write_stub, dim3(1), dim3(1), 0, Numbers{out, 7}), cudaSuccess);
    CHECK_EQ(cudaDeviceSynchronize(), cudaSuccess);
    CHECK_EQ(*static_cast<int*>(host), 7);
  };
  kvcache::test::in_child(variables, [&] { write_by(true); });
  const auto ended = kvcache::test::run_child(variables, [&] { write_by(false); });
  CHECK(!ended.normally && ended.output.find("not by its device pointer") != std::string::npos);
}

TEST_MAIN()
