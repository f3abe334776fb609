// SPDX-License-Identifier: Apache-2.0
#include "core/prefault.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "core/zeroed_array.h"
#include "tests/check.h"

using namespace kvcache;

namespace {

constexpr size_t kNumBytes = 64 << 12;

size_t num_resident(const ZeroedArray<char>& array) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  std::vector<unsigned char> pages((array.num_bytes() + page - 1) / page);
  CHECK_EQ(mincore(const_cast<char*>(array.data()), array.num_bytes(), pages.data()), 0);
  size_t n = 0;
  for (unsigned char each : pages) n += each & 1;
  return n * page;
}

TEST(arrays_created_during_an_enabled_prefault_are_committed) {
  for (const bool is_enabled : {false, true}) {
    Prefault prefault(is_enabled);
    ZeroedArray<char> array(kNumBytes), written(kNumBytes);
    CHECK_EQ(num_resident(array), 0);
    written[5] = 7;
    prefault.commit();
    ZeroedArray<char> later(kNumBytes);
    CHECK_EQ(num_resident(array), is_enabled ? kNumBytes : 0);
    CHECK_EQ(num_resident(later), 0);
    for (size_t i = 0; i < kNumBytes; ++i) CHECK_EQ(array[i], 0);
    CHECK_EQ(written[5], 7);
  }
}

TEST(arrays_above_half_of_the_available_memory_are_not_committed) {
  CHECK(available_memory() > 0);
  Prefault prefault(/*is_enabled=*/true);
  ZeroedArray<char> small(kNumBytes);
  ZeroedArray<char> large(static_cast<size_t>(available_memory()));
  prefault.commit();
  CHECK_EQ(num_resident(small), 0);
}

// A folder with the files of /proc and /sys that report the available memory.
class System {
 public:
  System() { put("/proc/meminfo", "MemTotal: 9000 kB\nMemAvailable: 1000 kB\n"); }
  ~System() { std::filesystem::remove_all(root_); }
  System(const System&) = delete;

  void put(const std::string& path, const std::string& text) const {
    std::filesystem::create_directories(std::filesystem::path(root_ + path).parent_path());
    std::ofstream(root_ + path) << text;
  }
  int64_t num_kib() const { return available_memory(root_) / 1024; }

 private:
  static std::string made() {
    std::string name = (std::filesystem::temp_directory_path() / "system-XXXXXX").string();
    CHECK(mkdtemp(name.data()) != nullptr);
    return name;
  }
  std::string root_ = made();
};

TEST(the_smallest_limit_of_nested_control_groups_applies) {
  const System system;
  CHECK_EQ(system.num_kib(), 1000);  // of the machine
  system.put("/proc/self/cgroup", "0::/\n");
  CHECK_EQ(system.num_kib(), 1000);
  system.put("/proc/self/cgroup", "0::/outer/inner\n");
  const auto limit = [&](const std::string& group, const char* most, const char* now) {
    system.put("/sys/fs/cgroup" + group + "/memory.max", most);
    system.put("/sys/fs/cgroup" + group + "/memory.current", now);
    return system.num_kib();
  };
  CHECK_EQ(limit("/outer/inner", "max\n", "1024\n"), 1000);
  CHECK_EQ(limit("/outer", "819200\n", "819200\n"), 0);
  system.put("/sys/fs/cgroup/outer/memory.stat",
             "anon 409600\nfile 409600\ninactive_file 307200\n");
  CHECK_EQ(system.num_kib(), 300);  // cached files are available
  // The limit is at the root, as in a container with its own cgroup namespace.
  CHECK_EQ(limit("", "102400\n", "92160\n"), 10);
  CHECK_EQ(limit("", "102400\n", "112640\n"), 0);
}

TEST(cgroup_v1_limits_apply_if_they_limit_memory) {
  const System system;
  const std::string group = "/sys/fs/cgroup/memory/g:/h/memory.";
  system.put("/proc/self/cgroup", "5:cpu:/g\n4:hugetlb,memory:/g:/h\n1:name=memory:/\n0::/\n");
  system.put(group + "limit_in_bytes", "9223372036854771712\n");
  CHECK_EQ(system.num_kib(), 0);  // the usage is unknown
  system.put(group + "usage_in_bytes", "409600\n");
  CHECK_EQ(system.num_kib(), 1000);
  system.put(group + "limit_in_bytes", "512000\n");
  CHECK_EQ(system.num_kib(), 100);
  system.put(group + "stat", "total_inactive_file 102400\n");
  CHECK_EQ(system.num_kib(), 200);
}

TEST(memory_that_the_kernel_refuses_to_commit_is_no_error) {
  Prefault prefault(/*is_enabled=*/true);
  ZeroedArray<char> array(kNumBytes), refused(kNumBytes);
  CHECK_EQ(munmap(refused.data(), kNumBytes), 0);  // the request fails with ENOMEM
  prefault.commit();
  CHECK_EQ(num_resident(array), kNumBytes);
}

TEST(a_destroyed_array_is_forgotten) {
  Prefault prefault(/*is_enabled=*/true);
  auto destroyed = std::make_unique<ZeroedArray<char>>(kNumBytes);
  ZeroedArray<char> array(kNumBytes);
  destroyed.reset();
  prefault.commit();
  CHECK_EQ(num_resident(array), kNumBytes);
}

TEST(nested_prefaults_are_independent) {
  Prefault outer(/*is_enabled=*/true);
  {
    Prefault inner(/*is_enabled=*/true);
    ZeroedArray<char> array(kNumBytes);
    inner.commit();
    CHECK_EQ(num_resident(array), kNumBytes);
  }
  {
    const Prefault abandoned(/*is_enabled=*/true);  // as after an exception in a constructor
  }
  ZeroedArray<char> array(kNumBytes);
  outer.commit();
  CHECK_EQ(num_resident(array), kNumBytes);
}

}  // namespace

TEST_MAIN()
