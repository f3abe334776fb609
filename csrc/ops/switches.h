// Switches: environment variables that are on or off.
#pragma once

#include <cctype>
#include <cstdlib>
#include <string>

namespace kvcache {

// Whether a variable is switched on; `otherwise` where it is unset or empty. 0, false, off and no,
// in upper or lower case, switch it off. Any other value switches it on.
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
