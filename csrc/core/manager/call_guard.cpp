#include "core/manager/call_guard.h"

#include <sstream>
#include <stdexcept>

namespace kvcache {

void CallGuard::check_caller() {
  if (owner_ == std::thread::id()) owner_ = std::this_thread::get_id();
  check_reader();
}

void CallGuard::check_reader() const {
  const std::thread::id caller = std::this_thread::get_id();
  if (owner_ != std::thread::id() && owner_ != caller) {
    std::ostringstream text;
    text << "called from thread " << caller << ", but the manager belongs to thread " << owner_
         << ", which used it first: call it from one thread";
    throw std::runtime_error(text.str());
  }
  if (in_call_) {
    throw std::runtime_error(
        "called while another call of this manager has not returned (from within the SHA-256 "
        "fallback, or an attention kind?): expected one call at a time");
  }
  soundness_.check();
}

}  // namespace kvcache
