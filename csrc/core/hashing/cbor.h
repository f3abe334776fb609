// Heads of CBOR items (RFC 8949), each in its shortest form.
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

// Returns the end of what it wrote.
inline uint8_t* write_head(uint8_t* p, uint8_t major, uint32_t value) {
  if (value < 24) {
    *p++ = major | static_cast<uint8_t>(value);
    return p;
  }
  if (value <= 0xFF) {
    *p++ = major | 24;
    *p++ = static_cast<uint8_t>(value);
    return p;
  }
  if (value <= 0xFFFF) {
    *p++ = major | 25;
    const uint16_t big_endian = __builtin_bswap16(static_cast<uint16_t>(value));
    std::memcpy(p, &big_endian, 2);
    return p + 2;
  }
  *p++ = major | 26;
  const uint32_t big_endian = __builtin_bswap32(value);
  std::memcpy(p, &big_endian, 4);
  return p + 4;
}

inline void append_head(std::string* out, uint8_t major, uint32_t value) {
  uint8_t head[kMaxHeadBytes];
  const uint8_t* end = write_head(head, major, value);
  out->append(reinterpret_cast<const char*>(head), static_cast<size_t>(end - head));
}

// An integer from -2**31 to 2**32 - 1.
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
