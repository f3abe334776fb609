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

// A device goes on without calls of the host: after so long without one, tasks run anyway.
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

std::vector<Stream*> ready_streams() {
  std::vector<Stream*> ready;
  for (Stream* s : streams()) {
    if (!s->tasks.empty() && unreached(s->tasks.front()) == nullptr) ready.push_back(s);
  }
  return ready;
}

bool run_any() {
  const std::vector<Stream*> ready = ready_streams();
  if (ready.empty()) return false;
  run_first(*ready[random_below(ready.size())]);
  return true;
}

// The task that `done` needs next: the first of its stream, or what that one waits for.
void run_toward(const CompletionPtr& done) {
  Completion* needed = done.get();
  while (const CompletionPtr* earlier = unreached(needed->stream->tasks.front())) {
    needed = earlier->get();
  }
  run_first(*needed->stream);
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

// The object stays: completions point to it.
void destroy_stream(Stream* stream) {
  drain(*stream);
  auto& all = streams();
  all.erase(std::find(all.begin(), all.end(), stream));
}

const std::vector<Stream*>& all_streams() { return streams(); }

CompletionPtr submit(Stream& stream, Work work, std::vector<CompletionPtr> after) {
  static const bool device_thread = (std::thread(run_when_quiet).detach(), true);
  (void)device_thread;
  if (stream.is_null()) {
    for (const Stream* s : streams()) {
      if (s->is_blocking() && s->last) after.push_back(s->last);
    }
  } else if (stream.is_blocking() && null_stream().last) {
    after.push_back(null_stream().last);
  }
  auto done = std::make_shared<Completion>();
  done->stream = &stream;
  stream.tasks.push_back({std::move(work), std::move(after), done});
  stream.last = done;
  ++num_submitted;
  if (settings().late) {
    let_time_pass();
  } else {
    run_until(done);
  }
  return done;
}

void run_until(const CompletionPtr& done) {
  while (!done->reached) {
    if (random_below(4) == 0) {
      run_any();  // others go on too
    } else {
      run_toward(done);
    }
  }
}

void drain(Stream& stream) {
  if (stream.last) run_until(stream.last);
}

void drain_all() {
  while (run_any()) {
  }
}

void let_time_pass() {
  if (random_below(4) != 0) return;
  for (uint64_t n = random_below(4); n > 0 && run_any(); --n) {
  }
}

uint64_t random_below(uint64_t n) {
  static auto* const random = new std::mt19937_64(settings().seed);
  return (*random)() % n;
}

long num_tasks_run() { return num_run; }

}  // namespace kvcache::gpuless
