// SPDX-License-Identifier: Apache-2.0
#include "emul/runtime/device_memory.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>

#include "emul/runtime/api.h"
#include "emul/runtime/settings.h"

namespace kvcache::gpuless {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kAlignment = 2 << 20;           // as in cudaMalloc for large allocations
constexpr size_t kArenaBytes = size_t{1} << 42;  // address space only
// New allocations up to this size are filled with a pattern.
constexpr size_t kPoisonedBytes = 32 << 20;

size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

// The signal handler reads these without the lock, which is safe because the pointers are set only
// once.
struct Arena {
  char* device = nullptr;
  char* alias = nullptr;
  int file = -1;
  size_t next = 0;
  size_t in_use = 0;
  std::map<char*, size_t> allocations;             // size in bytes by device address; whole pages
  std::map<char*, std::pair<char*, size_t>> host;  // (alias, size in bytes) by host address
};
Arena* arena = nullptr;
thread_local const char* running_kernel = nullptr;
struct sigaction previous_action;

void write_text(const char* text) { (void)!write(STDERR_FILENO, text, std::strlen(text)); }

// Prints the address and what accessed it. The process then crashes as it would without this
// handler.
void on_fault(int, siginfo_t* info, void*) {
  const char* address = static_cast<const char*>(info->si_addr);
  const bool in_device = address >= arena->device && address < arena->device + kArenaBytes;
  if (in_device && running_kernel == nullptr) {
    write_text(
        "gpu-less: host code touched device memory (or a device pointer was used as a host "
        "pointer)\n");
  } else if (running_kernel != nullptr) {
    write_text("gpu-less: an illegal memory access was encountered in kernel ");
    write_text(running_kernel);
    write_text(in_device ? ": device memory that is freed or was never allocated\n"
                         : ": host memory that is not there, or not by its device pointer\n");
  }
  sigaction(SIGSEGV, &previous_action, nullptr);  // repeats the access with the previous handler
}

void* reserve(size_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return p == MAP_FAILED ? nullptr : p;
}

Arena& the_arena() {
  if (arena != nullptr) return *arena;
  auto* made = new Arena;
  made->file = memfd_create("kvcache-gpu-less", MFD_CLOEXEC);
  const char* at = static_cast<char*>(reserve(kArenaBytes + kAlignment));
  made->alias = static_cast<char*>(reserve(kArenaBytes));
  if (made->file < 0 || ftruncate(made->file, off_t(kArenaBytes)) != 0 || at == nullptr ||
      made->alias == nullptr) {
    say("cannot reserve address space for device memory");
    std::abort();
  }
  made->device = reinterpret_cast<char*>(round_up(reinterpret_cast<size_t>(at), kAlignment));
  arena = made;
  struct sigaction action{};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, &previous_action);
  return *arena;
}

bool map_shared(char* at, size_t bytes, int protection, size_t offset) {
  return mmap(at, bytes, protection, MAP_SHARED | MAP_FIXED, arena->file, off_t(offset)) !=
         MAP_FAILED;
}

void unmap(char* at, size_t bytes) {
  mmap(at, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

void protect(int device, int host) {
  if (arena == nullptr) return;
  for (const auto& [at, bytes] : arena->allocations) mprotect(at, bytes, device);
  for (const auto& [at, other] : arena->host) mprotect(at, other.second, host);
}

}  // namespace

void* allocate_device(size_t bytes) {
  Arena& a = the_arena();
  const size_t whole = round_up(bytes, kPage);
  if (bytes > settings().device_bytes - a.in_use || a.next + whole + kAlignment > kArenaBytes) {
    return nullptr;
  }
  const size_t offset = a.next;
  if (!map_shared(a.device + offset, whole, PROT_NONE, offset) ||
      !map_shared(a.alias + offset, whole, PROT_READ | PROT_WRITE, offset)) {
    return nullptr;
  }
  // At least one unmapped page is left between allocations.
  a.next = offset + round_up(whole + kPage, kAlignment);
  a.in_use += whole;
  a.allocations[a.device + offset] = whole;
  if (whole <= kPoisonedBytes) std::memset(a.alias + offset, 0xCD, whole);
  return a.device + offset;
}

void free_device(void* memory) {
  Arena& a = the_arena();
  const auto found = a.allocations.find(static_cast<char*>(memory));
  const size_t bytes = found->second;
  const size_t offset = size_t(found->first - a.device);
  madvise(a.alias + offset, bytes, MADV_REMOVE);  // returns the pages to the system
  unmap(a.device + offset, bytes);
  unmap(a.alias + offset, bytes);
  a.in_use -= bytes;
  a.allocations.erase(found);
}

bool in_device_arena(const void* p) {
  const char* at = static_cast<const char*>(p);
  return arena != nullptr && at >= arena->device && at < arena->device + kArenaBytes;
}

size_t device_bytes_in_use() { return arena == nullptr ? 0 : arena->in_use; }

void* device_alias(const void* p) {
  return arena->alias + (static_cast<const char*>(p) - arena->device);
}

void* alias_host_pages(void* begin, size_t bytes) {
  Arena& a = the_arena();
  const size_t offset = a.next;
  char* alias = a.device + offset;
  if (!map_shared(alias, bytes, PROT_READ | PROT_WRITE, offset)) return nullptr;
  std::memcpy(alias, begin, bytes);
  if (!map_shared(static_cast<char*>(begin), bytes, PROT_READ | PROT_WRITE, offset)) return nullptr;
  a.next = offset + round_up(bytes + kPage, kAlignment);
  a.host[static_cast<char*>(begin)] = {alias, bytes};
  return alias;
}

void drop_host_alias(void* host_begin) {
  const auto found = arena->host.find(static_cast<char*>(host_begin));
  unmap(found->second.first, found->second.second);
  arena->host.erase(found);
}

OpenDevice::OpenDevice(const char* kernel) {
  protect(PROT_READ | PROT_WRITE, PROT_NONE);
  running_kernel = kernel;
}

OpenDevice::~OpenDevice() {
  running_kernel = nullptr;
  protect(PROT_NONE, PROT_READ | PROT_WRITE);
}

}  // namespace kvcache::gpuless
