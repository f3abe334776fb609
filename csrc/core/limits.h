// SPDX-License-Identifier: Apache-2.0
// Limits on values from callers. Numbers of tokens, blocks and rows are at most 2**31 - 1, because
// ids are int32 and int64 arithmetic on such numbers cannot overflow.
#pragma once

#include <cstdint>

#include "core/errors.h"

namespace kvcache {

inline constexpr int64_t kMaxSize = INT32_MAX;

// Returns the value, or throws std::invalid_argument that names it. `note` is appended to the
// expected range.
inline int64_t checked_size(const char* name, int64_t value, int64_t least, const char* note = "") {
  if (value >= least && value <= kMaxSize) return value;
  throw_invalid(name, " is ", value, ": expected ", least, " to ", kMaxSize, note);
}

}  // namespace kvcache
