// SPDX-License-Identifier: Apache-2.0
// Registers kernels that were compiled for the emulator. The runtime finds a kernel by its
// demangled name and copies the parameters at the launch.
//
// In builds for the emulator, KV_LAUNCH uses Registered<kernel>, so every kernel that is launched
// anywhere in the sources is registered when the library is loaded.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include "emul/launch.h"
#include "emul/runtime/bound.h"

namespace kvcache::gpuless {

template <auto kKernel>
struct Named {};

inline std::vector<Bound>& bound_kernels() {
  static std::vector<Bound> all;
  return all;
}

template <class... P>
struct Binder {
  template <void (*kKernel)(P...), size_t... I>
  static std::function<void()> bind_each(void** arguments, const LaunchShape& s,
                                         std::index_sequence<I...>) {
    using Parameters = std::tuple<std::remove_cv_t<P>...>;
    auto copied = std::make_shared<Parameters>(*static_cast<std::remove_cv_t<P>*>(arguments[I])...);
    return [copied, s] {
      emul::launch_clusters(dim3(s.grid[0], s.grid[1], s.grid[2]),
                            dim3(s.block[0], s.block[1], s.block[2]), s.shared_bytes, s.cluster,
                            [&] { kKernel(std::get<I>(*copied)...); });
    };
  }
  template <void (*kKernel)(P...)>
  static std::function<void()> bind(void** arguments, const LaunchShape& s) {
    return bind_each<kKernel>(arguments, s, std::index_sequence_for<P...>{});
  }
};

template <class... P>
Binder<P...> binder_of(void (*)(P...));

template <auto kKernel>
struct Registered {
  static bool add() {
    using B = decltype(binder_of(kKernel));
    bound_kernels().push_back({typeid(Named<kKernel>).name(), &B::template bind<kKernel>});
    return true;
  }
  static inline const bool done = add();
};

}  // namespace kvcache::gpuless
