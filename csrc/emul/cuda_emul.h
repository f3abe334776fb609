#pragma once
// Compiles the project's .cu sources as plain C++17 (g++ -x c++ -DKVCACHE_EMUL) and runs their
// kernels on the CPU, so that CI without a GPU executes the code that ships.
//
// Blocks run one after the other. Threads of a block are cooperative: a thread runs until it
// waits (barrier, shuffle, vote) or returns. A fiber, which is a stack of its own, takes one thread
// after the other as long as none of them waits; a thread that waits keeps its fiber and the
// remaining threads go on another one. So a kernel without barriers costs a function call per
// thread, and a thread that waits costs one switch away and one back. Measured (g++ 12 -O2, a
// shared x86-64 machine), per thread: 2-5 ns without a barrier, 55 ns with one __syncthreads, 240
// ns for a warp sum of five shuffles and a __syncthreads.
//
// Reported, not hung: a barrier or warp operation that can not complete is a std::logic_error with
// the words "barrier deadlock", the block, and how many threads wait at which source line.
//
// Not supported: asynchronous copies, tensor maps, clusters, cooperative groups, textures, launches
// from kernels, __constant__ memory that is filled at run time, __noinline__ (libstdc++ uses that
// word), ThreadSanitizer, and spinning on a value that another thread or block writes later (it
// never gets to run). A kernel must not wait inside a catch block. When one thread throws, the
// other threads of its block are dropped where they stand: their destructors do not run.

#if defined(__CUDACC__)
#error "cuda_emul.h replaces the CUDA headers; nvcc builds must not include it"
#endif

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#define KV_EMUL_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define KV_EMUL_ASAN 1
#endif
#endif
#if defined(KV_EMUL_ASAN)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

// The hand-written stack switch; -DKVCACHE_EMUL_UCONTEXT chooses the portable one (20 times
// slower).
#if defined(__x86_64__) && defined(__ELF__) && !defined(KVCACHE_EMUL_UCONTEXT)
#define KV_EMUL_FAST_SWITCH 1
#else
#include <ucontext.h>
#endif

// Kernels are full of `#pragma unroll`, which g++ does not know. Before g++ 13 this line has no
// effect in C++ and the build needs -Wno-unknown-pragmas.
#pragma GCC diagnostic ignored "-Wunknown-pragmas"

// ---------------------------------------------------------------------------------------------
// Keywords. __restrict__ is left alone: g++ knows it.

#define __global__
#define __device__
#define __host__
#define __forceinline__ __inline__ __attribute__((always_inline))
#define __launch_bounds__(...)
#define __constant__ static const

// Blocks of one launch run one after the other, so one copy per OS thread is enough. It can not be
// poisoned between blocks (nothing knows where it is), and it is beyond AddressSanitizer: only
// -fsanitize=bounds sees an index outside of it. Dynamic shared memory has both checks.
#define __shared__ static thread_local

// Dynamic shared memory; under nvcc the project defines it as `extern __shared__ T name[]`.
#define KV_DYN_SHARED(T, name) T* name = ::emul::dynamic_shared<T>()

// ---------------------------------------------------------------------------------------------
// Built-in types and variables.

struct int2 {
  int x, y;
} __attribute__((aligned(8)));
struct int4 {
  int x, y, z, w;
} __attribute__((aligned(16)));
struct uint2 {
  unsigned x, y;
} __attribute__((aligned(8)));
struct uint3 {
  unsigned x, y, z;
};
struct uint4 {
  unsigned x, y, z, w;
} __attribute__((aligned(16)));
struct float2 {
  float x, y;
} __attribute__((aligned(8)));
struct float4 {
  float x, y, z, w;
} __attribute__((aligned(16)));

inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint3 make_uint3(unsigned x, unsigned y, unsigned z) { return {x, y, z}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned nx = 1, unsigned ny = 1, unsigned nz = 1) : x(nx), y(ny), z(nz) {}
  constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
};

inline thread_local uint3 threadIdx{0, 0, 0};
inline thread_local uint3 blockIdx{0, 0, 0};
inline thread_local dim3 blockDim;
inline thread_local dim3 gridDim;
inline constexpr int warpSize = 32;

// ---------------------------------------------------------------------------------------------
// Runtime API, as far as the launch code needs it. "Device" memory is host memory.

using cudaStream_t = void*;

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorMemoryAllocation = 2 };

enum cudaMemcpyKind {
  cudaMemcpyHostToHost = 0,
  cudaMemcpyHostToDevice = 1,
  cudaMemcpyDeviceToHost = 2,
  cudaMemcpyDeviceToDevice = 3,
  cudaMemcpyDefault = 4
};

inline const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorMemoryAllocation:
      return "out of memory";
  }
  return "unrecognized error code";
}

template <class T>
cudaError_t cudaMalloc(T** out, size_t bytes) {
  // CUDA aligns to 256; the size stays exact so that AddressSanitizer sees the first byte past it.
  void* memory = nullptr;
  if (bytes > 0 && posix_memalign(&memory, 256, bytes) != 0) return cudaErrorMemoryAllocation;
  *out = static_cast<T*>(memory);
  return cudaSuccess;
}

inline cudaError_t cudaFree(void* memory) {
  std::free(memory);
  return cudaSuccess;
}

inline cudaError_t cudaMemcpyAsync(void* dst, const void* src, size_t bytes, cudaMemcpyKind,
                                   cudaStream_t = nullptr) {
  if (bytes > 0) std::memcpy(dst, src, bytes);
  return cudaSuccess;
}

inline cudaError_t cudaMemsetAsync(void* dst, int value, size_t bytes, cudaStream_t = nullptr) {
  if (bytes > 0) std::memset(dst, value, bytes);
  return cudaSuccess;
}

inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }

// ---------------------------------------------------------------------------------------------
// Switching between stacks.

#if defined(KV_EMUL_FAST_SWITCH)
// Saves the callee-saved registers and the stack pointer, loads the other side's. swapcontext does
// the same and two system calls for the signal mask, which is most of its time. Weak and comdat:
// every source file that includes this header brings a copy, the linker keeps one. With -flto the
// copies meet in one assembly file; hence .ifndef.
extern "C" __attribute__((visibility("hidden"))) void kv_emul_switch(void** save_sp, void* load_sp);
asm(R"(
  .ifndef kv_emul_switch
  .pushsection .text.kv_emul_switch,"axG",@progbits,kv_emul_switch,comdat
  .weak kv_emul_switch
  .hidden kv_emul_switch
  .type kv_emul_switch,@function
kv_emul_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size kv_emul_switch, .-kv_emul_switch
  .popsection
  .endif
)");
#endif

namespace emul {

#if defined(KV_EMUL_FAST_SWITCH)
struct Context {
  void* sp = nullptr;
};

// Lays out what kv_emul_switch pops: six registers, then entry as the address to return to. The
// last slot is entry's own return address; null there ends backtraces.
inline void make_context(Context& context, char* stack, size_t stack_bytes, void (*entry)()) {
  constexpr int kSlots = 8;
  void** frame = reinterpret_cast<void**>(stack + stack_bytes) - kSlots;
  for (int i = 0; i < kSlots; ++i) frame[i] = nullptr;
  frame[6] = reinterpret_cast<void*>(entry);
  context.sp = frame;
}

inline void switch_context(Context& from, Context& to) { kv_emul_switch(&from.sp, to.sp); }
#else
struct Context {
  ucontext_t ucontext;
};

inline void make_context(Context& context, char* stack, size_t stack_bytes, void (*entry)()) {
  getcontext(&context.ucontext);
  context.ucontext.uc_stack.ss_sp = stack;
  context.ucontext.uc_stack.ss_size = stack_bytes;
  context.ucontext.uc_link = nullptr;  // entry never returns
  makecontext(&context.ucontext, entry, 0);
}

inline void switch_context(Context& from, Context& to) {
  swapcontext(&from.ucontext, &to.ucontext);
}
#endif

// AddressSanitizer has to be told which stack runs: before a switch where it goes to, after a
// switch that it arrived (and it answers where it came from).
#if defined(KV_EMUL_ASAN)
inline void asan_leave(void** save, const void* to_stack, size_t to_bytes) {
  __sanitizer_start_switch_fiber(save, to_stack, to_bytes);
}
inline void asan_arrive(void* saved, const void** from_stack, size_t* from_bytes) {
  __sanitizer_finish_switch_fiber(saved, from_stack, from_bytes);
}
inline void asan_unpoison(void* stack, size_t bytes) {
  __asan_unpoison_memory_region(stack, bytes);
}
#else
inline void asan_leave(void**, const void*, size_t) {}
inline void asan_arrive(void*, const void**, size_t*) {}
inline void asan_unpoison(void*, size_t) {}
#endif

// One side of a switch: the scheduler (the stack of launch()'s caller) or a fiber.
struct Side {
  Context context;
  const void* stack = nullptr;
  size_t stack_bytes = 0;
  void* asan_saved = nullptr;
};

inline void switch_sides(Side& from, Side& to) {
  asan_leave(&from.asan_saved, to.stack, to.stack_bytes);
  switch_context(from.context, to.context);
  asan_arrive(from.asan_saved, nullptr, nullptr);
}

// A stack below which a page is left unmapped: a kernel that needs more faults there instead of
// writing over its neighbour. Pages are only committed when touched.
class FiberStack {
 public:
#if defined(KV_EMUL_ASAN)
  static constexpr size_t kBytes = 256 * 1024;  // instrumented frames are several times larger
#else
  static constexpr size_t kBytes = 64 * 1024;
#endif

  FiberStack() : guard_bytes_(size_t(sysconf(_SC_PAGESIZE))) {
    void* memory = mmap(nullptr, guard_bytes_ + kBytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    mapping_ = static_cast<char*>(memory);
    mprotect(mapping_, guard_bytes_, PROT_NONE);
  }
  ~FiberStack() {
    asan_unpoison(data(), kBytes);  // whoever gets this address range next starts clean
    munmap(mapping_, guard_bytes_ + kBytes);
  }
  FiberStack(const FiberStack&) = delete;
  FiberStack& operator=(const FiberStack&) = delete;

  char* data() const { return mapping_ + guard_bytes_; }

 private:
  size_t guard_bytes_;
  char* mapping_;
};

// Runs entry on a stack of its own; entry never returns.
class Fiber : public Side {
 public:
  explicit Fiber(void (*entry)()) : entry_(entry) {
    stack = memory_.data();
    stack_bytes = FiberStack::kBytes;
    restart();
  }

  // Forgets whatever runs on the stack; the next switch begins at entry.
  void restart() {
    asan_unpoison(memory_.data(), FiberStack::kBytes);
    asan_saved = nullptr;
    make_context(context, memory_.data(), FiberStack::kBytes, entry_);
  }

 private:
  FiberStack memory_;
  void (*entry_)();
};

// ---------------------------------------------------------------------------------------------
// Threads and what they wait for.

// A place in a kernel's source. As a default argument, here() is the line of the caller.
struct Site {
  const char* file = "";
  int line = 0;

  static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return Site{file, line};
  }
};

inline bool operator==(const Site& a, const Site& b) {
  return a.line == b.line && (a.file == b.file || std::strcmp(a.file, b.file) == 0);
}

enum class Wait { kNone, kSyncThreads, kSyncThreadsVote, kSyncWarp, kShuffle, kVote, kExited };

inline bool is_block_wait(Wait wait) {
  return wait == Wait::kSyncThreads || wait == Wait::kSyncThreadsVote;
}

inline bool is_warp_wait(Wait wait) {
  return wait == Wait::kSyncWarp || wait == Wait::kShuffle || wait == Wait::kVote;
}

inline const char* wait_name(Wait wait) {
  switch (wait) {
    case Wait::kNone:
      return "nothing";
    case Wait::kSyncThreads:
      return "__syncthreads";
    case Wait::kSyncThreadsVote:
      return "__syncthreads_count/or/and";
    case Wait::kSyncWarp:
      return "__syncwarp";
    case Wait::kShuffle:
      return "__shfl_*sync";
    case Wait::kVote:
      return "__ballot/any/all_sync";
    case Wait::kExited:
      return "exit";
  }
  return "?";
}

inline std::string to_string(const uint3& v) {
  return "(" + std::to_string(v.x) + "," + std::to_string(v.y) + "," + std::to_string(v.z) + ")";
}

inline constexpr unsigned kWarpLanes = 32;
inline constexpr unsigned kFullMask = 0xffffffffu;

// One CUDA thread of the running block.
struct Thread {
  uint3 index;
  unsigned linear;        // x + y * blockDim.x + z * blockDim.x * blockDim.y
  Wait wait;              // kNone: may run
  unsigned mask;          // lanes named by the warp operation it waits in
  Site site;              // where it waits
  Fiber* fiber;           // whose stack it waits on
  uint64_t offered;       // its operand of a shuffle or vote
  uint64_t published;     // the same once the operation completed: the others read this
  unsigned participants;  // lanes that took part in the last completed warp operation

  unsigned lane() const { return linear % kWarpLanes; }
};

// How a __syncthreads_* vote went.
struct BlockVote {
  int num_true = 0;
  int num_threads = 0;
};

// ---------------------------------------------------------------------------------------------
// The emulator of one OS thread: runs one grid at a time.

class Emulator {
 public:
  using Call = void (*)(void*);

  // Calls call(argument) once per thread of the grid. Dimensions were checked.
  void run_grid(dim3 grid, dim3 block, size_t dynamic_shared_bytes, Call call, void* argument) {
    if (running_) throw std::logic_error("emul::launch: a kernel can not launch a kernel");
    const RunningScope scope(*this);
    call_ = call;
    argument_ = argument;
    gridDim = grid;
    blockDim = block;
    allocate_dynamic_shared(dynamic_shared_bytes);
    number_threads(block);
    for (unsigned z = 0; z < grid.z; ++z) {
      for (unsigned y = 0; y < grid.y; ++y) {
        for (unsigned x = 0; x < grid.x; ++x) run_block({x, y, z});
      }
    }
  }

  // The following are for the running thread.

  Thread& current() { return *current_; }
  char* dynamic_shared() { return dynamic_shared_.get(); }

  BlockVote sync_block(Wait wait, bool predicate, Site site) {
    current_->offered = predicate;
    suspend(wait, kFullMask, site);
    return block_vote_;
  }

  // Waits for the lanes in mask that have not exited; offered is what they may read() afterwards.
  void sync_warp(Wait wait, unsigned mask, uint64_t offered, Site site) {
    if ((mask >> current_->lane() & 1) == 0) {
      throw std::logic_error(std::string(wait_name(wait)) + " at " + place(site) + ": lane " +
                             std::to_string(current_->lane()) + " is not in its own mask");
    }
    current_->offered = offered;
    suspend(wait, mask, site);
  }

  // What another lane offered in the warp operation that just completed.
  uint64_t read(unsigned lane) {
    // CUDA leaves the value undefined; poison makes a kernel that uses it fail its test.
    if ((current_->participants >> lane & 1) == 0) return 0xCDCDCDCDCDCDCDCDu;
    return threads_[current_->linear - current_->lane() + lane].published;
  }

 private:
  // Marks the emulator as busy, and cleans up however the launch ends.
  struct RunningScope {
    explicit RunningScope(Emulator& owner) : emulator(owner) { emulator.running_ = true; }
    ~RunningScope() {
      emulator.running_ = false;
      emulator.dynamic_shared_.reset();
      if (emulator.num_live_ > 0) emulator.abandon_block();
    }
    Emulator& emulator;
  };

  struct FreeDeleter {
    void operator()(char* memory) const { std::free(memory); }
  };

  // An allocation of exactly this size, so that AddressSanitizer sees an access past its end.
  void allocate_dynamic_shared(size_t bytes) {
    void* memory = nullptr;
    if (posix_memalign(&memory, 16, bytes) != 0) throw std::bad_alloc();
    dynamic_shared_.reset(static_cast<char*>(memory));
    dynamic_shared_bytes_ = bytes;
  }

  void number_threads(dim3 block) {
    threads_.assign(size_t(block.x) * block.y * block.z, Thread{});
    unsigned linear = 0;
    for (unsigned z = 0; z < block.z; ++z) {
      for (unsigned y = 0; y < block.y; ++y) {
        for (unsigned x = 0; x < block.x; ++x, ++linear) {
          threads_[linear].index = {x, y, z};
          threads_[linear].linear = linear;
        }
      }
    }
  }

  void run_block(uint3 index) {
    blockIdx = index;
    std::memset(dynamic_shared_.get(), 0xCD, dynamic_shared_bytes_);
    num_live_ = unsigned(threads_.size());
    next_new_thread_ = 0;
    while (next_new_thread_ < threads_.size()) switch_to(idle_fiber());
    while (num_live_ > 0) {
      // No thread can run here, so every operand that was published has been read.
      const bool released_warps = release_warps();
      if (!released_warps && !release_block()) throw std::logic_error(describe_deadlock());
      resume_released();
    }
  }

  // ---- fibers

  static void fiber_entry();

  // What a fiber does, for ever: the new threads of a block, then idle until the next block.
  void fiber_loop() {
    asan_arrive(nullptr, &scheduler_.stack, &scheduler_.stack_bytes);
    Fiber* self = running_fiber_;
    for (;;) {
      run_new_threads();
      idle_fibers_.push_back(self);
      switch_sides(*self, scheduler_);
    }
  }

  void run_new_threads() {
    try {
      while (next_new_thread_ < threads_.size()) {
        set_current(threads_[next_new_thread_++]);
        current_->wait = Wait::kNone;
        call_(argument_);
        current_->wait = Wait::kExited;
        --num_live_;
      }
    } catch (...) {
      error_ = std::current_exception();
    }
  }

  Fiber& idle_fiber() {
    if (idle_fibers_.empty()) {
      fibers_.push_back(std::make_unique<Fiber>(&fiber_entry));
      idle_fibers_.reserve(fibers_.size());  // a fiber that becomes idle must not allocate
      return *fibers_.back();
    }
    Fiber* fiber = idle_fibers_.back();
    idle_fibers_.pop_back();
    return *fiber;
  }

  // Scheduler to fiber; comes back when the fiber's thread waits or the fiber has nothing to do.
  void switch_to(Fiber& fiber) {
    running_fiber_ = &fiber;
    switch_sides(scheduler_, fiber);
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  }

  // Running thread to scheduler; comes back when the thread was released.
  void suspend(Wait wait, unsigned mask, Site site) {
    Thread& self = *current_;
    self.wait = wait;
    self.mask = mask;
    self.site = site;
    self.fiber = running_fiber_;
    switch_sides(*self.fiber, scheduler_);
  }

  void resume_released() {
    for (Thread& thread : threads_) {
      if (thread.wait != Wait::kNone) continue;
      set_current(thread);
      switch_to(*thread.fiber);
    }
  }

  void set_current(Thread& thread) {
    current_ = &thread;
    threadIdx = thread.index;
  }

  // After an error: the threads that still wait never continue.
  void abandon_block() {
    num_live_ = 0;
    idle_fibers_.clear();
    for (auto& fiber : fibers_) {
      fiber->restart();
      idle_fibers_.push_back(fiber.get());
    }
  }

  // ---- barriers

  bool release_warps() {
    bool released = false;
    for (unsigned first = 0; first < threads_.size(); first += kWarpLanes) {
      released |= release_warp(first);
    }
    return released;
  }

  // Completes every warp operation whose lanes all arrived. Exited lanes do not take part, nor do
  // lanes that a last, partial warp does not have.
  bool release_warp(unsigned first) {
    bool released = false;
    for (unsigned i = first; i < warp_end(first); ++i) {
      const Thread& thread = threads_[i];
      if (!is_warp_wait(thread.wait)) continue;
      const unsigned arrived = lanes_arrived_with(first, thread);
      const unsigned expected = thread.mask & live_lanes(first);
      if (expected != arrived) continue;
      complete_warp_operation(first, arrived);
      released = true;
    }
    return released;
  }

  unsigned lanes_arrived_with(unsigned first, const Thread& thread) const {
    unsigned lanes = 0;
    for (unsigned i = first; i < warp_end(first); ++i) {
      const bool same = threads_[i].wait == thread.wait && threads_[i].mask == thread.mask;
      lanes |= unsigned(same) << (i - first);
    }
    return lanes;
  }

  unsigned live_lanes(unsigned first) const {
    unsigned lanes = 0;
    for (unsigned i = first; i < warp_end(first); ++i) {
      lanes |= unsigned(threads_[i].wait != Wait::kExited) << (i - first);
    }
    return lanes;
  }

  void complete_warp_operation(unsigned first, unsigned lanes) {
    for (unsigned i = first; i < warp_end(first); ++i) {
      if ((lanes >> (i - first) & 1) == 0) continue;
      threads_[i].published = threads_[i].offered;
      threads_[i].participants = lanes;
      threads_[i].wait = Wait::kNone;
    }
  }

  unsigned warp_end(unsigned first) const {
    return std::min(first + kWarpLanes, unsigned(threads_.size()));
  }

  // Completes the block's barrier when all live threads wait at the same one. Two __syncthreads on
  // different lines are different: hardware may let that pass, CUDA's rules do not.
  bool release_block() {
    const Thread* first = nullptr;
    BlockVote vote;
    for (const Thread& thread : threads_) {
      if (thread.wait == Wait::kExited) continue;
      if (!is_block_wait(thread.wait)) return false;
      if (first == nullptr) first = &thread;
      if (thread.wait != first->wait || !(thread.site == first->site)) return false;
      vote.num_true += int(thread.offered);
      vote.num_threads += 1;
    }
    for (Thread& thread : threads_) {
      if (thread.wait != Wait::kExited) thread.wait = Wait::kNone;
    }
    block_vote_ = vote;
    return true;
  }

  // ---- messages

  static std::string place(const Site& site) {
    return std::string(site.file) + ":" + std::to_string(site.line);
  }

  static std::string describe_wait(const Thread& thread) {
    if (thread.wait == Wait::kExited) return "exited";
    std::string text = std::string("waiting at ") + wait_name(thread.wait);
    if (is_warp_wait(thread.wait)) {
      text += " of " + std::to_string(__builtin_popcount(thread.mask)) + " lanes";
    }
    return text + " (" + place(thread.site) + ")";
  }

  std::string describe_deadlock() const {
    std::map<std::string, int> num_threads_by_wait;
    for (const Thread& thread : threads_) ++num_threads_by_wait[describe_wait(thread)];
    std::string text = "barrier deadlock in block " + to_string(blockIdx) + ", " +
                       std::to_string(threads_.size()) + " threads: ";
    const char* separator = "";
    for (const auto& [wait, num_threads] : num_threads_by_wait) {
      text += separator + std::to_string(num_threads) + " " + wait;
      separator = ", ";
    }
    return text;
  }

  // The launch.
  bool running_ = false;
  Call call_ = nullptr;
  void* argument_ = nullptr;
  std::unique_ptr<char, FreeDeleter> dynamic_shared_;
  size_t dynamic_shared_bytes_ = 0;

  // The block.
  std::vector<Thread> threads_;
  size_t next_new_thread_ = 0;  // threads from here on have not begun
  unsigned num_live_ = 0;       // threads that have not exited
  Thread* current_ = nullptr;
  BlockVote block_vote_;
  std::exception_ptr error_;  // thrown by a thread, on its way to launch()'s caller

  // The stacks, kept from launch to launch.
  Side scheduler_;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Fiber*> idle_fibers_;
  Fiber* running_fiber_ = nullptr;
};

inline Emulator& emulator() {
  static thread_local Emulator instance;
  return instance;
}

inline void Emulator::fiber_entry() { emulator().fiber_loop(); }

// ---------------------------------------------------------------------------------------------
// Launching.

// The limits of a launch that CUDA checks, for compute capability 9.0 (227 KiB shared memory).
inline void check_launch(dim3 grid, dim3 block, size_t dynamic_shared_bytes) {
  const auto require = [](bool ok, const char* what, const std::string& got) {
    if (!ok) throw std::invalid_argument(std::string("emul::launch: ") + what + ", got " + got);
  };
  const std::string grid_text = to_string({grid.x, grid.y, grid.z});
  const std::string block_text = to_string({block.x, block.y, block.z});
  require(grid.x > 0 && grid.y > 0 && grid.z > 0, "grid must not be empty", grid_text);
  require(grid.x <= 0x7fffffffu, "grid.x must be below 2^31", grid_text);
  require(grid.y <= 65535 && grid.z <= 65535, "grid.y and z must be at most 65535", grid_text);
  require(block.x > 0 && block.y > 0 && block.z > 0, "block must not be empty", block_text);
  require(block.x <= 1024 && block.y <= 1024 && block.z <= 64,
          "block must be at most 1024 x 1024 x 64", block_text);
  require(block.x * block.y * block.z <= 1024, "block must have at most 1024 threads", block_text);
  require(dynamic_shared_bytes <= 227 * 1024, "dynamic shared memory must be at most 227 KiB",
          std::to_string(dynamic_shared_bytes) + " bytes");
}

// Runs kernel_call once per thread of the grid and returns when all are done. Throws
// std::invalid_argument for dimensions CUDA would refuse, std::logic_error for a barrier deadlock,
// and what a thread threw; the emulator is ready for the next launch in each case. OS threads may
// launch at the same time; each has its own emulator and its own shared memory.
template <class F>
void launch(dim3 grid, dim3 block, size_t dynamic_shared_bytes, F&& kernel_call) {
  check_launch(grid, block, dynamic_shared_bytes);
  auto once = [&kernel_call] { kernel_call(); };  // an object, also where F is a function
  const auto call = [](void* argument) { (*static_cast<decltype(once)*>(argument))(); };
  emulator().run_grid(grid, block, dynamic_shared_bytes, call, &once);
}

template <class T>
T* dynamic_shared() {
  static_assert(alignof(T) <= 16, "dynamic shared memory is aligned to 16 bytes");
  return reinterpret_cast<T*>(emulator().dynamic_shared());
}

// ---------------------------------------------------------------------------------------------
// Helpers of the intrinsics.

// Takes part in a shuffle; is the value of source_lane, or value itself where in_range is false.
template <class T>
T shuffle(unsigned mask, T value, unsigned source_lane, bool in_range, Site site) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>, "shuffles move 8 bytes at most");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  emulator().sync_warp(Wait::kShuffle, mask, bits, site);
  if (!in_range) return value;
  bits = emulator().read(source_lane);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

// First lane of the caller's segment of `width` lanes.
inline unsigned segment_begin(int width) {
  if (width < 1 || width > 32 || (width & (width - 1)) != 0) {
    throw std::logic_error("shuffle: width must be a power of two up to 32, got " +
                           std::to_string(width));
  }
  return emulator().current().lane() & ~unsigned(width - 1);
}

// Keeps a parameter out of template argument deduction: atomicAdd(&counter, 1) with any integer.
template <class T>
using Value = std::common_type_t<T>;

template <class T, class... Allowed>
inline constexpr bool is_one_of = (std::is_same_v<T, Allowed> || ...);

using Ull = unsigned long long;

// Atomic also towards other OS threads, in CUDA's relaxed order. Is the old value.
template <class T, class F>
T atomic_update(T* address, F new_value) {
  T old_value, replacement;
  __atomic_load(address, &old_value, __ATOMIC_RELAXED);
  do {
    replacement = new_value(old_value);
  } while (!__atomic_compare_exchange(address, &old_value, &replacement, false, __ATOMIC_RELAXED,
                                      __ATOMIC_RELAXED));
  return old_value;
}

}  // namespace emul

// ---------------------------------------------------------------------------------------------
// Barriers and fences. The last argument of each is never passed: it records the caller's line.

inline void __syncthreads(emul::Site site = emul::Site::here()) {
  emul::emulator().sync_block(emul::Wait::kSyncThreads, false, site);
}

inline int __syncthreads_count(int predicate, emul::Site site = emul::Site::here()) {
  return emul::emulator().sync_block(emul::Wait::kSyncThreadsVote, predicate != 0, site).num_true;
}

inline int __syncthreads_or(int predicate, emul::Site site = emul::Site::here()) {
  return __syncthreads_count(predicate, site) > 0;
}

inline int __syncthreads_and(int predicate, emul::Site site = emul::Site::here()) {
  const emul::BlockVote vote =
      emul::emulator().sync_block(emul::Wait::kSyncThreadsVote, predicate != 0, site);
  return vote.num_true == vote.num_threads;
}

inline void __syncwarp(unsigned mask = emul::kFullMask, emul::Site site = emul::Site::here()) {
  emul::emulator().sync_warp(emul::Wait::kSyncWarp, mask, 0, site);
}

inline void __threadfence_block() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

[[noreturn]] inline void __trap() {
  throw std::runtime_error("__trap() in block " + emul::to_string(blockIdx) + ", thread " +
                           emul::to_string(threadIdx));
}

// ---------------------------------------------------------------------------------------------
// Warp shuffles and votes.

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = warpSize,
              emul::Site site = emul::Site::here()) {
  const unsigned begin = emul::segment_begin(width);
  return emul::shuffle(mask, value, begin + (unsigned(source) & unsigned(width - 1)), true, site);
}

template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = warpSize,
                 emul::Site site = emul::Site::here()) {
  const int source = int(emul::emulator().current().lane()) - int(delta % 32);
  const bool in_range = source >= int(emul::segment_begin(width));
  return emul::shuffle(mask, value, unsigned(source), in_range, site);
}

template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = warpSize,
                   emul::Site site = emul::Site::here()) {
  const unsigned source = emul::emulator().current().lane() + delta % 32;
  const bool in_range = source < emul::segment_begin(width) + unsigned(width);
  return emul::shuffle(mask, value, source, in_range, site);
}

// Reaches into earlier segments but not into later ones, as CUDA's does.
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = warpSize,
                  emul::Site site = emul::Site::here()) {
  const unsigned source = emul::emulator().current().lane() ^ (unsigned(lane_mask) % 32);
  const bool in_range = source < emul::segment_begin(width) + unsigned(width);
  return emul::shuffle(mask, value, source, in_range, site);
}

inline unsigned __ballot_sync(unsigned mask, int predicate, emul::Site site = emul::Site::here()) {
  emul::Emulator& emulator = emul::emulator();
  emulator.sync_warp(emul::Wait::kVote, mask, predicate != 0, site);
  unsigned ballot = 0;
  for (unsigned lanes = emulator.current().participants; lanes != 0; lanes &= lanes - 1) {
    const unsigned lane = unsigned(__builtin_ctz(lanes));
    ballot |= unsigned(emulator.read(lane)) << lane;
  }
  return ballot;
}

inline int __any_sync(unsigned mask, int predicate, emul::Site site = emul::Site::here()) {
  return __ballot_sync(mask, predicate, site) != 0;
}

inline int __all_sync(unsigned mask, int predicate, emul::Site site = emul::Site::here()) {
  return __ballot_sync(mask, predicate == 0, site) == 0;
}

// Only the calling lane. CUDA promises no convergence, so this is a legal answer, and the one under
// which code that takes __activemask() for "all lanes that take this branch" fails its test.
inline unsigned __activemask() { return 1u << emul::emulator().current().lane(); }

// ---------------------------------------------------------------------------------------------
// Atomics, for the types CUDA has them for (uint64_t is not one of them: it is unsigned long).

template <class T>
T atomicAdd(T* address, emul::Value<T> value) {
  static_assert(emul::is_one_of<T, int, unsigned, emul::Ull, float, double>, "not in CUDA");
  // Added as unsigned where T is an int: CUDA wraps around, C++ would be undefined.
  using Sum = typename std::conditional_t<std::is_same_v<T, int>, std::make_unsigned<int>,
                                          std::common_type<T>>::type;
  return emul::atomic_update(address, [=](T old) { return T(Sum(old) + Sum(value)); });
}

template <class T>
T atomicMax(T* address, emul::Value<T> value) {
  static_assert(emul::is_one_of<T, int, unsigned, long long, emul::Ull>, "not in CUDA");
  return emul::atomic_update(address, [=](T old) { return old < value ? value : old; });
}

template <class T>
T atomicMin(T* address, emul::Value<T> value) {
  static_assert(emul::is_one_of<T, int, unsigned, long long, emul::Ull>, "not in CUDA");
  return emul::atomic_update(address, [=](T old) { return value < old ? value : old; });
}

template <class T>
T atomicAnd(T* address, emul::Value<T> value) {
  static_assert(emul::is_one_of<T, int, unsigned, emul::Ull>, "not in CUDA");
  return emul::atomic_update(address, [=](T old) { return old & value; });
}

template <class T>
T atomicOr(T* address, emul::Value<T> value) {
  static_assert(emul::is_one_of<T, int, unsigned, emul::Ull>, "not in CUDA");
  return emul::atomic_update(address, [=](T old) { return old | value; });
}

template <class T>
T atomicExch(T* address, emul::Value<T> value) {
  static_assert(emul::is_one_of<T, int, unsigned, emul::Ull, float>, "not in CUDA");
  return emul::atomic_update(address, [=](T) { return value; });
}

template <class T>
T atomicCAS(T* address, emul::Value<T> expected, emul::Value<T> value) {
  static_assert(emul::is_one_of<T, int, unsigned, emul::Ull, unsigned short>, "not in CUDA");
  return emul::atomic_update(address, [=](T old) { return old == expected ? value : old; });
}

// ---------------------------------------------------------------------------------------------
// Loads and stores with cache hints: there is no cache to hint at.

template <class T>
T __ldg(const T* address) {
  return *address;
}

template <class T>
T __ldcs(const T* address) {
  return *address;
}

template <class T>
T __ldcg(const T* address) {
  return *address;
}

template <class T>
void __stcs(T* address, emul::Value<T> value) {
  *address = value;
}

template <class T>
void __stcg(T* address, emul::Value<T> value) {
  *address = value;
}

// ---------------------------------------------------------------------------------------------
// Integer functions.

inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __ffsll(long long v) { return __builtin_ffsll(v); }
inline int __clz(int v) { return v == 0 ? 32 : __builtin_clz(unsigned(v)); }

// Not templates: these must win over std::min and std::max where a file says `using namespace std`.
#define KV_EMUL_MIN_MAX(T)                                   \
  constexpr inline T min(T a, T b) { return b < a ? b : a; } \
  constexpr inline T max(T a, T b) { return a < b ? b : a; }
KV_EMUL_MIN_MAX(int)
KV_EMUL_MIN_MAX(unsigned)
KV_EMUL_MIN_MAX(long)
KV_EMUL_MIN_MAX(unsigned long)
KV_EMUL_MIN_MAX(long long)
KV_EMUL_MIN_MAX(unsigned long long)
#undef KV_EMUL_MIN_MAX
