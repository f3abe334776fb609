// SPDX-License-Identifier: Apache-2.0
// The ops of torch.ops.kvcache_emul, which run the CUDA kernels of csrc/ops on the CPU for tests.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include "emul/cuda_emul.h"
#include "ops/schemas.h"

namespace {

// Deliberately writes one element past the end, so that a test can verify that AddressSanitizer is
// active.
__global__ void overflow_kernel(float* x, int64_t n) {
  if (threadIdx.x == blockDim.x - 1) x[n] = 1.0f;
}

void overflow_(torch::stable::Tensor x) {
  float* data = x.mutable_data_ptr<float>();
  const int64_t n = x.numel();
  emul::launch(dim3(1), dim3(32), 0, [=] { overflow_kernel(data, n); });
}

// Adds one to each element. The result is deliberately undefined for the largest int, so that a
// test can verify that the sanitizer is active.
__global__ void overflow_int_kernel(int32_t* x) { x[threadIdx.x] += 1; }

void overflow_int_(torch::stable::Tensor x) {
  int32_t* data = x.mutable_data_ptr<int32_t>();
  const auto n = static_cast<unsigned>(x.numel());
  emul::launch(dim3(1), dim3(n), 0, [=] { overflow_int_kernel(data); });
}

// Writes four floats at once, regardless of alignment.
__global__ void misaligned_kernel(float* x) { *reinterpret_cast<uint4*>(x) = uint4{0, 0, 0, 0}; }

void misaligned_(torch::stable::Tensor x) {
  float* data = x.mutable_data_ptr<float>();
  emul::launch(dim3(1), dim3(1), 0, [=] { misaligned_kernel(data); });
}

// Assigns a different device address to a range of host memory. With 0 bytes, removes all such
// assignments.
void map_host(int64_t host, int64_t num_bytes, int64_t device) {
  auto& mappings = emul::host_mappings();
  if (num_bytes == 0) return mappings.clear();
  mappings.push_back({reinterpret_cast<const char*>(host), static_cast<size_t>(num_bytes),
                      reinterpret_cast<char*>(device)});
}

}  // namespace

// Makes `hook` run all later launches of the ops, or the emulator if `hook` is null.
extern "C" __attribute__((visibility("default"))) void kv_emul_hook_launches(
    emul::LaunchHook hook) {
  emul::launch_hook() = hook;
}

STABLE_TORCH_LIBRARY(kvcache_emul, m) {
  kvcache::define_schemas(m);
  m.def("overflow_(Tensor(a!) x) -> ()");
  m.def("overflow_int_(Tensor(a!) x) -> ()");
  m.def("misaligned_(Tensor(a!) x) -> ()");
  m.def("map_host(int host, int num_bytes, int device) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(kvcache_emul, CPU, m) {
  m.impl("overflow_", TORCH_BOX(&overflow_));
  m.impl("overflow_int_", TORCH_BOX(&overflow_int_));
  m.impl("misaligned_", TORCH_BOX(&misaligned_));
}

STABLE_TORCH_LIBRARY_IMPL(kvcache_emul, CompositeExplicitAutograd, m) {
  m.impl("map_host", TORCH_BOX(&map_host));
}
