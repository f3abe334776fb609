// SPDX-License-Identifier: Apache-2.0
// Ensures that only one thread uses a manager, with one call at a time, and that the manager is not
// broken.
//
// During a call, a signal handler or an attention kind written in Python may call the manager again
// or let another thread run. Invariant: at most one Scope exists, of the owning thread.
#pragma once

#include <sstream>
#include <stdexcept>
#include <thread>

#include "core/soundness.h"

namespace kvcache {

class CallGuard {
 public:
  // A call that may change the manager, from its checks to its end.
  class Scope {
   public:
    explicit Scope(CallGuard* guard) : guard_(guard) {
      guard->check_caller();
      guard->in_call_ = true;
    }
    ~Scope() { guard_->in_call_ = false; }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    CallGuard* guard_;
  };

  // Makes the calling thread the owner if there is none. Throws std::runtime_error if another
  // thread owns the manager, during another call, or if the manager is broken.
  void check_caller() {
    if (owner_ == std::thread::id()) owner_ = std::this_thread::get_id();
    check_reader();
  }

  // Makes the same checks as check_caller, but does not make the calling thread the owner.
  void check_reader() const {
    const bool is_owner = owner_ == std::thread::id() || owner_ == std::this_thread::get_id();
    if (!is_owner || in_call_) fail_caller(is_owner);
    soundness_.check();
  }

  Soundness& soundness() { return soundness_; }
  bool is_broken() const { return soundness_.is_broken(); }
  void check_sound() const { soundness_.check(); }

 private:
  [[noreturn, gnu::cold, gnu::noinline]] void fail_caller(bool is_owner) const {
    if (is_owner) {
      throw std::runtime_error(
          "called while another call of this manager is in progress (from a signal handler or an "
          "attention kind?): only one call can run at a time");
    }
    std::ostringstream text;
    text << "called from thread " << std::this_thread::get_id()
         << ", but the manager belongs to thread " << owner_
         << ", which used it first: call it from one thread";
    throw std::runtime_error(text.str());
  }

  Soundness soundness_{"manager"};
  std::thread::id owner_;  // no thread until the first call
  bool in_call_ = false;
};

}  // namespace kvcache
