// The ops of torch.ops.kvcache_emul: the CUDA kernels of csrc/ops, run on the CPU for the tests.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include "emul/cuda_emul.h"
#include "ops/schemas.h"

namespace {

// Writes one element behind the end on purpose: shows the tests that AddressSanitizer is awake.
__global__ void overflow_kernel(float* x, int64_t n) {
  if (threadIdx.x == blockDim.x - 1) x[n] = 1.0f;
}

void overflow_(torch::stable::Tensor x) {
  float* data = x.mutable_data_ptr<float>();
  const int64_t n = x.numel();
  emul::launch(dim3(1), dim3(32), 0, [=] { overflow_kernel(data, n); });
}

}  // namespace

STABLE_TORCH_LIBRARY(kvcache_emul, m) {
  kvcache::define_schemas(m);
  m.def("overflow_(Tensor(a!) x) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(kvcache_emul, CPU, m) { m.impl("overflow_", TORCH_BOX(&overflow_)); }
