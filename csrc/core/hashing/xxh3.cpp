// SPDX-License-Identifier: Apache-2.0
#include "core/hashing/xxh3.h"

#include <cstring>

namespace kvcache {

namespace {

using U128 = unsigned __int128;

constexpr uint32_t kPrime32[] = {0x9E3779B1u, 0x85EBCA77u, 0xC2B2AE3Du};
constexpr uint64_t kPrime64[] = {0x9E3779B185EBCA87u, 0xC2B2AE3D27D4EB4Fu, 0x165667B19E3779F9u,
                                 0x85EBCA77C2B2AE63u, 0x27D4EB2F165667C5u};
constexpr uint64_t kMix1 = 0x165667919E3779F9u, kMix2 = 0x9FB21C651E98DF25u;

constexpr size_t kStripe = 64, kSecretStep = 8, kSecretSize = 192;
constexpr size_t kStripesPerBlock = (kSecretSize - kStripe) / kSecretStep;
constexpr size_t kLanes = 8;

// The default secret.
constexpr uint8_t kSecret[kSecretSize] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};

struct Digest {
  uint64_t low, high;
};

// XXH3 reads little-endian words. All supported machines are little-endian.
inline uint32_t read32(const uint8_t* p) {
  uint32_t value;
  std::memcpy(&value, p, sizeof(value));
  return value;
}

inline uint64_t read64(const uint8_t* p) {
  uint64_t value;
  std::memcpy(&value, p, sizeof(value));
  return value;
}

// Folds two words with the secret.
inline uint64_t flip64(size_t at) { return read64(kSecret + at) ^ read64(kSecret + at + 8); }

inline Digest multiply(uint64_t a, uint64_t b) {
  const U128 product = U128{a} * b;
  return {static_cast<uint64_t>(product), static_cast<uint64_t>(product >> 64)};
}

inline uint64_t multiply_fold(uint64_t a, uint64_t b) {
  const Digest product = multiply(a, b);
  return product.low ^ product.high;
}

inline uint64_t avalanche(uint64_t h) {
  h = (h ^ (h >> 37)) * kMix1;
  return h ^ (h >> 32);
}

inline uint64_t avalanche_short(uint64_t h) {  // the avalanche of XXH64
  h = (h ^ (h >> 33)) * kPrime64[1];
  h = (h ^ (h >> 29)) * kPrime64[2];
  return h ^ (h >> 32);
}

Digest digest_1_to_3(const uint8_t* p, size_t n) {
  const uint32_t low =
      uint32_t{p[0]} << 16 | uint32_t{p[n / 2]} << 24 | p[n - 1] | static_cast<uint32_t>(n) << 8;
  const uint32_t swapped = __builtin_bswap32(low);
  const uint32_t high = swapped << 13 | swapped >> 19;
  return {avalanche_short(low ^ (read32(kSecret) ^ read32(kSecret + 4))),
          avalanche_short(high ^ (read32(kSecret + 8) ^ read32(kSecret + 12)))};
}

Digest digest_4_to_8(const uint8_t* p, size_t n) {
  const uint64_t word = read32(p) + (uint64_t{read32(p + n - 4)} << 32);
  Digest out = multiply(word ^ flip64(16), kPrime64[0] + (n << 2));
  out.high += out.low << 1;
  out.low ^= out.high >> 3;
  out.low = (out.low ^ (out.low >> 35)) * kMix2;
  out.low ^= out.low >> 28;
  out.high = avalanche(out.high);
  return out;
}

Digest digest_9_to_16(const uint8_t* p, size_t n) {
  const uint64_t low = read64(p);
  uint64_t high = read64(p + n - 8);
  Digest mixed = multiply(low ^ high ^ flip64(32), kPrime64[0]);
  mixed.low += uint64_t{n - 1} << 54;
  high ^= flip64(48);
  mixed.high += high + (high & 0xFFFFFFFFu) * (kPrime32[1] - 1);
  mixed.low ^= __builtin_bswap64(mixed.high);
  Digest out = multiply(mixed.low, kPrime64[1]);
  out.high += mixed.high * kPrime64[1];
  return {avalanche(out.low), avalanche(out.high)};
}

inline uint64_t mix16(const uint8_t* p, const uint8_t* secret) {
  return multiply_fold(read64(p) ^ read64(secret), read64(p + 8) ^ read64(secret + 8));
}

inline void mix32(Digest* sum, const uint8_t* a, const uint8_t* b, const uint8_t* secret) {
  sum->low = (sum->low + mix16(a, secret)) ^ (read64(b) + read64(b + 8));
  sum->high = (sum->high + mix16(b, secret + 16)) ^ (read64(a) + read64(a + 8));
}

inline Digest finish_middle(const Digest& sum, size_t n) {
  const uint64_t high = sum.low * kPrime64[0] + sum.high * kPrime64[3] + n * kPrime64[1];
  return {avalanche(sum.low + sum.high), 0 - avalanche(high)};
}

Digest digest_17_to_128(const uint8_t* p, size_t n) {
  Digest sum{n * kPrime64[0], 0};
  for (size_t i = (n - 1) / 32 + 1; i-- > 0;) {
    mix32(&sum, p + 16 * i, p + n - 16 * (i + 1), kSecret + 32 * i);
  }
  return finish_middle(sum, n);
}

Digest digest_129_to_240(const uint8_t* p, size_t n) {
  Digest sum{n * kPrime64[0], 0};
  for (size_t i = 0; i < 4; ++i) mix32(&sum, p + 32 * i, p + 32 * i + 16, kSecret + 32 * i);
  sum = {avalanche(sum.low), avalanche(sum.high)};
  for (size_t i = 4; 32 * (i + 1) <= n; ++i) {
    mix32(&sum, p + 32 * i, p + 32 * i + 16, kSecret + 3 + 32 * (i - 4));
  }
  mix32(&sum, p + n - 16, p + n - 32, kSecret + 136 - 17 - 16);
  return finish_middle(sum, n);
}

inline void add_stripe(uint64_t* lanes, const uint8_t* p, const uint8_t* secret) {
  for (size_t i = 0; i < kLanes; ++i) {
    const uint64_t value = read64(p + 8 * i), key = value ^ read64(secret + 8 * i);
    lanes[i ^ 1] += value;
    lanes[i] += (key & 0xFFFFFFFFu) * (key >> 32);
  }
}

inline void scramble(uint64_t* lanes) {
  for (size_t i = 0; i < kLanes; ++i) {
    lanes[i] = (lanes[i] ^ (lanes[i] >> 47) ^ read64(kSecret + kSecretSize - kStripe + 8 * i)) *
               kPrime32[0];
  }
}

uint64_t merge(const uint64_t* lanes, const uint8_t* secret, uint64_t start) {
  for (size_t i = 0; i < kLanes; i += 2) {
    start +=
        multiply_fold(lanes[i] ^ read64(secret + 8 * i), lanes[i + 1] ^ read64(secret + 8 * i + 8));
  }
  return avalanche(start);
}

Digest digest_long(const uint8_t* p, size_t n) {
  uint64_t lanes[kLanes] = {kPrime32[2], kPrime64[0], kPrime64[1], kPrime64[2],
                            kPrime64[3], kPrime32[1], kPrime64[4], kPrime32[0]};
  const size_t num_stripes = (n - 1) / kStripe;  // excludes the last stripe, which may overlap
  for (size_t i = 0; i < num_stripes; ++i) {
    const size_t of_block = i % kStripesPerBlock;
    if (i > 0 && of_block == 0) scramble(lanes);
    add_stripe(lanes, p + kStripe * i, kSecret + kSecretStep * of_block);
  }
  // A block ends with a scramble if more bytes follow.
  if (num_stripes > 0 && num_stripes % kStripesPerBlock == 0) scramble(lanes);
  add_stripe(lanes, p + n - kStripe, kSecret + kSecretSize - kStripe - 7);
  return {merge(lanes, kSecret + 11, n * kPrime64[0]),
          merge(lanes, kSecret + kSecretSize - kStripe - 11, ~(n * kPrime64[1]))};
}

Digest digest(const uint8_t* p, size_t n) {
  if (n > 240) return digest_long(p, n);
  if (n > 128) return digest_129_to_240(p, n);
  if (n > 16) return digest_17_to_128(p, n);
  if (n > 8) return digest_9_to_16(p, n);
  if (n > 3) return digest_4_to_8(p, n);
  if (n > 0) return digest_1_to_3(p, n);
  return {avalanche_short(flip64(64)), avalanche_short(flip64(80))};
}

}  // namespace

void xxh3_128(const uint8_t* data, size_t size, uint8_t* out) {
  const Digest found = digest(data, size);
  const uint64_t words[] = {__builtin_bswap64(found.high), __builtin_bswap64(found.low)};
  std::memcpy(out, words, sizeof(words));
}

}  // namespace kvcache
