// The ops of torch.ops.kvcache_emul: the CUDA kernels of csrc/ops, run on the CPU for the tests.
#include <torch/csrc/stable/library.h>

#include "ops/schemas.h"

STABLE_TORCH_LIBRARY(kvcache_emul, m) { kvcache::define_schemas(m); }
