// SPDX-License-Identifier: Apache-2.0
// Writes CBOR items (RFC 8949) in their shortest form.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace kvcache {

enum CborMajor : uint8_t {
  kUnsigned = 0 << 5,
  kNegative = 1 << 5,
  kBytes = 2 << 5,
  kText = 3 << 5,
  kArray = 4 << 5
};
inline constexpr uint8_t kCborNull = 0xF6;
inline constexpr int64_t kMaxHeadBytes = 5;  // one byte, and a value of up to 32 bits
// The number of bytes that write_head writes. The bytes after the head are undefined.
inline constexpr int64_t kBytesWritten = 8;

// Returns the end of the head. Branch-free, because the head sizes of a prompt's token ids are
// unpredictable.
inline uint8_t* write_head(uint8_t* p, uint8_t major, uint32_t value) {
  static constexpr uint8_t kUnused[] = {24, 24, 16, 0};  // unused bits of the value, by form
  // Bits before the value in a longer head, by form.
  static constexpr uint8_t kBehind[] = {0, 8, 8, 8};
  static constexpr uint8_t kMark[] = {0, 24, 25, 26};
  static constexpr uint8_t kSize[] = {1, 2, 3, 5};
  const int form = (value >= 24) + (value > 0xFF) + (value > 0xFFFF);
  const uint64_t big_endian = __builtin_bswap32(value) >> kUnused[form];
  const uint64_t head = big_endian << kBehind[form] | kMark[form] | major;
  std::memcpy(p, &head, kBytesWritten);
  return p + kSize[form];
}

// Writes the token ids of a block, and returns their end. May overwrite kIntsOverwritten bytes
// after the end.
uint8_t* write_ints(uint8_t* p, const int32_t* values, int64_t n);
inline constexpr int64_t kIntsOverwritten = 64;

inline void append_head(std::string* out, uint8_t major, uint32_t value) {
  uint8_t head[kBytesWritten];
  const uint8_t* end = write_head(head, major, value);
  out->append(reinterpret_cast<const char*>(head), static_cast<size_t>(end - head));
}

// Writes an integer from -2**31 to 2**32 - 1.
inline void append_int(std::string* out, int64_t value) {
  if (value >= 0) return append_head(out, kUnsigned, static_cast<uint32_t>(value));
  append_head(out, kNegative, static_cast<uint32_t>(-1 - value));
}

// `major` is kText or kBytes.
inline void append_string(std::string* out, uint8_t major, std::string_view value) {
  append_head(out, major, static_cast<uint32_t>(value.size()));
  out->append(value);
}

}  // namespace kvcache
