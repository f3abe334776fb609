// SPDX-License-Identifier: Apache-2.0
// Quantization with scales in the page. The elements of one head of one token form groups of equal
// size, and each group has a scale, which is derived from the elements when they are written.
//
// The formulas are those of the engines that write such pages, so the bytes are equal. A group of
// integers with an element that is not finite has the scale NaN, and a group of fp8 with an
// infinite element has an infinite scale, so that no element of it is read as a number. nvfp4 is
// like integers.
#pragma once

#include <cfloat>
#include <cstdint>

#include "ops/float_bits.h"
#include "ops/quantize.h"
#include "worker/host_device.h"

namespace kvcache {

// How a scale is derived from a group's largest magnitude. `most` is the format's largest code.
enum class ScaleRule : int64_t {
  kTokenHead,   // max(magnitude / most, 1e-6); elements are multiplied by its reciprocal
  kTile,        // max(magnitude / most, smallest normal float); elements are divided by it
  kIndexer,     // max(magnitude, 1e-4) / most; elements are divided by it
  kPowerOfTwo,  // like kIndexer, then the smallest power of two that is not below
};
constexpr int64_t kNumScaleRules = 4;

constexpr float kNaN = __builtin_nanf("");

KV_HOST_DEVICE float larger(float a, float b) { return a > b ? a : b; }
KV_HOST_DEVICE float smaller(float a, float b) { return a < b ? a : b; }

// Returns a * b, which compilers must not fuse with an addition.
KV_HOST_DEVICE float product(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

// Rounds half away from zero to an integer from `least` to `most`. NaN becomes `least`.
KV_HOST_DEVICE int32_t rounded(float x, float least, float most) {
  const float half = float_of((bits_of(x) & 0x80000000u) | 0x3F000000u);  // 0.5 with x's sign
  return static_cast<int32_t>(smaller(larger(x + half, least), most));
}

// Symmetric 8-bit integers.
struct Int8 {
  KV_HOST_DEVICE static uint8_t encode(float x) {
    return static_cast<uint8_t>(rounded(x, -128.0f, 127.0f));
  }
  KV_HOST_DEVICE static float decode(uint8_t code) {
    return static_cast<float>(static_cast<int8_t>(code));
  }
};

// The largest magnitude in a group. Magnitudes are the bits of floats without their sign, which are
// ordered like the floats; those above `kFloatInfinity` are NaN.
struct Magnitudes {
  uint32_t number = 0, any = 0;  // without and with NaN

  KV_HOST_DEVICE void add(float x) {
    const uint32_t magnitude = bits_of(x) & 0x7FFFFFFFu;
    merge(choose(magnitude > kFloatInfinity, 0, magnitude), magnitude);
  }
  KV_HOST_DEVICE void merge(uint32_t numbers, uint32_t all) {
    number = numbers > number ? numbers : number;
    any = all > any ? all : any;
  }
};

// A group's scale. Constructed from the group's extent to write it, and from `stored`, the number
// in the page, to read it.
template <class Format_>
struct Group {
  using Format = Format_;
  using Extent = Magnitudes;
  using Scale = float;
  static constexpr float kMost = std::is_same_v<Format, E4M3>   ? 448.0f
                                 : std::is_same_v<Format, E5M2> ? 57344.0f
                                                                : 127.0f;

  KV_HOST_DEVICE Group(const Extent& extent, ScaleRule rule)
      : multiplies(rule == ScaleRule::kTokenHead) {
    const float magnitude = float_of(extent.number);
    if (std::is_same_v<Format, Int8> && extent.any >= kFloatInfinity) {
      stored = kNaN;
    } else if (multiplies) {
      stored = larger(magnitude / kMost, 1e-6f);
    } else if (rule == ScaleRule::kTile) {
      stored = larger(magnitude / kMost, FLT_MIN);
    } else {
      stored = larger(magnitude, 1e-4f) / kMost;
      constexpr uint32_t kMantissa = (1u << kFloatMantissa) - 1;
      if (rule == ScaleRule::kPowerOfTwo) {
        stored = float_of((bits_of(stored) + kMantissa) & ~kMantissa);  // infinity remains
      }
    }
    factor = multiplies ? 1.0f / stored : stored;
  }
  KV_HOST_DEVICE explicit Group(float stored) : stored(stored) {}

  KV_HOST_DEVICE float divide(float x) const {
    return multiplies ? product(x, factor) : x / factor;
  }
  KV_HOST_DEVICE uint8_t encode(float x) const { return encode_one<Format>(divide(x)); }
  KV_HOST_DEVICE float decode(uint8_t code) const { return decode_one<Format>(code) * stored; }

  float stored, factor = 0.0f;
  bool multiplies = false;
};

// Formats with two codes per byte, the first in the low bits.
struct Int4 {};   // unsigned, with a zero point
struct NvFp4 {};  // e2m1 with scales of e4m3

// The number of codes per byte of the page.
template <class Format>
constexpr int kPerByte = std::is_same_v<Format, Int4> || std::is_same_v<Format, NvFp4> ? 2 : 1;

// The smallest and largest numbers in a group and zero. Without zero, a group of positive numbers
// would have a negative zero point.
struct Range {
  float least = 0.0f, most = 0.0f;
  uint32_t any = 0;  // the largest magnitude, including NaN

  KV_HOST_DEVICE void add(float x) { merge(x, x, bits_of(x) & 0x7FFFFFFFu); }
  KV_HOST_DEVICE void merge(float smallest, float largest, uint32_t all) {
    least = smaller(smallest, least);
    most = larger(largest, most);
    any = all > any ? all : any;
  }
};

// The zero point replaces the four lowest bits of the stored scale.
template <>
struct Group<Int4> {
  using Format = Int4;
  using Extent = Range;
  using Scale = float;

  KV_HOST_DEVICE Group(const Extent& extent, ScaleRule) {
    scale = larger((extent.most - extent.least) / 15.0f, 1e-6f);
    factor = 1.0f / scale;
    if (extent.any >= kFloatInfinity || !(scale < FLT_MAX)) {
      scale = stored = kNaN;
    } else {
      zero = static_cast<float>(rounded(-extent.least / scale, 0.0f, 15.0f));
      stored = float_of((bits_of(scale) & ~15u) | static_cast<uint32_t>(zero));
    }
  }
  KV_HOST_DEVICE explicit Group(float stored)
      : stored(stored),
        scale(float_of(bits_of(stored) & ~15u)),
        zero(static_cast<float>(bits_of(stored) & 15u)) {}

  KV_HOST_DEVICE uint8_t encode(float x) const {
    return static_cast<uint8_t>(rounded(product(x, factor) + zero, 0.0f, 15.0f));
  }
  KV_HOST_DEVICE float decode(uint8_t code) const {
    return (static_cast<float>(code) - zero) * scale;
  }

  float stored, scale, factor = 0.0f, zero = 0.0f;
};

// The scale is magnitude / 6 in e4m3: at most 448, and 0 for magnitudes of at most 6 * 2^-10. The
// formula is vLLM's with a global scale of 1 and true reciprocals.
template <>
struct Group<NvFp4> {
  using Format = NvFp4;
  using Extent = Magnitudes;
  struct Scale {  // not a number, so that it is not stored as a float
    uint8_t code;
  };

  KV_HOST_DEVICE Group(const Extent& extent, ScaleRule)
      : Group(Scale{encode_one<E4M3>(
            extent.any >= kFloatInfinity ? kNaN : product(float_of(extent.number), 1.0f / 6.0f))}) {
    factor = scale == 0.0f ? 0.0f : 1.0f / scale;
  }
  KV_HOST_DEVICE explicit Group(Scale stored)
      : stored(stored), scale(decode_one<E4M3>(stored.code)) {}

  KV_HOST_DEVICE uint8_t encode(float x) const { return E2M1::encode(product(x, factor)); }
  KV_HOST_DEVICE float decode(uint8_t code) const { return E2M1::decode(code) * scale; }

  Scale stored;
  float scale, factor = 0.0f;
};

}  // namespace kvcache
