// SPDX-License-Identifier: Apache-2.0
// Compares the conversions to and from fp8 with the host version of NVIDIA's cuda_fp8.h, for every
// bfloat16, every float16, every fp8 code, and every `stride`-th of the 2^32 floats, and likewise
// those to and from e2m1 with cuda_fp4.h, which CUDA 12.8 and later have. Usage: nvidia stride.
// Prints counts. The exit code is 1 if any result differs (except for the sign of NaN in fp8).
#include <cuda_fp8.h>
#if __has_include(<cuda_fp4.h>)
#include <cuda_fp4.h>
#define KV_FP4
#endif

#include <cstdio>
#include <cstdlib>

#include "ops/quantize.h"

using namespace kvcache;

namespace {

uint64_t num_compared = 0, num_different = 0;

void compare(bool same, const char* what, uint32_t bits, uint32_t got, uint32_t wanted) {
  ++num_compared;
  if (same || num_different++ >= 20) return;
  std::printf("%s of %08x: %x, not %x\n", what, bits, got, wanted);
}

bool is_nan(float x) { return x != x; }

template <class Format>
void encodes(float x, __nv_fp8_interpretation_t format, const char* what) {
  const uint8_t wanted = __nv_cvt_float_to_fp8(x, __NV_SATFINITE, format);
  const uint8_t got = Format::encode(x), nan_sign = is_nan(x) ? 0x80 : 0;
  compare((got | nan_sign) == (wanted | nan_sign), what, bits_of(x), got, wanted);
}

void encodes(float x) {
  encodes<E4M3>(x, __NV_E4M3, "e4m3");
  encodes<E5M2>(x, __NV_E5M2, "e5m2");
#ifdef KV_FP4
  const int fp4 = __nv_cvt_float_to_fp4(x, __NV_E2M1, cudaRoundNearest) & 15;
  compare(E2M1::encode(x) == fp4, "e2m1", bits_of(x), E2M1::encode(x), fp4);
#endif
}

template <class Format>
void decodes(uint8_t code, __nv_fp8_interpretation_t format, const char* what) {
  const float wanted = __half2float(__half(__nv_cvt_fp8_to_halfraw(code, format)));
  const float got = Format::decode(code);
  const bool same = is_nan(wanted) ? is_nan(got) : bits_of(got) == bits_of(wanted);
  compare(same, what, code, bits_of(got), bits_of(wanted));
}

void pairs(float x, float y) {
  const auto wanted = __nv_cvt_float2_to_fp8x2(make_float2(x, y), __NV_SATFINITE, __NV_E4M3);
  const uint16_t got = encode_pair<E4M3>(x, y);
  const auto nan_signs = static_cast<uint16_t>((is_nan(x) ? 0x80 : 0) | (is_nan(y) ? 0x8000 : 0));
  compare((got | nan_signs) == (wanted | nan_signs), "pair", bits_of(x), got, wanted);
}

}  // namespace

int main(int argc, char** argv) {
  const uint64_t stride = argc == 2 ? std::strtoull(argv[1], nullptr, 10) : 0;
  if (stride == 0) return 2;
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    c10::Half half;
    half.x = static_cast<uint16_t>(bits);
    const float x = widen(half), torchs = static_cast<float>(half), y = float_of(bits << 16);
    compare(bits_of(x) == bits_of(torchs) || is_nan(torchs), "half", bits, bits_of(x),
            bits_of(torchs));
    encodes(x);
    encodes(y);
    pairs(x, y);
    pairs(y, x);
  }
  for (uint32_t code = 0; code < 256; ++code) {
    decodes<E4M3>(static_cast<uint8_t>(code), __NV_E4M3, "e4m3 code");
    decodes<E5M2>(static_cast<uint8_t>(code), __NV_E5M2, "e5m2 code");
  }
#ifdef KV_FP4
  for (uint8_t code = 0; code < 16; ++code) {
    const float got = E2M1::decode(code);
    const float wanted = __half2float(__half(__nv_cvt_fp4_to_halfraw(code, __NV_E2M1)));
    compare(bits_of(got) == bits_of(wanted), "e2m1 code", code, bits_of(got), bits_of(wanted));
  }
#endif
  for (uint64_t bits = 0; bits < uint64_t{1} << 32; bits += stride) {
    encodes(float_of(static_cast<uint32_t>(bits)));
  }
  std::printf("%llu conversions, %llu differ\n", static_cast<unsigned long long>(num_compared),
              static_cast<unsigned long long>(num_different));
  return num_different > 0;
}
