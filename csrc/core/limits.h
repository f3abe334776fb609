// SPDX-License-Identifier: Apache-2.0
// Limits on values from callers. Numbers of tokens, blocks and rows are at most 2**31 - 1, because
// ids are int32 and int64 arithmetic on such numbers cannot overflow.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace kvcache {

inline constexpr int64_t kMaxSize = INT32_MAX;

[[noreturn]] inline void fail_size(const char* name, int64_t value, int64_t least,
                                   const char* note) {
  throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) + ": expected " +
                              std::to_string(least) + " to " + std::to_string(kMaxSize) + note);
}

// Returns the value, or throws std::invalid_argument that names it. `note` is appended to the
// expected range.
inline int64_t checked_size(const char* name, int64_t value, int64_t least, const char* note = "") {
  if (value < least || value > kMaxSize) fail_size(name, value, least, note);
  return value;
}

}  // namespace kvcache
