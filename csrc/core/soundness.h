// Whether an object is as its calls have left it, or is broken: a call has failed halfway.
//
// A call first checks, and prepares what may fail. From its first change on it holds a Change: left
// by an exception, which says that memory ran out, the object is broken. Each later call says so; a
// broken object can only be destroyed.
#pragma once

#include <exception>
#include <stdexcept>
#include <string>

namespace kvcache {

class Soundness {
 public:
  explicit Soundness(const char* object) : object_(object) {}

  // What a call changes, from its first change to its last; these may lie within each other.
  class Change {
   public:
    // Throws as `check`.
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

  bool is_broken() const { return broken_by_ != nullptr; }
  // Throws std::runtime_error where the object is broken.
  void check() const {
    if (is_broken()) fail();
  }

 private:
  [[noreturn]] void fail() const {
    throw std::runtime_error(std::string("the ") + object_ + " is broken: memory ran out within `" +
                             broken_by_ + "`, which had changed a part of it: make a new one");
  }

  const char* object_;
  const char* broken_by_ = nullptr;
};

}  // namespace kvcache
