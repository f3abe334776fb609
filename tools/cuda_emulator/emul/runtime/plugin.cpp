// SPDX-License-Identifier: Apache-2.0
// Additional functions, used by the Python plug-in that runs torch's operators on the CPU.
#include <cstring>
#include <numeric>

#include "emul/runtime/api.h"
#include "emul/runtime/capture.h"
#include "emul/runtime/counters.h"
#include "emul/runtime/kernels.h"
#include "emul/runtime/ranges.h"

using namespace kvcache::gpuless;

// Returns the host address of device memory, or nullptr for freed memory.
KV_GPULESS_API void* kvcache_gpuless_alias(const void* device) {
  void* alias = nullptr;
  call([&] {
    const Range* r = range_of(device);
    if (r != nullptr && r->kind == RangeKind::kDevice) alias = reachable(device);
    return cudaSuccess;
  });
  return alias;
}

// Runs the work submitted to the stream. Unlike CUDA's synchronization, this is allowed while other
// streams are capturing.
KV_GPULESS_API int kvcache_gpuless_drain(cudaStream_t stream) {
  return call([&] {
    drain(*stream_of(stream));
    return cudaSuccess;
  });
}

// Writes `num_items` contiguous items at `from` to a strided destination in device memory, in
// stream order. `from` is read immediately.
KV_GPULESS_API int kvcache_gpuless_write(cudaStream_t stream, void* to, const char* from,
                                         size_t item_bytes, int num_dims, const int64_t* sizes,
                                         const int64_t* strides) {
  return call([&] {
    const std::vector<int64_t> shape(sizes, sizes + num_dims), steps(strides, strides + num_dims);
    int64_t num_items = 1;
    for (const int64_t size : shape) num_items *= size;
    const std::vector<char> items(from, from + size_t(num_items) * item_bytes);
    return submit_or_capture(*stream_of(stream), [=] {
      std::vector<int64_t> index(shape.size());
      for (int64_t i = 0; i < num_items; ++i) {
        const int64_t at =
            std::inner_product(index.begin(), index.end(), steps.begin(), int64_t{0});
        std::memcpy(reachable(to) + at * int64_t(item_bytes), &items[size_t(i) * item_bytes],
                    item_bytes);
        for (size_t d = shape.size(); d-- > 0 && ++index[d] == shape[d];) index[d] = 0;
      }
    });
  });
}

// Arranges that `function(number)` is called whenever the graph that the stream is capturing runs.
KV_GPULESS_API int kvcache_gpuless_capture(cudaStream_t stream, void (*function)(int64_t),
                                           int64_t number) {
  return call([&] { return submit_or_capture(*stream_of(stream), [=] { function(number); }); });
}

KV_GPULESS_API int kvcache_gpuless_is_capturing(cudaStream_t stream) {
  bool capturing = false;
  call([&] {
    capturing = stream_of(stream)->capture != nullptr;
    return cudaSuccess;
  });
  return capturing;
}

// Returns the counter's name, or nullptr for a number above the last counter.
KV_GPULESS_API const char* kvcache_gpuless_counter(size_t i) { return name_of_counter(i); }
KV_GPULESS_API long kvcache_gpuless_count(size_t i) { return count_of(Counter(i)); }

KV_GPULESS_API long kvcache_gpuless_num_tasks_run() { return num_tasks_run(); }

KV_GPULESS_API size_t kvcache_gpuless_num_bound_kernels() {
  const std::lock_guard<std::recursive_mutex> lock(runtime_mutex());
  return num_bound_kernels();
}

// Returns the name of one of this project's kernels that is missing in the emulator, or nullptr for
// a number above the last such kernel. The result is valid until the next call in the same thread.
KV_GPULESS_API const char* kvcache_gpuless_unbound_kernel(size_t i) {
  const std::lock_guard<std::recursive_mutex> lock(runtime_mutex());
  static thread_local std::string name;
  const std::vector<std::string> names = unbound_kernels();
  if (i >= names.size()) return nullptr;
  name = names[i];
  return name.c_str();
}

KV_GPULESS_API void kvcache_gpuless_report() {
  const std::lock_guard<std::recursive_mutex> lock(runtime_mutex());
  say("%ld tasks run", num_tasks_run());
  print_launches();
}
