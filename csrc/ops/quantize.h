// SPDX-License-Identifier: Apache-2.0
// Conversions between fp8 or e2m1 and the dtypes of K and V. The results are bitwise equal to
// PyTorch's, or NVIDIA's for e2m1, except for the sign of NaN in fp8.
//
// An fp8 value is the original value divided by the scale. Conditions only select between two
// numbers, so that compilers can vectorize loops. From compute capability 8.9 on, each conversion
// is one instruction.
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cstdint>
#include <type_traits>

#include "ops/float_bits.h"
#include "worker/host_device.h"

#if defined(__CUDACC__)
#include <cuda_fp8.h>
#endif

namespace kvcache {

constexpr uint32_t kFloatMantissa = 23, kFloatBias = 127, kFloatInfinity = 0xFFu << kFloatMantissa;

// Returns a if `condition` is true and b otherwise, without a branch.
KV_HOST_DEVICE uint32_t choose(bool condition, uint32_t a, uint32_t b) {
  const uint32_t mask = 0u - static_cast<uint32_t>(condition);
  return (a & mask) | (b & ~mask);
}

// A floating-point format stored in `Bits`: a sign, an exponent and `mantissa` bits. Magnitudes of
// `special` and above are infinite or NaN. Values above `most` (the bits of a float) become `most`,
// and NaN becomes `nan`.
template <class Bits, uint32_t mantissa, uint32_t bias, uint32_t special, uint32_t most,
          uint32_t nan>
struct SmallFloat {
  static constexpr uint32_t kSignBit = sizeof(Bits) * 8 - 1;
  static constexpr uint32_t kDropped = kFloatMantissa - mantissa;
  static constexpr uint32_t kRebias = (kFloatBias - bias) << kFloatMantissa;
  static constexpr uint32_t kSmallestNormal = kRebias + (1u << kFloatMantissa);
  static constexpr uint32_t kStep = kSmallestNormal - (mantissa << kFloatMantissa);

  // Rounds to nearest, ties to even.
  KV_HOST_DEVICE static Bits encode(float x) {
    const uint32_t sign = bits_of(x) >> 31 << kSignBit;
    const uint32_t magnitude = bits_of(x) & 0x7FFFFFFFu;
    const uint32_t finite = choose(magnitude < most, magnitude, most);
    const uint32_t odd = finite >> kDropped & 1;
    const uint32_t normal = (finite - kRebias + odd + (1u << (kDropped - 1)) - 1) >> kDropped;
    // Adding a float whose last bit equals one subnormal step rounds to a multiple of this step.
    constexpr uint32_t kSteps = kStep + (kFloatMantissa << kFloatMantissa);
    const uint32_t subnormal = bits_of(float_of(finite) + float_of(kSteps)) - kSteps;
    const uint32_t number = choose(finite < kSmallestNormal, subnormal, normal);
    return static_cast<Bits>(sign | choose(magnitude > kFloatInfinity, nan, number));
  }

  KV_HOST_DEVICE static float decode(Bits x) {
    const uint32_t sign = uint32_t{x} >> kSignBit << 31;
    const uint32_t magnitude = x & ((1u << kSignBit) - 1);
    const uint32_t normal = (magnitude << kDropped) + kRebias;
    const uint32_t number = normal | choose(magnitude >= special, kFloatInfinity, 0);
    const float steps = static_cast<float>(static_cast<int32_t>(magnitude));
    const uint32_t subnormal = bits_of(steps * float_of(kStep));
    return float_of(sign | choose(magnitude < (1u << mantissa), subnormal, number));
  }
};

// The fp8 formats saturate at their largest finite value.
using E4M3 = SmallFloat<uint8_t, 3, 7, 0x7F, 0x43E00000u, 0x7F>;   // saturates at 448; no infinity
using E5M2 = SmallFloat<uint8_t, 2, 15, 0x7C, 0x47600000u, 0x7F>;  // saturates at 57344
// float16 does not saturate: 65536 becomes infinity.
using IeeeHalf = SmallFloat<uint16_t, 10, 15, 0x7C00, 0x47800000u, 0x7E00>;

// Four bits: 0, 0.5, 1, 1.5, 2, 3, 4, 6, and a sign. Rounds as the instruction
// cvt.rn.satfinite.e2m1x2 of sm_100a does: ties to even, saturating at 6, and NaN becomes 6. The
// instruction does not exist in code for sm_100, which every device of compute capability 10.x
// runs.
struct E2M1 {
  using Byte = SmallFloat<uint8_t, 1, 1, 8, 0x40C00000u, 7>;  // with the sign in bit 7

  KV_HOST_DEVICE static uint8_t encode(float x) {
    const uint8_t code = Byte::encode(x);
    const uint32_t sign = choose((code & 7) == 7 && !(x < 0.0f), 0, code >> 4 & 8);
    return static_cast<uint8_t>(sign | (code & 7));
  }
  KV_HOST_DEVICE static float decode(uint8_t code) {
    return Byte::decode(static_cast<uint8_t>((code & 8) << 4 | (code & 7)));
  }
};

KV_HOST_DEVICE float widen(float x) { return x; }
KV_HOST_DEVICE float widen(c10::BFloat16 x) { return static_cast<float>(x); }
KV_HOST_DEVICE float widen(c10::Half x) {
#if defined(__CUDA_ARCH__)
  return static_cast<float>(x);
#else
  return IeeeHalf::decode(x.x);  // torch's own conversion has a branch
#endif
}

KV_HOST_DEVICE void narrow(float x, float& out) { out = x; }
KV_HOST_DEVICE void narrow(float x, c10::BFloat16& out) { out = static_cast<c10::BFloat16>(x); }
KV_HOST_DEVICE void narrow(float x, c10::Half& out) {
#if defined(__CUDA_ARCH__)
  out = static_cast<c10::Half>(x);
#else
  out.x = IeeeHalf::encode(x);
#endif
}

template <class Format>
constexpr bool kIsFp8 = std::is_same_v<Format, E4M3> || std::is_same_v<Format, E5M2>;

// encode_pair converts two numbers to codes, of fp8 with one instruction, and decode_pair converts
// them back. The low byte contains the code of the first number.
template <class Format>
KV_HOST_DEVICE uint16_t encode_pair(float first, float second) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  if constexpr (kIsFp8<Format>) {
    constexpr auto kFormat = std::is_same_v<Format, E4M3> ? __NV_E4M3 : __NV_E5M2;
    return __nv_cvt_float2_to_fp8x2(make_float2(first, second), __NV_SATFINITE, kFormat);
  }
#endif
  return static_cast<uint16_t>(Format::encode(first) | Format::encode(second) << 8);
}

template <class Format>
KV_HOST_DEVICE void decode_pair(uint16_t codes, float& first, float& second) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  if constexpr (kIsFp8<Format>) {
    constexpr auto kFormat = std::is_same_v<Format, E4M3> ? __NV_E4M3 : __NV_E5M2;
    const float2 both = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(codes, kFormat)));
    first = both.x;
    second = both.y;
    return;
  }
#endif
  first = Format::decode(static_cast<uint8_t>(codes));
  second = Format::decode(static_cast<uint8_t>(codes >> 8));
}

// The same for one number. On the CPU, pairs would prevent vectorization.
template <class Format>
KV_HOST_DEVICE uint8_t encode_one(float x) {
#if defined(__CUDA_ARCH__)
  return static_cast<uint8_t>(encode_pair<Format>(x, 0.0f));
#else
  return Format::encode(x);
#endif
}

template <class Format>
KV_HOST_DEVICE float decode_one(uint8_t code) {
#if defined(__CUDA_ARCH__)
  float value, unused;
  decode_pair<Format>(code, value, unused);
  return value;
#else
  return Format::decode(code);
#endif
}

// `Element` is float, Half or BFloat16. Computes in float32 with a true division.
template <class Format, class Element>
KV_HOST_DEVICE void quantize(Element x, float scale, uint8_t& out) {
  out = encode_one<Format>(widen(x) / scale);
}

template <class Format, class Element>
KV_HOST_DEVICE void dequantize(uint8_t x, float scale, Element& out) {
  narrow(decode_one<Format>(x) * scale, out);
}

}  // namespace kvcache
