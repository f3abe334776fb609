// SPDX-License-Identifier: Apache-2.0
#pragma once
// A test harness in a single header. A test file contains TEST(name) { ... } bodies and one
// TEST_MAIN(). A failed check throws, so checks also work in functions, lambdas and emulated
// kernels.

#include <cstdio>
#include <cstring>
#include <exception>
#include <sstream>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

namespace kvcache::test {

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

[[noreturn]] inline void fail(const char* file, int line, const std::string& what) {
  throw Failure(std::string(file) + ":" + std::to_string(line) + ": " + what);
}

template <class T, class = void>
struct IsPrintable : std::false_type {};
template <class T>
struct IsPrintable<T, std::void_t<decltype(std::declval<std::ostream&>() << std::declval<T>())>>
    : std::true_type {};

template <class T>
std::string show(const T& value) {
  if constexpr (IsPrintable<const T&>::value) {
    std::ostringstream out;
    out << value;
    return out.str();
  } else {
    return "<not printable>";
  }
}

// Like ==, but compares an int with a size_t by value and without a compiler warning.
template <class A, class B>
bool equal(const A& a, const B& b) {
  if constexpr (std::is_integral_v<A> && std::is_integral_v<B>) {
    if constexpr (std::is_signed_v<A> && !std::is_signed_v<B>) {
      return a >= 0 && std::make_unsigned_t<A>(a) == b;
    } else if constexpr (!std::is_signed_v<A> && std::is_signed_v<B>) {
      return b >= 0 && std::make_unsigned_t<B>(b) == a;
    } else {
      return a == b;
    }
  } else {
    return a == b;
  }
}

template <class A, class B>
void check_eq(const char* file, int line, const char* text, const A& a, const B& b) {
  if (!equal(a, b)) fail(file, line, std::string(text) + ": " + show(a) + " != " + show(b));
}

template <class F>
void check_throws(const char* file, int line, const char* text, const char* substring, F&& call) {
  try {
    call();
  } catch (const std::exception& error) {
    if (std::strstr(error.what(), substring) != nullptr) return;
    fail(file, line,
         std::string(text) + " threw \"" + error.what() + "\", without \"" + substring + "\"");
  }
  fail(file, line, std::string(text) + " did not throw");
}

struct Test {
  const char* name;
  void (*body)();
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

inline bool add(const char* name, void (*body)()) {
  tests().push_back({name, body});
  return true;
}

inline bool passes(const Test& test) {
  try {
    test.body();
    return true;
  } catch (const std::exception& error) {
    std::printf("FAILED %s\n  %s\n", test.name, error.what());
  } catch (...) {
    std::printf("FAILED %s\n  threw something that is not a std::exception\n", test.name);
  }
  return false;
}

// Runs the tests whose names contain the first argument, or all tests. Returns the exit code.
inline int run_all(int argc, char** argv) {
  const char* filter = argc > 1 ? argv[1] : "";
  int num_passed = 0;
  int num_failed = 0;
  for (const Test& test : tests()) {
    if (std::strstr(test.name, filter) == nullptr) continue;
    ++(passes(test) ? num_passed : num_failed);
  }
  std::printf("%d passed, %d failed\n", num_passed, num_failed);
  return num_failed == 0 && num_passed > 0 ? 0 : 1;
}

}  // namespace kvcache::test

#define TEST(name)                                                                                 \
  static void test_##name();                                                                       \
  [[maybe_unused]] static const bool registered_##name = ::kvcache::test::add(#name, test_##name); \
  static void test_##name()

#define TEST_MAIN() \
  int main(int argc, char** argv) { return ::kvcache::test::run_all(argc, argv); }

#define CHECK(condition)                                                            \
  do {                                                                              \
    if (!(condition)) ::kvcache::test::fail(__FILE__, __LINE__, "not " #condition); \
  } while (false)

#define CHECK_EQ(a, b) ::kvcache::test::check_eq(__FILE__, __LINE__, #a " == " #b, (a), (b))

#define CHECK_THROWS(expression, substring)                                   \
  ::kvcache::test::check_throws(__FILE__, __LINE__, #expression, (substring), \
                                [&] { static_cast<void>(expression); })
