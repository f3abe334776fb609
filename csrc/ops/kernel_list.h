// SPDX-License-Identifier: Apache-2.0
// A list of all kernels in this library, so that they can be loaded in advance. Otherwise, CUDA
// loads a kernel at its first launch, which older drivers do not support during a graph capture.
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

// If this template is used, the kernel is added to the list when the library is loaded.
template <auto kKernel>
void list_kernel() {
  (void)&ListedKernel<kKernel>::listed;
}

}  // namespace kvcache
