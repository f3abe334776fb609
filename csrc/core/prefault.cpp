// SPDX-License-Identifier: Apache-2.0
#include "core/prefault.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <limits>
#include <sstream>

namespace kvcache {

namespace {

// Arrays up to this total size are committed without checking the available memory.
constexpr size_t kSmall = size_t{64} << 20;

// Returns whether the kernel has committed the pages.
bool commit_pages(char* data, size_t num_bytes) {
#ifdef MADV_POPULATE_WRITE
  if (madvise(data, num_bytes, MADV_POPULATE_WRITE) == 0) return true;
  // If memory has run out, the system would kill the process for writing to the pages.
  if (errno != EINVAL) return false;
#endif
  // Kernels before 5.14 do not support this request, so the pages are committed by writing to them.
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  for (size_t at = 0; at < num_bytes; at += page) {
    volatile char* byte = data + at;
    *byte = *byte;
  }
  return true;
}

// Returns the number in a file, or the largest number if the file is missing or contains "max".
int64_t number_in(const std::string& path) {
  int64_t number = 0;
  std::ifstream file(path);
  return file >> number ? number : std::numeric_limits<int64_t>::max();
}

// Returns the value in a line "name value" of a file, or 0 if there is none.
int64_t value_in(const std::string& path, const std::string& name) {
  std::ifstream file(path);
  std::string key;
  for (int64_t value = 0; file >> key >> value;) {
    if (key == name) return value;
  }
  return 0;
}

struct GroupFiles {
  const char *limit, *used;
  const char* reclaimable;  // name in memory.stat
};
constexpr GroupFiles kFirstVersion = {"memory.limit_in_bytes", "memory.usage_in_bytes",
                                      "total_inactive_file"};
constexpr GroupFiles kSecondVersion = {"memory.max", "memory.current", "inactive_file"};

// Returns how many more bytes a control group and all groups that contain it may use. The kernel
// reclaims cached files, such as a model's weights, before a group exceeds its limit.
int64_t left_in(const std::string& root, std::string group, const GroupFiles& files) {
  int64_t left = std::numeric_limits<int64_t>::max();
  for (;; group.erase(group.rfind('/'))) {
    const std::string folder = root + group + "/";
    const int64_t most = number_in(folder + files.limit);
    if (most != std::numeric_limits<int64_t>::max()) {
      const int64_t used =
          number_in(folder + files.used) - value_in(folder + "memory.stat", files.reclaimable);
      left = std::min(left, std::max<int64_t>(most - used, 0));
    }
    if (group.find('/') == std::string::npos) return left;
  }
}

int64_t available_on_machine(const std::string& root) {
  std::ifstream info(root + "/proc/meminfo");
  for (std::string line; std::getline(info, line);) {
    std::istringstream words(line);
    std::string name;
    int64_t kib = 0;
    if (words >> name >> kib && name == "MemAvailable:") return kib << 10;
  }
  return 0;
}

}  // namespace

int64_t available_memory(const std::string& root) {
  int64_t available = available_on_machine(root);
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {  // "number:controllers:/path"
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    std::string group = line.substr(second + 1);
    if (group == "/") group.clear();
    if (controllers == ",,") {
      available = std::min(available, left_in(root + "/sys/fs/cgroup", group, kSecondVersion));
    } else if (controllers.find(",memory,") != std::string::npos) {
      available =
          std::min(available, left_in(root + "/sys/fs/cgroup/memory", group, kFirstVersion));
    }
  }
  return available;
}

thread_local Prefault* Prefault::current_ = nullptr;

Prefault::Prefault(bool is_enabled) : is_noting_(is_enabled) {
  if (!is_noting_) return;
  outer_ = current_;
  current_ = this;
}

Prefault::~Prefault() { stop(); }

void Prefault::stop() {
  if (is_noting_) current_ = outer_;
  is_noting_ = false;
}

void Prefault::add(void* data, size_t num_bytes) {
  if (num_ranges_ < ranges_.size()) ranges_[num_ranges_++] = {data, num_bytes};
}

void Prefault::forget(const void* data) {
  Range* stop = std::remove_if(ranges_.data(), ranges_.data() + num_ranges_,
                               [data](const Range& range) { return range.data == data; });
  num_ranges_ = static_cast<size_t>(stop - ranges_.data());
}

void Prefault::commit() {
  if (!is_noting_) return;
  stop();
  size_t num_bytes = 0;
  for (size_t i = 0; i < num_ranges_; ++i) num_bytes += ranges_[i].num_bytes;
  if (num_bytes > kSmall && static_cast<int64_t>(num_bytes) > available_memory() / 2) return;
  for (size_t i = 0; i < num_ranges_; ++i) {
    if (!commit_pages(static_cast<char*>(ranges_[i].data), ranges_[i].num_bytes)) return;
  }
}

}  // namespace kvcache
