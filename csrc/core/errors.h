// SPDX-License-Identifier: Apache-2.0
// Errors about arguments and broken invariants, and limits on values from callers.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace kvcache {

// Returns these texts and numbers as one text.
template <class... Parts>
std::string joined(const Parts&... parts) {
  std::string message;
  const auto add = [&message](const auto& part) {
    if constexpr (std::is_arithmetic_v<std::decay_t<decltype(part)>>) {
      message += std::to_string(part);
    } else {
      message += part;
    }
  };
  (add(parts), ...);
  return message;
}

// Throws std::invalid_argument. The message consists of these texts and numbers.
template <class... Parts>
[[noreturn, gnu::cold, gnu::noinline]] void throw_invalid(Parts... parts) {
  throw std::invalid_argument(joined(parts...));
}

// Numbers of tokens, blocks and rows are at most 2**31 - 1, because ids are int32 and int64
// arithmetic on such numbers cannot overflow.
inline constexpr int64_t kMaxSize = INT32_MAX;

// Returns the value, or throws std::invalid_argument that names it. `note` is appended to the
// expected range.
inline int64_t checked_size(const char* name, int64_t value, int64_t least, const char* note = "") {
  if (value >= least && value <= kMaxSize) return value;
  throw_invalid(name, " is ", value, ": expected ", least, " to ", kMaxSize, note);
}

// For checks of invariants. Throws std::logic_error with this message unless `ok`.
template <class... Parts>
void require(bool ok, const Parts&... parts) {
  if (!ok) throw std::logic_error(joined(parts...));
}

}  // namespace kvcache
