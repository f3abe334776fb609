#include "core/block_hash.h"

#include <algorithm>
#include <stdexcept>

#include "core/sha256.h"

namespace kvcache {

namespace {

enum CborMajor : uint8_t { kUnsigned = 0 << 5, kBytes = 2 << 5, kText = 3 << 5, kArray = 4 << 5 };
constexpr uint8_t kCborNull = 0xF6;
constexpr int64_t kMaxHeadBytes = 5;  // one byte, and a value of up to 32 bits

// Head of a CBOR item, shortest form, big-endian. Returns the end of what it wrote.
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

}  // namespace

Hash hash_seed(std::string_view seed) {
  std::vector<uint8_t> buffer(seed.size() + kMaxHeadBytes);
  uint8_t* p = write_head(buffer.data(), kText, static_cast<uint32_t>(seed.size()));
  p = std::copy(seed.begin(), seed.end(), p);
  Hash out;
  sha256(buffer.data(), static_cast<size_t>(p - buffer.data()), out.bytes);
  return out;
}

Hash BlockHasher::hash(const Hash& parent, const int32_t* tokens, int64_t num_tokens,
                       std::string_view extra) {
  const size_t capacity =
      static_cast<size_t>(num_tokens) * kMaxHeadBytes + sizeof(Hash) + extra.size() + 16;
  if (buffer_.size() < capacity) buffer_.resize(capacity);
  uint8_t* p = buffer_.data();
  p = write_head(p, kArray, 3);
  p = write_head(p, kBytes, sizeof(Hash));
  std::memcpy(p, parent.bytes, sizeof(Hash));
  p = write_head(p + sizeof(Hash), kArray, static_cast<uint32_t>(num_tokens));
  int32_t sign = 0;
  for (int64_t i = 0; i < num_tokens; ++i) {
    sign |= tokens[i];
    p = write_head(p, kUnsigned, static_cast<uint32_t>(tokens[i]));
  }
  if (sign < 0) {
    const int32_t* bad = std::find_if(tokens, tokens + num_tokens, [](int32_t t) { return t < 0; });
    throw std::invalid_argument("token_ids holds " + std::to_string(*bad) +
                                ": expected 0 to 2147483647");
  }
  if (extra.empty()) {
    *p++ = kCborNull;
  } else {
    p = std::copy(extra.begin(), extra.end(), p);
  }
  Hash out;
  sha256(buffer_.data(), static_cast<size_t>(p - buffer_.data()), out.bytes);
  return out;
}

}  // namespace kvcache
