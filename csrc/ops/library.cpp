// SPDX-License-Identifier: Apache-2.0
#include <torch/csrc/stable/library.h>

#include "ops/schemas.h"

STABLE_TORCH_LIBRARY(kvcache, m) { kvcache::define_schemas(m); }
