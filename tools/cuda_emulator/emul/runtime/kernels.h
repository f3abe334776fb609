// SPDX-License-Identifier: Apache-2.0
// The kernels in loaded libraries, and their launches on the emulator. Callers hold the runtime's
// lock.
//
// nvcc's code registers each kernel under the address of its host stub. This project's kernels run
// on the emulator: the library at KVCACHE_GPULESS_KERNELS, which is built by g++ from the same .cu
// sources, contains a Bound for each kernel (see bind.h), which is found by the kernel's demangled
// name. Launching any other kernel is an error, unless kernels.cpp lists the kernel with a reason.
#pragma once

#include <cuda_runtime_api.h>

#include <string>
#include <vector>

#include "emul/runtime/streams.h"

namespace kvcache::gpuless {

void register_kernel(const void* stub, const char* mangled_name);
bool is_kernel(const void* stub);
// Like is_kernel, but also marks the kernel as loaded.
bool load_kernel(const void* stub);
// Sets the kernel's limit of shared memory, which may exceed 48 KiB, as cudaFuncSetAttribute does.
cudaError_t allow_shared_bytes(const void* stub, int bytes);
// Like cudaFuncGetAttributes, but also marks the kernel as loaded.
cudaError_t describe(const void* stub, cudaFuncAttributes* attributes);
// Like cudaOccupancyMaxActiveBlocksPerMultiprocessor.
cudaError_t occupancy(const void* stub, int threads, size_t shared_bytes, int* blocks);
// `cluster`: number of thread blocks per cluster, along x.
cudaError_t launch(const void* stub, dim3 grid, dim3 block, void** arguments, size_t shared_bytes,
                   unsigned cluster, Stream& stream);
// Returns the demangled names of those of this project's kernels that are in a loaded library but
// not in the emulator.
std::vector<std::string> unbound_kernels();
size_t num_bound_kernels();
void print_launches();

}  // namespace kvcache::gpuless
