#include "core/hashing/sha256.h"

#include <dlfcn.h>

#include <stdexcept>
#include <utility>

namespace kvcache {

namespace {

// The three-call interface of libcrypto: deprecated since 3.0 in favour of EVP, but present in
// every release, and without EVP's allocation and algorithm look-up per digest, which cost as much
// as the digest of a block itself.
struct LibCrypto {
  const char* name = nullptr;
  int (*init)(void*) = nullptr;
  int (*update)(void*, const void*, size_t) = nullptr;
  int (*final)(unsigned char*, void*) = nullptr;
};

LibCrypto open_libcrypto() {
  for (const char* name :
       {"libcrypto.so.3", "libcrypto.so.1.1", "libcrypto.so", "libcrypto.dylib"}) {
    void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) continue;
    LibCrypto found;
    found.name = name;
    found.init = reinterpret_cast<int (*)(void*)>(dlsym(library, "SHA256_Init"));
    found.update =
        reinterpret_cast<int (*)(void*, const void*, size_t)>(dlsym(library, "SHA256_Update"));
    found.final = reinterpret_cast<int (*)(unsigned char*, void*)>(dlsym(library, "SHA256_Final"));
    if (found.init != nullptr && found.update != nullptr && found.final != nullptr) return found;
    dlclose(library);
  }
  return {};
}

const LibCrypto& libcrypto() {
  static const LibCrypto found = open_libcrypto();
  return found;
}

Sha256Function& fallback() {
  static Sha256Function function;
  return function;
}

bool fallback_forced = false;

}  // namespace

const char* libcrypto_name() { return libcrypto().name; }

void set_sha256_fallback(Sha256Function function, bool force) {
  fallback() = std::move(function);
  fallback_forced = force;
}

void sha256(const uint8_t* data, size_t size, uint8_t* out) {
  const LibCrypto& crypto = libcrypto();
  if (crypto.name != nullptr && !fallback_forced) {
    alignas(16) unsigned char context[256];  // SHA256_CTX is 112 bytes in every release
    crypto.init(context);
    crypto.update(context, data, size);
    crypto.final(out, context);
    return;
  }
  if (!fallback())
    throw std::runtime_error("no libcrypto was found and no SHA-256 fallback is set");
  fallback()(data, size, out);
}

}  // namespace kvcache
