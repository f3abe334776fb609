// SPDX-License-Identifier: Apache-2.0
// Reads boolean environment variables.
#pragma once

#include <cctype>
#include <cstdlib>
#include <string>

namespace kvcache {

// Returns whether a variable is on, or `otherwise` if the variable is unset or empty. The values 0,
// false, off and no, in upper or lower case, mean off. Any other value means on.
inline bool switched_on(const char* name, bool otherwise = false) {
  const char* value = std::getenv(name);
  if (value == nullptr || value[0] == '\0') return otherwise;
  std::string text;
  for (const char* c = value; *c != '\0'; ++c) {
    text += static_cast<char>(std::tolower(static_cast<unsigned char>(*c)));
  }
  return text[0] != '0' && text != "false" && text != "off" && text != "no";
}

}  // namespace kvcache
