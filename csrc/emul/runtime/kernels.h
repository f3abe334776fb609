// The kernels of loaded libraries, and their launches on the emulator. Callers hold the lock.
//
// nvcc's code registers each kernel under the address of its host stub. Kernels of this project run
// on the emulator: the library at KVCACHE_GPULESS_KERNELS, the same .cu sources compiled by g++,
// has a Bound for each (see bind.h), found by its demangled name. A launch of any other kernel is
// an error, unless it is listed with a reason in kernels.cpp.
#pragma once

#include <cuda_runtime_api.h>

#include <string>
#include <vector>

#include "emul/runtime/streams.h"

namespace kvcache::gpuless {

void register_kernel(const void* stub, const char* mangled_name);
bool is_kernel(const void* stub);
// As is_kernel; the kernel is loaded from now on.
bool load_kernel(const void* stub);
// The shared memory beyond 48 KiB that cudaFuncSetAttribute allows the kernel.
cudaError_t allow_shared_bytes(const void* stub, int bytes);
// As cudaFuncGetAttributes; the kernel is loaded from now on.
cudaError_t describe(const void* stub, cudaFuncAttributes* attributes);
// As cudaOccupancyMaxActiveBlocksPerMultiprocessor.
cudaError_t occupancy(const void* stub, int threads, size_t shared_bytes, int* blocks);
// `cluster`: thread blocks of a cluster, along x.
cudaError_t launch(const void* stub, dim3 grid, dim3 block, void** arguments, size_t shared_bytes,
                   unsigned cluster, Stream& stream);
// Demangled names of this project's kernels that a loaded library has and the emulator does not.
std::vector<std::string> unbound_kernels();
size_t num_bound_kernels();
void print_launches();

}  // namespace kvcache::gpuless
