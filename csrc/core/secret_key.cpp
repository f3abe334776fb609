// SPDX-License-Identifier: Apache-2.0
#include "core/secret_key.h"

#include <unistd.h>

#include <stdexcept>

#if defined(__APPLE__)
#include <sys/random.h>
#endif

namespace kvcache {

SecretKey SecretKey::drawn() {
  SecretKey key;
  if (getentropy(key.numbers_, sizeof(key.numbers_)) != 0) {
    throw std::runtime_error("getentropy failed: expected 72 random bytes");
  }
  return key;
}

}  // namespace kvcache
