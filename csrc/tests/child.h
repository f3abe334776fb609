// SPDX-License-Identifier: Apache-2.0
// Runs the body of a test in a child process. Each body needs a new process, because the runtime
// reads its settings from the environment only once, sticky errors are permanent, and an access to
// device memory from the host kills the process.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "tests/check.h"

namespace kvcache::test {

struct Ended {
  bool normally;       // whether the body ran to its end without a failure
  std::string output;  // output on stderr
};

using Variables = std::vector<std::pair<const char*, const char*>>;

template <class Body>
Ended run_child(const Variables& variables, Body&& body) {
  int ends[2];
  if (pipe(ends) != 0) throw Failure("pipe failed");
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    dup2(ends[1], STDERR_FILENO);
    close(ends[0]);
    close(ends[1]);
    for (const auto& [name, value] : variables) setenv(name, value, 1);
    int status = 0;
    try {
      body();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s\n", error.what());
      status = 1;
    }
    std::fflush(nullptr);
    _exit(status);
  }
  close(ends[1]);
  Ended ended{};
  char buffer[4096];
  for (ssize_t n; (n = read(ends[0], buffer, sizeof buffer)) > 0;) {
    ended.output.append(buffer, size_t(n));
  }
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  ended.normally = WIFEXITED(status) && WEXITSTATUS(status) == 0;
  return ended;
}

// Checks that the body passes in a child process with these environment variables.
template <class Body>
void in_child(const Variables& variables, Body&& body) {
  const Ended ended = run_child(variables, body);
  if (!ended.normally) throw Failure("in a child process: " + ended.output);
}

// Checks that the process dies after it has printed `text`.
template <class Body>
void dies_saying(const char* text, Body&& body) {
  const Ended ended = run_child({}, body);
  if (ended.normally || ended.output.find(text) == std::string::npos) {
    throw Failure(std::string("expected death with \"") + text + "\", output: " + ended.output);
  }
}

}  // namespace kvcache::test

// A test in a child process, with these environment variables.
#define CHILD_TEST(name, ...)                                            \
  static void child_##name();                                            \
  TEST(name) { ::kvcache::test::in_child({__VA_ARGS__}, child_##name); } \
  static void child_##name()
