// SPDX-License-Identifier: Apache-2.0
// Reports misaligned accesses, which GPUs reject and x86 CPUs accept.
//
// With -fsanitize=alignment -fno-sanitize-recover=alignment, the compiler checks every access and
// calls the functions below for misaligned accesses. They replace the sanitizer's runtime library,
// so that the launch ends with an exception and the process continues. Do not link the runtime
// library when using this check.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <stdexcept>
#include <string>
#include <utility>

#include "emul/scheduler.h"

namespace emul {

// The layout that both gcc and clang use.
struct TypeMismatch {
  const char* file;
  uint32_t line, column;
  const struct {
    uint16_t kind, info;
    char name[1];
  }* type;
  uint8_t log2_alignment;
  uint8_t access;
};

inline std::string describe_misaligned(const TypeMismatch& access, uintptr_t address) {
  return "misaligned address at " + std::string(access.file) + ":" + std::to_string(access.line) +
         ": an access to " + access.type->name + " needs " +
         std::to_string(1u << access.log2_alignment) + " bytes, and the address ends in " +
         std::to_string(address % 16);
}

// After this call, objects on the running thread's stack are not destroyed, so the text is freed
// first.
[[noreturn]] inline void report_misaligned(const TypeMismatch& access, uintptr_t address) {
  std::exception_ptr error;
  {
    const std::string text = describe_misaligned(access, address);
    if (!emulator().runs_thread()) {
      std::fprintf(stderr, "%s (outside of a kernel)\n", text.c_str());
      std::abort();
    }
    error = std::make_exception_ptr(std::runtime_error(text));
  }
  emulator().fail(std::move(error));
}

}  // namespace emul

// The function is weak, because every source file has a copy and the linker keeps one of them. It
// is hidden, because a process may contain several emulators, each of which must call its own copy.
// The visibility is set in assembly, because the compiler itself declares the function as visible
// and rejects the attribute.
asm(".hidden __ubsan_handle_type_mismatch_v1_abort");
extern "C" {
[[noreturn]] __attribute__((weak)) void __ubsan_handle_type_mismatch_v1_abort(void* access,
                                                                              void* address) {
  emul::report_misaligned(*static_cast<const emul::TypeMismatch*>(access),
                          reinterpret_cast<uintptr_t>(address));
}
}
