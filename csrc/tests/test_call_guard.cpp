#include "core/manager/call_guard.h"

#include <functional>
#include <string>
#include <thread>

#include "tests/check.h"

using namespace kvcache;
namespace {

// The message that the call throws in another thread; empty where it does not throw.
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

TEST(the_first_caller_owns_it) {
  CallGuard guard;
  guard.check_reader();
  CHECK_EQ(elsewhere([&] { guard.check_reader(); }), "");  // no owner yet
  CHECK_EQ(elsewhere([&] { guard.check_caller(); }), "");  // the owner from now on
  CHECK_THROWS(guard.check_caller(), "but the manager belongs to thread ");
  CHECK_THROWS(guard.check_reader(), "called from thread ");
  CHECK_THROWS(CallGuard::Scope(&guard), "called from thread ");
}

TEST(one_call_at_a_time) {
  CallGuard guard;
  {
    const CallGuard::Scope scope(&guard);
    CHECK_THROWS(CallGuard::Scope(&guard), "has not returned");
    CHECK_THROWS(guard.check_reader(), "has not returned");
  }
  const CallGuard::Scope next(&guard);
}

TEST(a_call_that_throws_is_over) {
  CallGuard guard;
  try {
    const CallGuard::Scope scope(&guard);
    throw std::runtime_error("refused");
  } catch (const std::runtime_error&) {
  }
  guard.check_caller();
}

}  // namespace

TEST_MAIN()
