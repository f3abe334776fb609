// SPDX-License-Identifier: Apache-2.0
// Streams are queues of tasks, which run as late as possible: when a caller waits, occasionally
// during other calls, and in a thread of the runtime if there are no calls. The seed determines the
// order of tasks, within the constraints of streams and events.
//
// Invariants: a task runs after all earlier tasks in its stream, and after all tasks in `after`,
// which were submitted earlier. Therefore, as long as any task is left, some task can run. Callers
// hold the runtime's lock.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

namespace kvcache::gpuless {

struct Stream;
struct Capture;

// The completion of a task, which events record and other tasks wait for.
struct Completion {
  Stream* stream;
  bool reached = false;
  double time_ms = 0;
};
using CompletionPtr = std::shared_ptr<Completion>;
using Work = std::function<void()>;

struct Task {
  Work work;            // empty: a mark or a pause
  double pause_ms = 0;  // duration of a pause in the stream, by the host's clock
  std::vector<CompletionPtr> after;
  CompletionPtr done;
  double until_ms = 0;  // end of a pause in progress
};

struct Stream {
  unsigned flags = 0;  // cudaStreamNonBlocking: not ordered with the null stream
  int priority = 0;    // has no effect, because any order of ready tasks is valid
  std::deque<Task> tasks;
  CompletionPtr last;               // completion of the most recently submitted task
  Capture* capture = nullptr;       // the capture that this stream is part of
  std::vector<int> capture_leaves;  // graph nodes on which the next node depends
  bool is_null() const;
  bool is_blocking() const { return (flags & cudaStreamNonBlocking) == 0; }
};

Stream& null_stream();
// Returns the stream that belongs to a handle, or nullptr for an invalid or destroyed stream.
Stream* stream_of(cudaStream_t handle);
Stream* create_stream(unsigned flags, int priority);
void destroy_stream(Stream* stream);  // pending tasks in the stream still run
const std::vector<Stream*>& all_streams();

// Appends work to the stream. The work runs at some later time, but at the latest when something
// waits for it.
CompletionPtr submit(Stream& stream, Work work, std::vector<CompletionPtr> after = {});

// Appends a pause to the stream. Other streams continue, and so does the host unless it waits for
// this stream.
CompletionPtr submit_pause(Stream& stream, double milliseconds);

void run_until(const CompletionPtr& done);
void drain(Stream& stream);
void drain_all();
// Runs a few tasks in any streams, or none, to simulate the time that passes during runtime calls.
void let_time_pass();
uint64_t random_below(uint64_t n);
long num_tasks_run();

}  // namespace kvcache::gpuless
