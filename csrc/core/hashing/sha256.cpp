// SPDX-License-Identifier: Apache-2.0
#include "core/hashing/sha256.h"

#include <algorithm>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#if defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif
#endif

namespace kvcache {

namespace {

constexpr size_t kChunkBytes = 64;
constexpr int kNumRounds = 64;

// The first 32 bits of the fractional parts of the square roots of the first 8 primes.
alignas(16) constexpr uint32_t kFirstState[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                                 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

// The first 32 bits of the fractional parts of the cube roots of the first 64 primes.
alignas(16) constexpr uint32_t kConstants[kNumRounds] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

// Loading byte by byte would also work, but gcc generates slow vector code for it.
inline uint32_t load_big_endian(const uint8_t* p) {
  uint32_t word;
  std::memcpy(&word, p, sizeof(word));
  return __builtin_bswap32(word);
}

inline void store_big_endian(uint32_t word, uint8_t* p) {
  word = __builtin_bswap32(word);
  std::memcpy(p, &word, sizeof(word));
}

inline uint32_t rotate_right(uint32_t word, int n) { return word >> n | word << (32 - n); }

// The functions of FIPS 180-4, section 4.1.2.
inline uint32_t ch(uint32_t x, uint32_t y, uint32_t z) { return z ^ (x & (y ^ z)); }
inline uint32_t maj(uint32_t x, uint32_t y, uint32_t z) { return y ^ ((x ^ y) & (y ^ z)); }
inline uint32_t rotations(uint32_t x, int i, int j, int k) {
  return rotate_right(x, i) ^ rotate_right(x, j) ^ rotate_right(x, k);
}
inline uint32_t sigma0(uint32_t x) { return rotate_right(x, 7) ^ rotate_right(x, 18) ^ x >> 3; }
inline uint32_t sigma1(uint32_t x) { return rotate_right(x, 17) ^ rotate_right(x, 19) ^ x >> 10; }

// Returns a chunk of a message. The first chunk of a linked message is assembled in `linked`.
inline const uint8_t* chunk_of(const Sha256Message& message, size_t i, uint8_t* linked) {
  const uint8_t* const chunk = message.chunks + i * kChunkBytes;
  if (i > 0 || message.link == nullptr) return chunk;
  std::copy_n(chunk, kChunkBytes, linked);
  std::copy_n(message.link, kSha256Bytes, linked + Sha256Message::kLinkAt);
  return linked;
}

void digest_portable(const Sha256Message& message, size_t num_chunks) {
  uint32_t state[8];
  std::copy_n(kFirstState, 8, state);
  uint8_t linked[kChunkBytes];
  for (size_t at = 0; at < num_chunks; ++at) {
    const uint8_t* const chunk = chunk_of(message, at, linked);
    uint32_t schedule[16];  // words of this round and the next 15
    uint32_t words[8];      // a to h of FIPS 180-4; their positions shift by one each round
    for (int i = 0; i < 16; ++i) schedule[i] = load_big_endian(chunk + 4 * i);
    std::copy_n(state, 8, words);
    for (int first = 0; first < kNumRounds; first += 16) {
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) {
        const auto word = [&](int n) -> uint32_t& { return words[(n - i + 16) % 8]; };
        const uint32_t a = word(0), b = word(1), c = word(2), e = word(4), f = word(5), g = word(6);
        const uint32_t t1 =
            word(7) + rotations(e, 6, 11, 25) + ch(e, f, g) + kConstants[first + i] + schedule[i];
        word(3) += t1;
        word(7) = t1 + rotations(a, 2, 13, 22) + maj(a, b, c);
        if (first + 16 == kNumRounds) continue;  // no later round needs more words
        schedule[i] += sigma1(schedule[(i + 14) % 16]) + schedule[(i + 9) % 16] +
                       sigma0(schedule[(i + 1) % 16]);
      }
    }
    for (int i = 0; i < 8; ++i) state[i] += words[i];
  }
  for (int i = 0; i < 8; ++i) store_big_endian(state[i], message.out + 4 * i);
}

#if defined(__x86_64__)

// The implementation also uses SSE4.1 and its predecessors. The CPU is queried directly, because
// not every compiler's __builtin_cpu_supports knows "sha". Operating system support need not be
// checked, because every system saves the SSE registers.
bool has_sha_ni() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (b & bit_SHA) == 0) return false;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_SSE4_1) != 0;
}

// Loads a chunk of a message. The link of a linked message is inserted in registers.
__attribute__((target("sse4.1"))) inline void load_chunk(const Sha256Message& message, size_t i,
                                                         __m128i* chunk) {
  const auto* const given = reinterpret_cast<const __m128i*>(message.chunks + i * kChunkBytes);
  for (int k = 0; k < 4; ++k) chunk[k] = _mm_loadu_si128(given + k);
  if (i > 0 || message.link == nullptr) return;
  constexpr int kBefore = Sha256Message::kLinkAt, kShift = 16 - kBefore;
  const auto* const link = reinterpret_cast<const __m128i*>(message.link);
  const __m128i first = _mm_loadu_si128(link), second = _mm_loadu_si128(link + 1);
  const uint8_t* const behind = message.chunks + kBefore + kSha256Bytes;
  const __m128i rest = _mm_loadu_si128(reinterpret_cast<const __m128i*>(behind));
  chunk[0] = _mm_alignr_epi8(first, _mm_slli_si128(chunk[0], kShift), kShift);
  chunk[1] = _mm_alignr_epi8(second, first, kShift);
  chunk[2] = _mm_alignr_epi8(rest, second, kShift);
}

// Loads and stores words as big-endian numbers.
__attribute__((target("sse4.1"))) inline __m128i swap_bytes(__m128i words) {
  return _mm_shuffle_epi8(words,
                          _mm_set_epi8(12, 13, 14, 15, 8, 9, 10, 11, 4, 5, 6, 7, 0, 1, 2, 3));
}

// Computes words 4 * i to 4 * i + 3 of the message schedule, whose last 16 words are stored.
__attribute__((target("sha,sse4.1"))) inline __m128i next_words(__m128i* schedule, int i) {
  __m128i& next = schedule[i % 4];
  if (i < 4) {
    next = swap_bytes(next);
  } else {
    const __m128i last = schedule[(i + 3) % 4];
    const __m128i seven_back = _mm_alignr_epi8(last, schedule[(i + 2) % 4], 4);
    next = _mm_sha256msg1_epu32(next, schedule[(i + 1) % 4]);
    next = _mm_sha256msg2_epu32(_mm_add_epi32(next, seven_back), last);
  }
  return next;
}

// The instructions expect the words of a state in this order, the first in the highest lane.
struct ShaNiState {
  __m128i abef, cdgh;
};

__attribute__((target("sse4.1"))) inline ShaNiState first_state() {
  const auto* const words = reinterpret_cast<const __m128i*>(kFirstState);
  const __m128i badc = _mm_shuffle_epi32(_mm_load_si128(words), 0xB1);
  const __m128i hgfe = _mm_shuffle_epi32(_mm_load_si128(words + 1), 0x1B);
  return {_mm_alignr_epi8(badc, hgfe, 8), _mm_blend_epi16(hgfe, badc, 0xF0)};
}

__attribute__((target("sse4.1"))) inline void store_digest(const ShaNiState& state, uint8_t* out) {
  const __m128i feba = _mm_shuffle_epi32(state.abef, 0x1B);
  const __m128i dchg = _mm_shuffle_epi32(state.cdgh, 0xB1);
  const __m128i abcd = _mm_blend_epi16(feba, dchg, 0xF0), efgh = _mm_alignr_epi8(dchg, feba, 8);
  auto* const digest = reinterpret_cast<__m128i*>(out);
  _mm_storeu_si128(digest, swap_bytes(abcd));
  _mm_storeu_si128(digest + 1, swap_bytes(efgh));
}

// Hashes N messages in an interleaved order, because each round depends on the previous round of
// the same message.
template <int N>
__attribute__((target("sha,sse4.1"))) void digest_sha_ni(const Sha256Message* messages,
                                                         size_t num_chunks) {
  const auto* const constants = reinterpret_cast<const __m128i*>(kConstants);
  ShaNiState states[N];
  std::fill_n(states, N, first_state());
  for (size_t chunk = 0; chunk < num_chunks; ++chunk) {
    ShaNiState before[N];
    std::copy_n(states, N, before);
    __m128i schedules[N][4];  // the last 16 words
    for (int k = 0; k < N; ++k) load_chunk(messages[k], chunk, schedules[k]);
#pragma GCC unroll 16
    for (int i = 0; i < kNumRounds / 4; ++i) {
#pragma GCC unroll 2
      for (int k = 0; k < N; ++k) {
        auto& [abef, cdgh] = states[k];
        const __m128i sums =
            _mm_add_epi32(next_words(schedules[k], i), _mm_load_si128(constants + i));
        cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sums);
        abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sums, 0x0E));
      }
    }
    for (int k = 0; k < N; ++k) {
      states[k].abef = _mm_add_epi32(states[k].abef, before[k].abef);
      states[k].cdgh = _mm_add_epi32(states[k].cdgh, before[k].cdgh);
    }
  }
  for (int k = 0; k < N; ++k) store_digest(states[k], messages[k].out);
}

void digest_one_sha_ni(const Sha256Message& message, size_t num_chunks) {
  digest_sha_ni<1>(&message, num_chunks);
}

#elif defined(__aarch64__)

bool has_sha2() {
#if defined(__ARM_FEATURE_SHA2)  // supported by all CPUs of this build's target
  return true;
#elif defined(__linux__)
  return (getauxval(AT_HWCAP) & HWCAP_SHA2) != 0;
#else
  return false;
#endif
}

#if defined(__clang__)
__attribute__((target("sha2")))
#else
__attribute__((target("+crypto")))
#endif
void digest_armv8(const Sha256Message& message, size_t num_chunks) {
  uint32x4_t abcd = vld1q_u32(kFirstState), efgh = vld1q_u32(kFirstState + 4);
  uint8_t linked[kChunkBytes];
  for (size_t chunk = 0; chunk < num_chunks; ++chunk) {
    const uint8_t* const bytes = chunk_of(message, chunk, linked);
    const uint32x4_t abcd_before = abcd, efgh_before = efgh;
    uint32x4_t schedule[4];  // the last 16 words
#pragma GCC unroll 16
    for (int i = 0; i < kNumRounds / 4; ++i) {
      uint32x4_t& next = schedule[i % 4];
      if (i < 4) {
        next = vreinterpretq_u32_u8(vrev32q_u8(vld1q_u8(bytes + 16 * i)));
      } else {
        next = vsha256su0q_u32(next, schedule[(i + 1) % 4]);
        next = vsha256su1q_u32(next, schedule[(i + 2) % 4], schedule[(i + 3) % 4]);
      }
      const uint32x4_t sums = vaddq_u32(next, vld1q_u32(kConstants + 4 * i));
      const uint32x4_t abcd_old = abcd;
      abcd = vsha256hq_u32(abcd, efgh, sums);
      efgh = vsha256h2q_u32(efgh, abcd_old, sums);
    }
    abcd = vaddq_u32(abcd, abcd_before);
    efgh = vaddq_u32(efgh, efgh_before);
  }
  vst1q_u8(message.out, vrev32q_u8(vreinterpretq_u8_u32(abcd)));
  vst1q_u8(message.out + 16, vrev32q_u8(vreinterpretq_u8_u32(efgh)));
}

#endif

std::vector<Sha256Implementation> find_implementations() {
  std::vector<Sha256Implementation> found;
#if defined(__x86_64__)
  if (has_sha_ni()) found.push_back({"sha_ni", &digest_one_sha_ni, &digest_sha_ni<2>});
#elif defined(__aarch64__)
  if (has_sha2()) found.push_back({"armv8", &digest_armv8, nullptr});
#endif
  found.push_back({"portable", &digest_portable, nullptr});
  return found;
}

}  // namespace

const std::vector<Sha256Implementation>& sha256_implementations() {
  static const std::vector<Sha256Implementation> found = find_implementations();
  return found;
}

size_t sha256_pad(uint8_t* data, size_t size) {
  // The padding consists of a one bit, zeros, and the message length in bits as an 8-byte integer.
  const size_t num_chunks = (size + 8) / kChunkBytes + 1;
  std::memset(data + size, 0, kSha256Padding);  // clearing a fixed number of bytes is faster
  data[size] = 0x80;
  uint8_t* const end = data + num_chunks * kChunkBytes;
  const uint64_t num_bits = uint64_t{size} * 8;
  store_big_endian(static_cast<uint32_t>(num_bits >> 32), end - 8);
  store_big_endian(static_cast<uint32_t>(num_bits), end - 4);
  return num_chunks;
}

void sha256(const uint8_t* data, size_t size, uint8_t* out,
            const Sha256Implementation& implementation) {
  std::vector<uint8_t> padded(size + kSha256Padding);
  std::copy_n(data, size, padded.data());
  const size_t num_chunks = sha256_pad(padded.data(), size);
  implementation.digest({padded.data(), out}, num_chunks);
}

}  // namespace kvcache
