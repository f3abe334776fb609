// SPDX-License-Identifier: Apache-2.0
// The runtime's lock, and its interaction with Python's GIL if an interpreter is running.
#include <dlfcn.h>

#include "emul/runtime/api.h"

namespace kvcache::gpuless {
namespace {

template <class Function>
Function* of_python(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_DEFAULT, name));
}

}  // namespace

// The lock is never destroyed, because other libraries make calls while the process exits.
std::recursive_mutex& runtime_mutex() {
  static auto* const mutex = new std::recursive_mutex;
  return *mutex;
}

RuntimeLock::RuntimeLock() {
  if (runtime_mutex().try_lock()) return;
  static auto* const holds_interpreter = of_python<int()>("PyGILState_Check");
  static auto* const let_go = of_python<void*()>("PyEval_SaveThread");
  static auto* const take_back = of_python<void(void*)>("PyEval_RestoreThread");
  if (holds_interpreter == nullptr || holds_interpreter() == 0) {
    runtime_mutex().lock();
    return;
  }
  void* thread = let_go();
  runtime_mutex().lock();
  take_back(thread);
}

}  // namespace kvcache::gpuless
