// SPDX-License-Identifier: Apache-2.0
// Switches between stacks. Uses assembly on x86-64, and ucontext on other CPUs or with
// -DKVCACHE_EMUL_UCONTEXT. ucontext's swapcontext is 20 times slower, because it makes two system
// calls to set the signal mask.
#pragma once

#include <cstddef>

#if defined(__x86_64__) && !defined(KVCACHE_EMUL_UCONTEXT)

// Saves the callee-saved registers and the stack pointer, and loads those of the other side. The
// function is weak and comdat, because every source file has a copy and the linker keeps one of
// them. With -flto, all copies are in the same assembly file, so .ifndef is needed.
extern "C" __attribute__((visibility("hidden"))) void kv_emul_switch(void** save_sp, void* load_sp);
asm(R"(
  .ifndef kv_emul_switch
  .pushsection .text.kv_emul_switch,"axG",@progbits,kv_emul_switch,comdat
  .weak kv_emul_switch
  .hidden kv_emul_switch
  .type kv_emul_switch,@function
kv_emul_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size kv_emul_switch, .-kv_emul_switch
  .popsection
  .endif
)");

namespace emul {

struct Context {
  void* sp = nullptr;
};

// Prepares the stack for kv_emul_switch: six registers, followed by `entry` as the return address.
// The last slot is the return address of `entry` itself, which is null, so that backtraces end
// there.
inline void make_context(Context& context, char* stack, size_t stack_bytes, void (*entry)()) {
  constexpr int kSlots = 8;
  void** frame = reinterpret_cast<void**>(stack + stack_bytes) - kSlots;
  for (int i = 0; i < kSlots; ++i) frame[i] = nullptr;
  frame[6] = reinterpret_cast<void*>(entry);
  context.sp = frame;
}

inline void switch_context(Context& from, Context& to) { kv_emul_switch(&from.sp, to.sp); }

}  // namespace emul

#else

#include <ucontext.h>

namespace emul {

struct Context {
  ucontext_t ucontext;
};

inline void make_context(Context& context, char* stack, size_t stack_bytes, void (*entry)()) {
  getcontext(&context.ucontext);
  context.ucontext.uc_stack.ss_sp = stack;
  context.ucontext.uc_stack.ss_size = stack_bytes;
  context.ucontext.uc_link = nullptr;  // entry never returns
  makecontext(&context.ucontext, entry, 0);
}

inline void switch_context(Context& from, Context& to) {
  swapcontext(&from.ucontext, &to.ucontext);
}

}  // namespace emul

#endif
