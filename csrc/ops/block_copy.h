// Block copy: whole pages, over all layers, between and within devices and the host.
//
// A page's bytes lie in regions: K and V of each layer, or all of it in one piece. Per region, a
// page is one fragment, and fragments of neighbouring pages that lie side by side on both sides are
// one run. Only ids come from the host; the regions' table is made once.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ops/checks.h"
#include "ops/host_device.h"

namespace kvcache {

constexpr int32_t kCleared = -1;  // as a source: the destination becomes zeros

// One region on both sides; plain data, as a row of the op's table and as a kernel takes it.
struct CopyRegion {
  int64_t source, source_stride;  // bytes from the tensor's first to page 0's; from page to page
  int64_t destination, destination_stride;
  int64_t num_bytes;  // of one page

  // Neighbouring pages lie side by side on both sides.
  bool is_dense() const { return source_stride == num_bytes && destination_stride == num_bytes; }
};
constexpr int64_t kRegionFields = 5;
static_assert(sizeof(CopyRegion) == kRegionFields * sizeof(int64_t), "a row of the op's table");

// Which engine carries bytes between a device and the host.
// kSingle: the copy engine, one call per fragment.
enum class CopyEngine : int64_t { kKernel = 0, kBatch = 1, kSingle = 2 };

struct BlockCopy {
  const char* source;  // nullptr: only zeros are written
  char* destination;
  const CopyRegion* regions;  // on the CPU
  int64_t num_regions;
  const int32_t* pairs;  // [num_pairs, 2]: source (or kCleared), destination
  bool pairs_on_cpu;
  int64_t num_pairs;
  int64_t num_sources, num_destinations;  // pages
  CopyEngine engine;
  int64_t pages_per_run;      // pages of the host that were pinned in one piece; 0: all
  int64_t num_thread_blocks;  // of the kernel; 0: as many as suit the direction
  bool within;                // source and destination are one storage

  const char* from(const CopyRegion& r, int64_t page) const {
    return source + r.source + page * r.source_stride;
  }
  char* to(const CopyRegion& r, int64_t page) const {
    return destination + r.destination + page * r.destination_stride;
  }
  int64_t page_bytes() const {
    int64_t sum = 0;
    for (int64_t i = 0; i < num_regions; ++i) sum += regions[i].num_bytes;
    return sum;
  }
};

// Whether a pair names pages that are there.
KV_HOST_DEVICE bool is_bad_pair(int32_t source, int32_t destination, int64_t num_sources,
                                int64_t num_destinations) {
  return source < kCleared || source >= num_sources || destination < 0 ||
         destination >= num_destinations;
}

[[noreturn]] inline void fail_pair(const BlockCopy& c, int64_t i, int32_t source,
                                   int32_t destination) {
  const std::string name = "pairs[" + std::to_string(i) + "]";
  if (destination < 0 || destination >= c.num_destinations) {
    fail(name + " writes to page " + std::to_string(destination) + ": expected 0 to " +
         std::to_string(c.num_destinations - 1));
  }
  fail(name + " reads page " + std::to_string(source) + ": expected -1 (zeros) to " +
       std::to_string(c.num_sources - 1));
}

// Ids of one call, each with the place where it came first. Open addressing: what a call costs
// grows with its pages, not with the pool.
class PlaceOfId {
 public:
  explicit PlaceOfId(int64_t n) {
    size_t size = 16;
    while (size < 2 * static_cast<size_t>(n)) size *= 2;
    table_.assign(size, {-1, 0});
  }
  // The place of an earlier insertion, or -1.
  int64_t insert(int32_t id, int64_t place) {
    Entry& entry = slot(id);
    if (entry.id == id) return entry.place;
    entry = {id, place};
    return -1;
  }
  int64_t find(int32_t id) {
    const Entry& entry = slot(id);
    return entry.id == id ? entry.place : -1;
  }

 private:
  struct Entry {
    int32_t id;
    int64_t place;
  };
  Entry& slot(int32_t id) {
    const size_t mask = table_.size() - 1;
    size_t i = (static_cast<uint32_t>(id) * 0x9E3779B1u) & mask;
    while (table_[i].id != id && table_[i].id != -1) i = (i + 1) & mask;
    return table_[i];
  }
  std::vector<Entry> table_;
};

// Pairs on the CPU: all pages are there, each is written once, and none is both written and read:
// the order in which pairs are carried out does not matter.
inline void check_pairs(const BlockCopy& c) {
  PlaceOfId written(c.num_pairs);
  for (int64_t i = 0; i < c.num_pairs; ++i) {
    const int32_t source = c.pairs[2 * i], destination = c.pairs[2 * i + 1];
    if (is_bad_pair(source, destination, c.num_sources, c.num_destinations)) {
      fail_pair(c, i, source, destination);
    }
    const int64_t before = written.insert(destination, i);
    if (before >= 0) {
      fail("pairs[" + std::to_string(before) + "] and pairs[" + std::to_string(i) +
           "] both write to page " + std::to_string(destination) + ": expected each page once");
    }
  }
  if (!c.within) return;
  for (int64_t i = 0; i < c.num_pairs; ++i) {
    const int32_t source = c.pairs[2 * i];
    const int64_t writer = source == kCleared ? -1 : written.find(source);
    if (writer < 0) continue;
    fail("pairs[" + std::to_string(i) + "] reads page " + std::to_string(source) +
         ", which pairs[" + std::to_string(writer) + "] writes to: expected none that is both");
  }
}

inline BlockCopy checked_block_copy(const std::optional<Tensor>& source, const Tensor& destination,
                                    const Tensor& regions, const Tensor& pairs, int64_t num_sources,
                                    int64_t num_destinations, int64_t engine, int64_t pages_per_run,
                                    int64_t num_thread_blocks) {
  check_dim(regions, "regions", 2, "[num_regions, 5]");
  check_size(regions, "regions", 1, kRegionFields, "the fields of a region");
  check_dtype(regions, "regions", {ScalarType::Long});
  check_contiguous(regions, "regions");
  if (!regions.is_cpu()) fail("regions is on " + device_of(regions) + ": expected cpu");
  check_dim(pairs, "pairs", 2, "[num_pairs, 2]");
  check_size(pairs, "pairs", 1, 2, "source and destination");
  check_dtype(pairs, "pairs", {ScalarType::Int});
  check_contiguous(pairs, "pairs");
  if (engine < 0 || engine > 2) {
    fail("engine is " + std::to_string(engine) +
         ": expected 0 (kernel), 1 (copy engine) or 2 (copy engine, one copy per call)");
  }
  const auto not_negative = [](int64_t value, const char* name) {
    if (value < 0)
      fail(std::string(name) + " is " + std::to_string(value) + ": expected 0 or more");
  };
  not_negative(num_sources, "num_src_blocks");
  not_negative(num_destinations, "num_dst_blocks");
  not_negative(pages_per_run, "pages_per_run");
  not_negative(num_thread_blocks, "num_thread_blocks");
  BlockCopy c{};
  c.within = !source.has_value();
  c.destination = static_cast<char*>(destination.data_ptr());
  c.source = c.within ? c.destination : static_cast<const char*>(source->data_ptr());
  c.regions = reinterpret_cast<const CopyRegion*>(regions.const_data_ptr<int64_t>());
  c.num_regions = regions.size(0);
  c.pairs = pairs.const_data_ptr<int32_t>();
  c.pairs_on_cpu = pairs.is_cpu();
  c.num_pairs = pairs.size(0);
  c.num_sources = num_sources;
  c.num_destinations = num_destinations;
  c.engine = static_cast<CopyEngine>(engine);
  c.pages_per_run = pages_per_run;
  c.num_thread_blocks = num_thread_blocks;
  for (int64_t r = 0; r < c.num_regions; ++r) {
    if (c.regions[r].num_bytes >= 0) continue;
    fail("regions[" + std::to_string(r) + "] has " + std::to_string(c.regions[r].num_bytes) +
         " bytes: expected 0 or more");
  }
  if (c.pairs_on_cpu) check_pairs(c);
  return c;
}

// Pages `source`, `source + step`, ... to `destination`, `destination + step`, ...
struct CopyRun {
  int32_t source, destination;  // of the lowest page
  int64_t num_pages;
};

// The runs of pairs on the CPU: neighbours in the list whose ids both go up, or both down, by one.
// No run is longer than `most`, nor crosses a multiple of pages_per_run where it cannot (a side's
// flag: it lies on the host, and an engine of the device carries it).
inline std::vector<CopyRun> runs_of(const BlockCopy& c, int64_t most, bool cuts_source = false,
                                    bool cuts_destination = false) {
  // Between the pages `source` and `destination`, and the next ones.
  const auto crosses = [&](int32_t source, int32_t destination) {
    const int64_t size = c.pages_per_run;
    return size > 0 && ((cuts_source && source >= 0 && (source + int64_t{1}) % size == 0) ||
                        (cuts_destination && (destination + int64_t{1}) % size == 0));
  };
  std::vector<CopyRun> runs;
  int32_t step = 0;
  for (int64_t i = 0; i < c.num_pairs; ++i) {
    const int32_t s = c.pairs[2 * i], d = c.pairs[2 * i + 1];
    if (!runs.empty() && runs.back().num_pages < most) {
      CopyRun& run = runs.back();
      const auto last = static_cast<int32_t>(run.num_pages - 1);
      const bool clears = s == kCleared && run.source == kCleared;
      const bool copies = s != kCleared && run.source != kCleared;
      const bool up = step >= 0 && d == run.destination + last + 1 &&
                      (clears || (copies && s == run.source + last + 1));
      const bool down =
          step <= 0 && d == run.destination - 1 && (clears || (copies && s == run.source - 1));
      if (up && !crosses(s - 1, d - 1)) {
        ++run.num_pages;
        step = 1;
        continue;
      }
      if (down && !crosses(s, d)) {
        ++run.num_pages;
        run.destination = d;
        run.source = s;
        step = -1;
        continue;
      }
    }
    runs.push_back({s, d, 1});
    step = 0;
  }
  return runs;
}

}  // namespace kvcache
