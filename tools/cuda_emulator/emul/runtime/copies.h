// SPDX-License-Identifier: Apache-2.0
// Copies between any two kinds of memory, and fills. Callers hold the runtime's lock.
#pragma once

#include <cuda_runtime_api.h>

#include "emul/runtime/streams.h"

namespace kvcache::gpuless {

// num_rows rows of row_bytes bytes each. On each side, consecutive rows are one pitch apart.
struct CopyShape {
  void* to;
  const void* from;
  size_t row_bytes;
  size_t num_rows = 1, to_pitch = 0, from_pitch = 0;
};

// Copies rows. Pageable sources are read before the call returns. If the destination is pageable,
// the call returns only after the copy is complete. In a capture, all memory is read and written
// when the graph runs.
cudaError_t copy(const CopyShape& c, cudaMemcpyKind kind, Stream& stream);
cudaError_t fill(void* to, int value, size_t bytes, Stream& stream);
cudaError_t copy_batch(void* const* to, const void* const* from, const size_t* bytes, size_t count,
                       const cudaMemcpyAttributes* attributes, const size_t* first_of_attributes,
                       size_t num_attributes, Stream& stream);

}  // namespace kvcache::gpuless
