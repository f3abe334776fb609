// Streams as queues of tasks that run late: when a caller waits, now and then while other calls are
// made, and from a thread of the runtime when no call comes. The seed decides the order, within
// what streams and events allow.
//
// Invariants: a task runs after those before it in its stream and after all in `after`, which were
// submitted earlier, so some task can always run while one is left. Callers hold the runtime's
// lock.
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

// The end of a task: what events record and others wait for.
struct Completion {
  Stream* stream;
  bool reached = false;
  double time_ms = 0;
};
using CompletionPtr = std::shared_ptr<Completion>;
using Work = std::function<void()>;

struct Task {
  Work work;            // none: a mark, or a pause
  double pause_ms = 0;  // the stream stands still so long, by the host's clock
  std::vector<CompletionPtr> after;
  CompletionPtr done;
  double until_ms = 0;  // the end of a pause that has begun
};

struct Stream {
  unsigned flags = 0;  // cudaStreamNonBlocking: does not wait for the null stream, nor it for this
  int priority = 0;    // recorded, without effect: any order of ready tasks is legal
  std::deque<Task> tasks;
  CompletionPtr last;               // of the task submitted last
  Capture* capture = nullptr;       // under way in this stream
  std::vector<int> capture_leaves;  // nodes of its graph that the next one depends on
  bool is_null() const;
  bool is_blocking() const { return (flags & cudaStreamNonBlocking) == 0; }
};

Stream& null_stream();
// The stream of a handle; nullptr for one that was destroyed or never made.
Stream* stream_of(cudaStream_t handle);
Stream* create_stream(unsigned flags, int priority);
void destroy_stream(Stream* stream);  // what it holds still runs
const std::vector<Stream*>& all_streams();

// Appends to the stream; the work runs at some later time, at the latest when something waits.
CompletionPtr submit(Stream& stream, Work work, std::vector<CompletionPtr> after = {});

// Appends a pause. Other streams go on, and so does the host unless it waits.
CompletionPtr submit_pause(Stream& stream, double milliseconds);

void run_until(const CompletionPtr& done);
void drain(Stream& stream);
void drain_all();
// A few tasks of any streams, or none: calls of the runtime let time pass.
void let_time_pass();
uint64_t random_below(uint64_t n);
long num_tasks_run();

}  // namespace kvcache::gpuless
