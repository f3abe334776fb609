// Accesses of 1 to 16 bytes for kernels that move bytes without looking at them.
#pragma once

#include <cstdint>

namespace kvcache {

template <int kBytes>
struct VectorOf;
template <>
struct VectorOf<16> {
  using type = uint4;
};
template <>
struct VectorOf<8> {
  using type = uint2;
};
template <>
struct VectorOf<4> {
  using type = unsigned;
};
template <>
struct VectorOf<2> {
  using type = unsigned short;
};
template <>
struct VectorOf<1> {
  using type = unsigned char;
};

// The largest access that addresses and strides allow, given all of them or-ed: 16, 8, 4, 2 or 1.
inline int64_t vector_bytes_of(uint64_t all) {
  all |= 16;
  return static_cast<int64_t>(all & (~all + 1));
}

// Calls f(VectorOf<n>::type{}) for the n given.
template <class F>
void with_vector(int64_t num_bytes, F&& f) {
  switch (num_bytes) {
    case 16:
      return f(VectorOf<16>::type{});
    case 8:
      return f(VectorOf<8>::type{});
    case 4:
      return f(VectorOf<4>::type{});
    case 2:
      return f(VectorOf<2>::type{});
    default:
      return f(VectorOf<1>::type{});
  }
}

}  // namespace kvcache
