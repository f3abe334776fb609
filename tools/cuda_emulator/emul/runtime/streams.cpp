// SPDX-License-Identifier: Apache-2.0
#include "emul/runtime/streams.h"

#include <time.h>

#include <algorithm>
#include <chrono>
#include <random>
#include <thread>

#include "emul/runtime/api.h"
#include "emul/runtime/settings.h"

namespace kvcache::gpuless {
namespace {

// A device makes progress without host calls, so tasks also run after this time without a call.
constexpr auto kQuiet = std::chrono::milliseconds(20);

std::vector<Stream*>& streams() {
  static auto* const all = new std::vector<Stream*>{&null_stream()};
  return *all;
}

long num_submitted = 0, num_run = 0;

double now_ms() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return double(t.tv_sec) * 1e3 + double(t.tv_nsec) / 1e6;
}

const CompletionPtr* unreached(const Task& task) {
  for (const CompletionPtr& c : task.after) {
    if (!c->reached) return &c;
  }
  return nullptr;
}

void run_first(Stream& stream) {
  Task task = std::move(stream.tasks.front());
  stream.tasks.pop_front();
  if (task.work && sticky_error() == cudaSuccess) task.work();
  task.done->reached = true;
  task.done->time_ms = now_ms();
  ++num_run;
}

// Returns whether the task is a pause in progress. If the task is a pause whose dependencies are
// met, starts it.
bool pauses(Task& task) {
  if (task.pause_ms == 0) return false;
  if (task.until_ms == 0) task.until_ms = now_ms() + task.pause_ms;
  return now_ms() < task.until_ms;
}

// kNothingYet means that no task is ready, but a stream is pausing.
enum class Ran { kOne, kNothing, kNothingYet };

Ran run_any() {
  std::vector<Stream*> ready;
  bool pausing = false;
  for (Stream* s : streams()) {
    if (s->tasks.empty() || unreached(s->tasks.front()) != nullptr) continue;
    if (pauses(s->tasks.front())) {
      pausing = true;
    } else {
      ready.push_back(s);
    }
  }
  if (ready.empty()) return pausing ? Ran::kNothingYet : Ran::kNothing;
  run_first(*ready[random_below(ready.size())]);
  return Ran::kOne;
}

void nap() { std::this_thread::sleep_for(std::chrono::microseconds(200)); }

// Runs one task on which `done` depends: the first task in its stream, or a task that the first
// task waits for.
void run_toward(const CompletionPtr& done) {
  Completion* needed = done.get();
  while (const CompletionPtr* earlier = unreached(needed->stream->tasks.front())) {
    needed = earlier->get();
  }
  if (pauses(needed->stream->tasks.front())) {
    nap();
  } else {
    run_first(*needed->stream);
  }
}

void run_when_quiet() {
  long seen = 0;
  for (;;) {
    std::this_thread::sleep_for(kQuiet);
    const std::lock_guard<std::recursive_mutex> lock(runtime_mutex());
    if (seen == num_submitted + num_run) run_any();
    seen = num_submitted + num_run;
  }
}

}  // namespace

bool Stream::is_null() const { return this == &null_stream(); }

Stream& null_stream() {
  static auto* const stream = new Stream;
  return *stream;
}

Stream* stream_of(cudaStream_t handle) {
  if (handle == nullptr || handle == cudaStreamLegacy) return &null_stream();
  auto* const stream = reinterpret_cast<Stream*>(handle);
  const auto& all = streams();
  return std::find(all.begin(), all.end(), stream) == all.end() ? nullptr : stream;
}

Stream* create_stream(unsigned flags, int priority) {
  auto* const stream = new Stream;
  stream->flags = flags;
  stream->priority = priority;
  streams().push_back(stream);
  return stream;
}

// The object is kept, because completions point to it.
void destroy_stream(Stream* stream) {
  drain(*stream);
  auto& all = streams();
  all.erase(std::find(all.begin(), all.end(), stream));
}

const std::vector<Stream*>& all_streams() { return streams(); }

namespace {

CompletionPtr append(Stream& stream, Task task) {
  static const bool device_thread = (std::thread(run_when_quiet).detach(), true);
  (void)device_thread;
  if (stream.is_null()) {
    for (const Stream* s : streams()) {
      if (s->is_blocking() && s->last) task.after.push_back(s->last);
    }
  } else if (stream.is_blocking() && null_stream().last) {
    task.after.push_back(null_stream().last);
  }
  auto done = std::make_shared<Completion>();
  done->stream = &stream;
  task.done = done;
  stream.tasks.push_back(std::move(task));
  stream.last = done;
  ++num_submitted;
  if (settings().late) {
    let_time_pass();
  } else {
    run_until(done);
  }
  return done;
}

}  // namespace

CompletionPtr submit(Stream& stream, Work work, std::vector<CompletionPtr> after) {
  Task task;
  task.work = std::move(work);
  task.after = std::move(after);
  return append(stream, std::move(task));
}

CompletionPtr submit_pause(Stream& stream, double milliseconds) {
  Task task;
  task.pause_ms = milliseconds;
  return append(stream, std::move(task));
}

void run_until(const CompletionPtr& done) {
  while (!done->reached) {
    if (random_below(4) == 0) {
      run_any();  // other streams also make progress
    } else {
      run_toward(done);
    }
  }
}

void drain(Stream& stream) {
  if (stream.last) run_until(stream.last);
}

void drain_all() {
  for (Ran ran = run_any(); ran != Ran::kNothing; ran = run_any()) {
    if (ran == Ran::kNothingYet) nap();
  }
}

void let_time_pass() {
  if (random_below(4) != 0) return;
  for (uint64_t n = random_below(4); n > 0 && run_any() == Ran::kOne; --n) {
  }
}

uint64_t random_below(uint64_t n) {
  static auto* const random = new std::mt19937_64(settings().seed);
  return (*random)() % n;
}

long num_tasks_run() { return num_run; }

}  // namespace kvcache::gpuless
