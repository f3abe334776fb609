// SPDX-License-Identifier: Apache-2.0
// Helpers for all .cu files, both with nvcc and under emulation: launches on torch's current
// stream, the device guard, and the search for invalid values in device memory.
#pragma once

#ifdef __CUDACC__
#include <cuda_runtime.h>
#else
#include "emul/cuda_emul.h"
#endif

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <cstdlib>

#include "ops/checks.h"
#include "ops/switches.h"

#ifdef __CUDACC__
#include "ops/kernel_list.h"
#define KV_DYN_SHARED(T, name) extern __shared__ T name[]
// `kernel` must be a constant, not a variable.
#define KV_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  do {                                                            \
    ::kvcache::list_kernel<(kernel)>();                           \
    (kernel)<<<grid, block, shared_bytes, stream>>>(__VA_ARGS__); \
    STD_CUDA_KERNEL_LAUNCH_CHECK();                               \
  } while (0)
// Like KV_LAUNCH, but in clusters of `cluster` thread blocks along x.
#define KV_LAUNCH_CLUSTERS(kernel, grid, block, shared_bytes, stream, cluster, ...)              \
  do {                                                                                           \
    ::kvcache::list_kernel<(kernel)>();                                                          \
    ::kvcache::launch_with(::kvcache::clusters_of(cluster), (kernel), grid, block, shared_bytes, \
                           stream, __VA_ARGS__);                                                 \
  } while (0)
#define KV_CUDA_CHECK(call) STD_CUDA_CHECK(call)
// Registers `function` as the op's CUDA or, under emulation, emulated implementation.
#define KV_REGISTER_CUDA(op, function) \
  STABLE_TORCH_LIBRARY_IMPL(kvcache, CUDA, m) { m.impl(op, TORCH_BOX(&function)); }
#elif defined(KVCACHE_GPULESS)
// The CUDA runtime for machines without a GPU launches kernels by name, so this build only
// registers the kernels. Therefore, `kernel` must be a constant, not a variable.
#include "emul/runtime/bind.h"
#define KV_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  (void)::kvcache::gpuless::Registered<(kernel)>::done
#define KV_LAUNCH_CLUSTERS(kernel, grid, block, shared_bytes, stream, cluster, ...) \
  (void)::kvcache::gpuless::Registered<(kernel)>::done
#define KV_CUDA_CHECK(call) (void)(call)
#define KV_REGISTER_CUDA(op, function) \
  [[maybe_unused]] static const auto kv_compiled_##function = &function;
#else
#define KV_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  emul::launch_kernel<(kernel)>(grid, block, shared_bytes, 1, __VA_ARGS__)
#define KV_LAUNCH_CLUSTERS(kernel, grid, block, shared_bytes, stream, cluster, ...) \
  emul::launch_kernel<(kernel)>(grid, block, shared_bytes, cluster, __VA_ARGS__)
#define KV_CUDA_CHECK(call) emul::check(call)
#define KV_REGISTER_CUDA(op, function) \
  STABLE_TORCH_LIBRARY_IMPL(kvcache_emul, CPU, m) { m.impl(op, TORCH_BOX(&function)); }
#endif

namespace kvcache {

// Makes a tensor's device current and holds torch's current stream of that device.
#ifdef __CUDACC__
struct OnDevice {
  explicit OnDevice(const Tensor& t) : index(t.get_device_index()), guard(index) {
    void* handle = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(index, &handle));
    stream = static_cast<cudaStream_t>(handle);
  }
  int32_t index;
  torch::stable::accelerator::DeviceGuard guard;
  cudaStream_t stream;
};
#else
struct OnDevice {
  explicit OnDevice(const Tensor&) {}
  int32_t index = 0;
  cudaStream_t stream = nullptr;
};
#endif

#ifdef __CUDACC__
// Launches a kernel with an attribute.
template <class Kernel, class... Arguments>
void launch_with(cudaLaunchAttribute attribute, Kernel* kernel, dim3 grid, dim3 block,
                 size_t shared_bytes, cudaStream_t stream, const Arguments&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  KV_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, arguments...));
}

inline cudaLaunchAttribute clusters_of(unsigned num_blocks) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = num_blocks;
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  return attribute;
}
#endif

// With KVCACHE_CHECKED=1, values in device memory are checked before a kernel uses them, at the
// cost of a synchronization. Otherwise kernels skip values out of range.
inline bool checked_mode() { return switched_on("KVCACHE_CHECKED"); }

template <class Bad>
__global__ void first_bad_kernel(Bad bad, int64_t n, unsigned long long* first) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < n && bad(i)) atomicMin(first, static_cast<unsigned long long>(i));
}

// A number in device memory that is freed with this object.
class DeviceNumber {
 public:
  DeviceNumber() { KV_CUDA_CHECK(cudaMalloc(&memory_, sizeof(unsigned long long))); }
  ~DeviceNumber() { (void)cudaFree(memory_); }
  DeviceNumber(const DeviceNumber&) = delete;
  DeviceNumber& operator=(const DeviceNumber&) = delete;
  unsigned long long* get() const { return static_cast<unsigned long long*>(memory_); }

 private:
  void* memory_ = nullptr;
};

// The checked mode waits for the device, which is not possible during a capture.
inline void check_not_capturing([[maybe_unused]] cudaStream_t stream) {
#ifdef __CUDACC__
  cudaStreamCaptureStatus capture{};
  KV_CUDA_CHECK(cudaStreamIsCapturing(stream, &capture));
  if (capture != cudaStreamCaptureStatusNone) {
    fail(
        "the checked mode (KVCACHE_CHECKED) synchronizes, but this stream is being captured: call "
        "the op outside of captures, or disable the checked mode");
  }
#endif
}

// Returns the smallest i < n with bad(i), or -1. Synchronizes, so it is used only in checked mode.
template <class Bad>
int64_t first_bad_on_device(const Bad& bad, int64_t n, cudaStream_t stream) {
  if (n == 0) return -1;
  constexpr unsigned kThreads = 256;
  check_not_capturing(stream);
  const DeviceNumber first;
  unsigned long long found = 0;
  KV_CUDA_CHECK(cudaMemsetAsync(first.get(), 0xFF, sizeof(found), stream));
  KV_LAUNCH(first_bad_kernel<Bad>, dim3(unsigned((n + kThreads - 1) / kThreads)), dim3(kThreads), 0,
            stream, bad, n, first.get());
  KV_CUDA_CHECK(
      cudaMemcpyAsync(&found, first.get(), sizeof(found), cudaMemcpyDeviceToHost, stream));
  KV_CUDA_CHECK(cudaStreamSynchronize(stream));
  return found == ~0ull ? -1 : static_cast<int64_t>(found);
}

// Returns one value from a device array, for an error message. Synchronizes.
template <class T>
T fetch(const T* device_pointer, cudaStream_t stream) {
  T value;
  KV_CUDA_CHECK(cudaMemcpyAsync(&value, device_pointer, sizeof(T), cudaMemcpyDeviceToHost, stream));
  KV_CUDA_CHECK(cudaStreamSynchronize(stream));
  return value;
}

}  // namespace kvcache
