// One thread, one call at a time, of a manager that is sound.
//
// A digest or an attention kind that comes from Python may call the manager again, or let another
// thread run, while a call is under way: both are refused by name.
// Invariant: at most one Scope is alive, and it belongs to the owner's thread.
#pragma once

#include <thread>

#include "core/soundness.h"

namespace kvcache {

class CallGuard {
 public:
  // A call that may change something, from its checks to its end.
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

  // Makes the calling thread the owner where there is none. Throws std::runtime_error in any other
  // thread, while a Scope is alive, and where the manager is broken.
  void check_caller() {
    if (owner_ == std::thread::id()) owner_ = std::this_thread::get_id();
    check_reader();
  }

  // The same without making an owner.
  void check_reader() const {
    const bool is_owner = owner_ == std::thread::id() || owner_ == std::this_thread::get_id();
    if (!is_owner || in_call_) fail_caller(is_owner);
    soundness_.check();
  }

  Soundness& soundness() { return soundness_; }
  bool is_broken() const { return soundness_.is_broken(); }
  void check_sound() const { soundness_.check(); }

 private:
  [[noreturn]] void fail_caller(bool is_owner) const;

  Soundness soundness_{"manager"};
  std::thread::id owner_;  // of no thread until the first call
  bool in_call_ = false;
};

}  // namespace kvcache
