// SPDX-License-Identifier: Apache-2.0
// Copies scattered fragments whose total size exceeds the CPU caches.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace kvcache {

// A call that writes at least this many bytes would evict its own output from the caches.
constexpr int64_t kStreamedBytes = int64_t{4} << 20;

#if defined(__SSE2__)
namespace stream {

constexpr int64_t kLine = 64;
constexpr int64_t kRow =
    4096;  // four rows of memory are read at once, so prefetchers detect four streams
constexpr int64_t kRows = 4;
constexpr int64_t kAhead = 256;

inline void line(char* to, const char* from) {
  const auto* f = reinterpret_cast<const __m128i*>(from);
  auto* t = reinterpret_cast<__m128i*>(to);
  const __m128i a = _mm_loadu_si128(f), b = _mm_loadu_si128(f + 1);
  const __m128i c = _mm_loadu_si128(f + 2), d = _mm_loadu_si128(f + 3);
  _mm_stream_si128(t, a);
  _mm_stream_si128(t + 1, b);
  _mm_stream_si128(t + 2, c);
  _mm_stream_si128(t + 3, d);
}

}  // namespace stream

// Copies like memcpy, but bypasses the caches, so that cache lines that are completely overwritten
// are not read first. glibc's memcpy does this only for copies of many megabytes. Call
// `stream_done` before other threads read the result.
inline void stream_copy(char* to, const char* from, int64_t n) {
  using namespace stream;
  const int64_t head = -reinterpret_cast<intptr_t>(to) & 15;
  if (n < 4 * kLine) {
    std::memcpy(to, from, static_cast<size_t>(n));
    return;
  }
  std::memcpy(to, from, static_cast<size_t>(head));
  to += head, from += head, n -= head;
  for (; n >= kRows * kRow; n -= kRows * kRow) {
    for (int64_t i = 0; i < kRow; i += kLine) {
      for (int64_t row = 0; row < kRows; ++row) {
        const int64_t at = row * kRow + i;
        _mm_prefetch(from + at + kAhead, _MM_HINT_T0);
        line(to + at, from + at);
      }
    }
    to += kRows * kRow, from += kRows * kRow;
  }
  for (; n >= kLine; n -= kLine, to += kLine, from += kLine) {
    _mm_prefetch(from + 2 * kAhead, _MM_HINT_NTA);
    line(to, from);
  }
  std::memcpy(to, from, static_cast<size_t>(n));
}

inline void stream_done() { _mm_sfence(); }
#else
inline void stream_copy(char* to, const char* from, int64_t n) {
  std::memcpy(to, from, static_cast<size_t>(n));
}
inline void stream_done() {}
#endif

}  // namespace kvcache
