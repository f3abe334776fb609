// SPDX-License-Identifier: Apache-2.0
// Records whether an object is consistent, or broken because a call failed during its changes.
//
// A call first checks its arguments and prepares everything that may fail. From the first change
// on, the call holds a Change object. If an exception, such as an out-of-memory error, ends the
// call before the Change is complete, the object is broken. Every later call reports this and its
// cause, and a broken object can only be destroyed.
#pragma once

#include <exception>
#include <stdexcept>
#include <string>

namespace kvcache {

class Soundness {
 public:
  explicit Soundness(const char* object) : object_(object) {}

  // Spans a call from its first change to its last. Changes may be nested.
  class Change {
   public:
    // Throws the errors of `check`.
    Change(Soundness* soundness, const char* call)
        : soundness_(soundness), call_(call), num_exceptions_(std::uncaught_exceptions()) {
      soundness->check();
    }
    ~Change() {
      if (std::uncaught_exceptions() > num_exceptions_) soundness_->broken_by_ = call_;
    }
    Change(const Change&) = delete;
    Change& operator=(const Change&) = delete;

   private:
    Soundness* soundness_;
    const char* call_;
    int num_exceptions_;
  };

  // Sets the cause that is reported if the exception that is about to be thrown breaks the object.
  // Otherwise, the cause is that memory ran out.
  void blame(const char* cause) { cause_ = cause; }

  bool is_broken() const { return broken_by_ != nullptr; }
  // Throws std::runtime_error if the object is broken.
  void check() const {
    if (is_broken()) fail();
  }

 private:
  [[noreturn]] void fail() const {
    throw std::runtime_error(std::string("the ") + object_ + " is broken: " + cause_ + " within `" +
                             broken_by_ + "`, which had partially changed it: create a new one");
  }

  const char* object_;
  const char* cause_ = "memory ran out";
  const char* broken_by_ = nullptr;
};

}  // namespace kvcache
