// SPDX-License-Identifier: Apache-2.0
#include "core/hashing/cbor.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define KV_AVX512
#include <immintrin.h>
#endif

namespace kvcache {
namespace {

uint8_t* write_one_by_one(uint8_t* p, const int32_t* values, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    // CBOR encodes a negative integer t as the value -1 - t, which equals ~t.
    const auto value = static_cast<uint32_t>(values[i]);
    p = values[i] >= 0 ? write_head(p, kUnsigned, value) : write_head(p, kNegative, ~value);
  }
  return p;
}

#ifdef KV_AVX512

// Writes eight integers at a time. Each integer takes eight bytes of a register: its initial byte,
// its value in big-endian order, and three unused bytes. The bytes that the shortest form of each
// integer uses are then packed together.
__attribute__((target("avx512f,avx512bw,avx512vl,avx512vbmi2,popcnt"))) uint8_t* write_avx512(
    uint8_t* p, const int32_t* values, int64_t n) {
  const __m512i value_places = _mm512_set4_epi32(0x80808008, 0x090A0B80, 0x80808000, 0x01020380);
  // The used bytes of an item, by form.
  const __m512i of_forms[] = {_mm512_set1_epi64(0x80), _mm512_set1_epi64(0x80'0000'0080),
                              _mm512_set1_epi64(0x80'8000'0080), _mm512_set1_epi64(0x80'8080'8080)};
  for (int64_t i = 0; i < n; i += 8) {
    const auto here = static_cast<__mmask8>(n - i >= 8 ? 0xFF : (1 << (n - i)) - 1);
    const __m256i given = _mm256_maskz_loadu_epi32(here, values + i);
    const __m256i negative = _mm256_srai_epi32(given, 31);
    const __m256i value = _mm256_xor_si256(given, negative);  // ~t = -1 - t for a negative t
    const __mmask8 above_23 = _mm256_cmpgt_epu32_mask(value, _mm256_set1_epi32(23));
    const __mmask8 above_byte = _mm256_cmpgt_epu32_mask(value, _mm256_set1_epi32(0xFF));
    const __mmask8 above_2_bytes = _mm256_cmpgt_epu32_mask(value, _mm256_set1_epi32(0xFFFF));
    __m256i mark = _mm256_mask_mov_epi32(value, above_23, _mm256_set1_epi32(24));
    mark = _mm256_mask_mov_epi32(mark, above_byte, _mm256_set1_epi32(25));
    mark = _mm256_mask_mov_epi32(mark, above_2_bytes, _mm256_set1_epi32(26));
    mark = _mm256_or_si256(mark, _mm256_and_si256(negative, _mm256_set1_epi32(kNegative)));
    __m512i valid = _mm512_mask_mov_epi64(of_forms[0], above_23, of_forms[1]);
    valid = _mm512_mask_mov_epi64(valid, above_byte, of_forms[2]);
    valid = _mm512_mask_mov_epi64(valid, above_2_bytes, of_forms[3]);
    const __mmask64 used = _mm512_movepi8_mask(_mm512_maskz_mov_epi64(here, valid));
    const __m512i value_bytes =
        _mm512_shuffle_epi8(_mm512_maskz_cvtepu32_epi64(here, value), value_places);
    const __m512i items = _mm512_or_si512(value_bytes, _mm512_maskz_cvtepu32_epi64(here, mark));
    _mm512_storeu_si512(p, _mm512_maskz_compress_epi8(used, items));
    p += _mm_popcnt_u64(used);
  }
  return p;
}

bool has_avx512() {
  static const bool has = __builtin_cpu_supports("avx512vbmi2") &&
                          __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  return has;
}

#endif

}  // namespace

uint8_t* write_ints(uint8_t* p, const int32_t* values, int64_t n) {
#ifdef KV_AVX512
  if (has_avx512()) return write_avx512(p, values, n);
#endif
  return write_one_by_one(p, values, n);
}

}  // namespace kvcache
