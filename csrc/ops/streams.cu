// SPDX-License-Identifier: Apache-2.0
// Ops for streams, events, pinning and kernel loading that torch does not provide: polling and
// pinning without invalidating captures, separate streams, and loading all kernels before a
// capture.
//
// These ops take no tensors, so they have no device dispatch key. Only the CUDA library contains
// them. Events and streams are identified by their addresses.
#include "ops/device.h"
#include "ops/pinned_ranges.h"

#ifdef __CUDACC__

namespace kvcache {
namespace {

// While this object exists, the current thread's calls do not invalidate any thread's captures.
//
// The thread-local capture mode would not suffice, because a capturing thread may also poll. The
// guarded calls do not affect captured work.
class OutsideCapture {
 public:
  OutsideCapture() { exchange(); }
  ~OutsideCapture() { exchange(); }
  OutsideCapture(const OutsideCapture&) = delete;
  OutsideCapture& operator=(const OutsideCapture&) = delete;

 private:
  void exchange() {
    if (cudaThreadExchangeStreamCaptureMode(&mode_) != cudaSuccess) (void)cudaGetLastError();
  }
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

torch::stable::accelerator::DeviceGuard guard_for(int64_t device) {
  return torch::stable::accelerator::DeviceGuard(
      static_cast<torch::stable::accelerator::DeviceIndex>(device));
}

// Pins host memory for all devices, so that kernels can access it. Returns the CUDA error, or 0.
int64_t host_register(int64_t device, int64_t address, int64_t num_bytes) {
  const auto guard = guard_for(device);
  const OutsideCapture outside;
  const cudaError_t error =
      cudaHostRegister(reinterpret_cast<void*>(address), static_cast<size_t>(num_bytes),
                       cudaHostRegisterPortable | cudaHostRegisterMapped);
  if (error != cudaSuccess) {
    (void)cudaGetLastError();
  } else {
    PinnedRanges::instance().add(reinterpret_cast<const char*>(address), num_bytes);
  }
  return error;
}

// Undoes host_register. Returns the CUDA error, or 0.
int64_t host_unregister(int64_t device, int64_t address) {
  const auto guard = guard_for(device);
  const OutsideCapture outside;
  PinnedRanges::instance().remove(reinterpret_cast<const char*>(address));
  const cudaError_t error = cudaHostUnregister(reinterpret_cast<void*>(address));
  if (error != cudaSuccess) (void)cudaGetLastError();
  return error;
}

// Returns whether all work that an event records has finished.
bool event_query(int64_t event) {
  const OutsideCapture outside;
  const cudaError_t error = cudaEventQuery(reinterpret_cast<cudaEvent_t>(event));
  if (error == cudaErrorNotReady) {
    (void)cudaGetLastError();
    return false;
  }
  KV_CUDA_CHECK(error);
  return true;
}

// Creates a stream that has the highest priority and does not wait for the null stream. Launches on
// it are small, so other streams continue to compute.
int64_t stream_create(int64_t device) {
  const auto guard = guard_for(device);
  const OutsideCapture outside;
  int least = 0, greatest = 0;
  KV_CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  cudaStream_t stream = nullptr;
  KV_CUDA_CHECK(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest));
  return reinterpret_cast<int64_t>(stream);
}

// Waits until all work in the stream has finished, or the device has failed.
void stream_synchronize(int64_t device, int64_t stream) {
  const auto guard = guard_for(device);
  const OutsideCapture outside;
  if (cudaStreamSynchronize(reinterpret_cast<cudaStream_t>(stream)) != cudaSuccess) {
    (void)cudaGetLastError();
  }
}

void stream_destroy(int64_t device, int64_t stream) {
  const auto guard = guard_for(device);
  const OutsideCapture outside;
  if (cudaStreamDestroy(reinterpret_cast<cudaStream_t>(stream)) != cudaSuccess) {
    (void)cudaGetLastError();
  }
}

// Loads all of this library's kernels on the device, and returns their number.
int64_t load_kernels(int64_t device) {
  const auto guard = guard_for(device);
  const OutsideCapture outside;
  for (const void* kernel : kernel_list()) {
    cudaFuncAttributes attributes{};
    KV_CUDA_CHECK(cudaFuncGetAttributes(&attributes, kernel));
  }
  return static_cast<int64_t>(kernel_list().size());
}

// Returns the CUDA version with which this library was compiled.
int64_t compiled_version() { return CUDART_VERSION; }

// Returns the newest CUDA version that the driver supports.
int64_t driver_version() {
  int version = 0;
  // Without a driver, the call succeeds and reports version 0. torch's error check is not used,
  // because it initializes the device and would throw.
  const cudaError_t error = cudaDriverGetVersion(&version);
  if (error != cudaSuccess) KV_CUDA_CHECK(error);
  return version;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(kvcache, m) {
  m.def("_host_register(int device, int address, int num_bytes) -> int");
  m.def("_host_unregister(int device, int address) -> int");
  m.def("_event_query(int event) -> bool");
  m.def("_stream_create(int device) -> int");
  m.def("_stream_synchronize(int device, int stream) -> ()");
  m.def("_stream_destroy(int device, int stream) -> ()");
  m.def("_load_kernels(int device) -> int");
  m.def("_compiled_version() -> int");
  m.def("_driver_version() -> int");
}

STABLE_TORCH_LIBRARY_IMPL(kvcache, CompositeExplicitAutograd, m) {
  m.impl("_host_register", TORCH_BOX(&host_register));
  m.impl("_host_unregister", TORCH_BOX(&host_unregister));
  m.impl("_event_query", TORCH_BOX(&event_query));
  m.impl("_stream_create", TORCH_BOX(&stream_create));
  m.impl("_stream_synchronize", TORCH_BOX(&stream_synchronize));
  m.impl("_stream_destroy", TORCH_BOX(&stream_destroy));
  m.impl("_load_kernels", TORCH_BOX(&load_kernels));
  m.impl("_compiled_version", TORCH_BOX(&compiled_version));
  m.impl("_driver_version", TORCH_BOX(&driver_version));
}

}  // namespace kvcache

#endif
