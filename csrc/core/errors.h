// SPDX-License-Identifier: Apache-2.0
// Errors about arguments.
#pragma once

#include <stdexcept>
#include <string>
#include <type_traits>

namespace kvcache {

// Throws std::invalid_argument. The message consists of these texts and numbers.
template <class... Parts>
[[noreturn, gnu::cold, gnu::noinline]] void throw_invalid(Parts... parts) {
  std::string message;
  const auto add = [&message](const auto& part) {
    if constexpr (std::is_arithmetic_v<std::decay_t<decltype(part)>>) {
      message += std::to_string(part);
    } else {
      message += part;
    }
  };
  (add(parts), ...);
  throw std::invalid_argument(message);
}

}  // namespace kvcache
