// SPDX-License-Identifier: Apache-2.0
#include "core/manager/call_guard.h"

#include <functional>
#include <new>
#include <string>
#include <thread>

#include "tests/check.h"

using namespace kvcache;
namespace {

// Returns the message of the exception that the call throws in another thread, or an empty string.
std::string elsewhere(const std::function<void()>& call) {
  std::string message;
  std::thread([&] {
    try {
      call();
    } catch (const std::runtime_error& error) {
      message = error.what();
    }
  }).join();
  return message;
}

TEST(the_first_calling_thread_becomes_the_owner) {
  CallGuard guard;
  guard.check_reader();
  CHECK_EQ(elsewhere([&] { guard.check_reader(); }), "");  // there is no owner yet
  CHECK_EQ(elsewhere([&] { guard.check_caller(); }), "");  // this thread becomes the owner
  CHECK_THROWS(guard.check_caller(), "but the manager belongs to thread ");
  CHECK_THROWS(guard.check_reader(), "called from thread ");
  CHECK_THROWS(CallGuard::Scope(&guard), "called from thread ");
}

TEST(an_exception_during_a_change_breaks_the_object) {
  CallGuard guard;
  {
    const Soundness::Change change(&guard.soundness(), "free");
  }
  guard.check_caller();
  try {
    const Soundness::Change outer(&guard.soundness(), "step");
    const Soundness::Change inner(&guard.soundness(), "allocate");
    throw std::bad_alloc();
  } catch (const std::bad_alloc&) {
  }
  CHECK_THROWS(guard.check_caller(), "the manager is broken: memory ran out within `step`");
  CHECK_THROWS(guard.check_reader(), "create a new one");
  CHECK_THROWS(Soundness::Change(&guard.soundness(), "free"), "is broken");
}

TEST(a_change_inside_an_exception_handler_breaks_nothing) {
  CallGuard guard;
  try {
    throw std::bad_alloc();
  } catch (const std::bad_alloc&) {
    const Soundness::Change change(&guard.soundness(), "free");
  }
  guard.check_caller();
}

}  // namespace

TEST_MAIN()
