// Every kernel that this library can launch, so that all of them can be loaded before the first one
// is needed: CUDA loads a kernel at its first launch, and older drivers cannot while a graph is
// captured.
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

// Whoever mentions a kernel here has listed it when the library is loaded.
template <auto kKernel>
void list_kernel() {
  (void)&ListedKernel<kKernel>::listed;
}

}  // namespace kvcache
