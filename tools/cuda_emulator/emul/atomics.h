// SPDX-License-Identifier: Apache-2.0
// Atomics for the types that CUDA supports (not for uint64_t, which is unsigned long here).
#pragma once

#include <type_traits>

namespace emul {

// Excludes a parameter from template argument deduction, so that atomicAdd(&counter, 1) accepts a
// counter of any integer type.
template <class T>
using Value = std::common_type_t<T>;

template <class T, class... Allowed>
inline constexpr bool is_one_of = (std::is_same_v<T, Allowed> || ...);

using Ull = unsigned long long;

// Replaces the value by `new_value(value)` and returns the old value. The update is atomic, also
// with respect to other OS threads, and uses CUDA's relaxed memory order.
template <class T, class F>
T atomic_update(T* address, F new_value) {
  T old_value, replacement;
  __atomic_load(address, &old_value, __ATOMIC_RELAXED);
  do {
    replacement = new_value(old_value);
  } while (!__atomic_compare_exchange(address, &old_value, &replacement, false, __ATOMIC_RELAXED,
                                      __ATOMIC_RELAXED));
  return old_value;
}

}  // namespace emul

template <class T>
T atomicAdd(T* address, emul::Value<T> value) {
  static_assert(emul::is_one_of<T, int, unsigned, emul::Ull, float, double>, "not in CUDA");
  // int is added as unsigned, because overflow wraps around in CUDA but is undefined in C++.
  using Sum = std::conditional_t<std::is_same_v<T, int>, unsigned, T>;
  return emul::atomic_update(address, [=](T old) { return T(Sum(old) + Sum(value)); });
}

template <class T>
T atomicMax(T* address, emul::Value<T> value) {
  static_assert(emul::is_one_of<T, int, unsigned, long long, emul::Ull>, "not in CUDA");
  return emul::atomic_update(address, [=](T old) { return old < value ? value : old; });
}

template <class T>
T atomicMin(T* address, emul::Value<T> value) {
  static_assert(emul::is_one_of<T, int, unsigned, long long, emul::Ull>, "not in CUDA");
  return emul::atomic_update(address, [=](T old) { return value < old ? value : old; });
}

template <class T>
T atomicAnd(T* address, emul::Value<T> value) {
  static_assert(emul::is_one_of<T, int, unsigned, emul::Ull>, "not in CUDA");
  return emul::atomic_update(address, [=](T old) { return old & value; });
}

template <class T>
T atomicOr(T* address, emul::Value<T> value) {
  static_assert(emul::is_one_of<T, int, unsigned, emul::Ull>, "not in CUDA");
  return emul::atomic_update(address, [=](T old) { return old | value; });
}

template <class T>
T atomicExch(T* address, emul::Value<T> value) {
  static_assert(emul::is_one_of<T, int, unsigned, emul::Ull, float>, "not in CUDA");
  return emul::atomic_update(address, [=](T) { return value; });
}

template <class T>
T atomicCAS(T* address, emul::Value<T> expected, emul::Value<T> value) {
  static_assert(emul::is_one_of<T, int, unsigned, emul::Ull, unsigned short>, "not in CUDA");
  return emul::atomic_update(address, [=](T old) { return old == expected ? value : old; });
}
