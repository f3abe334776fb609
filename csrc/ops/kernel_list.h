// A list of every kernel that this library can launch, so that all can be loaded in advance. CUDA
// loads a kernel at its first launch, and older drivers cannot do that while a graph is captured.
#pragma once

#include <vector>

namespace kvcache {

inline std::vector<const void*>& kernel_list() {
  static std::vector<const void*> list;
  return list;
}

template <auto kKernel>
struct ListedKernel {
  static inline const bool listed =
      (kernel_list().push_back(reinterpret_cast<const void*>(kKernel)), true);
};

// A use of this template lists the kernel when the library is loaded.
template <auto kKernel>
void list_kernel() {
  (void)&ListedKernel<kKernel>::listed;
}

}  // namespace kvcache
