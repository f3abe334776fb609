// SPDX-License-Identifier: Apache-2.0
// Copies whole pages of all layers between and within devices and the host.
//
// A page's bytes are spread over regions: one each for K and V of every layer, or a single region
// for the whole page. A page has one fragment per region. Consecutive pages whose fragments are
// contiguous on both sides form a run. The table of regions is created once, so a call passes only
// ids.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ops/checks.h"
#include "ops/copy_pages.h"

namespace kvcache {

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

// Maps each id in a call to the index of its first occurrence. Because of open addressing, the cost
// is proportional to the number of pages in the call, not to the size of the pool.
class IndexOfId {
 public:
  explicit IndexOfId(int64_t n) {
    size_t size = 16;
    while (size < 2 * static_cast<size_t>(n)) size *= 2;
    table_.assign(size, {-1, 0});
  }
  // Returns the index with which the id was inserted earlier. If there is none, inserts the id with
  // this index and returns -1.
  int64_t insert(int32_t id, int64_t index) {
    Entry& entry = slot(id);
    if (entry.id == id) return entry.index;
    entry = {id, index};
    return -1;
  }
  int64_t find(int32_t id) {
    const Entry& entry = slot(id);
    return entry.id == id ? entry.index : -1;
  }

 private:
  struct Entry {
    int32_t id;
    int64_t index;
  };
  Entry& slot(int32_t id) {
    const size_t mask = table_.size() - 1;
    size_t i = (static_cast<uint32_t>(id) * 0x9E3779B1u) & mask;
    while (table_[i].id != id && table_[i].id != -1) i = (i + 1) & mask;
    return table_[i];
  }
  std::vector<Entry> table_;
};

// Checks pairs on the CPU. All pages must be in range, and no page may be written twice. If both
// sides share pages, no page may be both read and written. As a result, the order of the pairs does
// not matter.
inline void check_pairs(const BlockCopy& c) {
  IndexOfId written(c.num_pairs);
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
         ", which pairs[" + std::to_string(writer) +
         "] writes to: expected no page to be both read and written");
  }
}

// Returns the byte range that contains all pages of a region, or nothing on an int64 overflow.
inline std::optional<ByteSpan> pages_span(const char* memory, int64_t offset, int64_t stride,
                                          int64_t num_bytes, int64_t num_pages) {
  if (num_pages == 0 || num_bytes == 0) return ByteSpan{};
  const auto last = multiply_add(num_pages - 1, stride, offset);
  if (!last || *last > INT64_MAX / 4 - num_bytes || *last < -(INT64_MAX / 4) ||
      offset > INT64_MAX / 4 - num_bytes || offset < -(INT64_MAX / 4)) {
    return {};
  }
  const auto base = reinterpret_cast<uintptr_t>(memory);
  return ByteSpan{base + static_cast<uintptr_t>(std::min(offset, *last)),
                  base + static_cast<uintptr_t>(std::max(offset, *last) + num_bytes)};
}

[[noreturn]] inline void fail_reach(const std::string& name, int64_t offset, const char* side) {
  fail(name + " has pages at offset " + std::to_string(offset) + " of " + side +
       " that lie outside: expected memory of src, dst or one of owners");
}

// How source and destination pages in the same memory overlap: not at all, exactly (page i is the
// same on both sides), or partially.
enum class Overlap { kNone, kExact, kPartial };

inline Overlap overlap_of(const BlockCopy& c, const CopyRegion& r) {
  const auto from = reinterpret_cast<uintptr_t>(c.from(r, 0));
  const auto distance =
      static_cast<int64_t>(reinterpret_cast<uintptr_t>(c.to(r, 0))) - static_cast<int64_t>(from);
  const int64_t stride = r.source_stride < 0 ? -r.source_stride : r.source_stride;
  const bool one_page = c.num_sources == 1 && c.num_destinations == 1;
  if (one_page || (r.destination_stride == r.source_stride && stride >= r.num_bytes)) {
    if (distance == 0) return Overlap::kExact;
    const int64_t shift = stride == 0 ? 0 : (distance % stride + stride) % stride;
    if (shift >= r.num_bytes && shift <= stride - r.num_bytes) return Overlap::kNone;
  }
  return Overlap::kPartial;
}

// Checks that the regions' sizes are valid and that all pages lie in memory that was passed to the
// call. Written pages must not overlap `regions`, `pairs`, or part of a page that is read. Sets
// `c.within` if both sides share pages.
inline void check_regions(BlockCopy& c, const Tensor& regions, const Tensor& pairs,
                          const Reach& reach) {
  const ByteSpan own = span_of(regions), ids = span_of(pairs);
  int64_t copied_bytes = 0;
  for (int64_t i = 0; i < c.num_regions; ++i) {
    const CopyRegion& r = c.regions[i];
    const std::string name = "regions[" + std::to_string(i) + "]";
    if (r.num_bytes < 0 || r.num_bytes > INT64_MAX / 4) {
      fail(name + " has " + std::to_string(r.num_bytes) + " bytes: expected 0 or more" +
           (r.num_bytes < 0 ? "" : ", and fewer than 2^61"));
    }
    const auto from = pages_span(c.source, r.source, r.source_stride, r.num_bytes, c.num_sources);
    const auto to = pages_span(c.destination, r.destination, r.destination_stride, r.num_bytes,
                               c.num_destinations);
    const auto sum = multiply_add(c.num_pairs, r.num_bytes, copied_bytes);
    if (!from || !to || !sum) {
      fail(name + " extends beyond 2^61 bytes: expected offsets and strides of pages in memory");
    }
    copied_bytes = *sum;
    if (!reach.holds(*from)) fail_reach(name, r.source, "src");
    if (!reach.holds(*to)) fail_reach(name, r.destination, "dst");
    if (to->meets(own)) fail_shared("dst in " + name, "regions");
    if (to->meets(ids)) fail_shared("dst in " + name, "pairs");
    if (!from->meets(*to)) continue;
    const Overlap overlap = overlap_of(c, r);
    if (overlap == Overlap::kPartial) {
      fail(name +
           " has pages of dst that partially overlap pages of src: expected disjoint pages, or the "
           "same pages on both sides");
    }
    c.within |= overlap == Overlap::kExact;
  }
}

inline BlockCopy checked_block_copy(const std::optional<Tensor>& source, const Tensor& destination,
                                    const Tensor& regions, const Tensor& pairs, int64_t num_sources,
                                    int64_t num_destinations, int64_t engine, int64_t pages_per_run,
                                    int64_t num_thread_blocks, bool pairs_on_cpu,
                                    const Owners& owners) {
  check_defined(destination, "dst");
  check_dim(regions, "regions", 2, "[num_regions, 5]");
  check_size(regions, "regions", 1, kRegionFields, "the fields of a region");
  check_dtype(regions, "regions", {ScalarType::Long});
  check_contiguous(regions, "regions");
  if (!regions.is_cpu()) fail("regions is on " + device_of(regions) + ": expected cpu");
  check_dim(pairs, "pairs", 2, "[num_pairs, 2]");
  check_size(pairs, "pairs", 1, 2, "source and destination");
  check_dtype(pairs, "pairs", {ScalarType::Int});
  check_contiguous(pairs, "pairs");
  if (engine < 0 || engine > 3) {
    fail("engine is " + std::to_string(engine) +
         ": expected 0 (kernel), 1 (copy engine), 2 (copy engine, one copy per call) or 3 (copy "
         "engine, of a source that nothing writes to)");
  }
  const auto check_count = [](int64_t value, const char* name) {
    if (value < 0 || value > INT32_MAX)
      fail(std::string(name) + " is " + std::to_string(value) + ": expected 0 " +
           (value < 0 ? "or more" : "to 2147483647"));
  };
  check_count(num_sources, "num_src_blocks");
  check_count(num_destinations, "num_dst_blocks");
  if (pages_per_run != kLocated) check_count(pages_per_run, "pages_per_run");
  check_count(num_thread_blocks, "num_thread_blocks");
  BlockCopy c{};
  c.within = !source.has_value();
  c.destination = static_cast<char*>(destination.data_ptr());
  c.source = c.within ? c.destination : static_cast<const char*>(source->data_ptr());
  c.regions = reinterpret_cast<const CopyRegion*>(regions.const_data_ptr<int64_t>());
  c.num_regions = regions.size(0);
  c.pairs = pairs.const_data_ptr<int32_t>();
  c.pairs_on_cpu = pairs_on_cpu;
  c.num_pairs = pairs.size(0);
  c.num_sources = num_sources;
  c.num_destinations = num_destinations;
  c.engine = static_cast<CopyEngine>(engine);
  c.pages_per_run = std::max<int64_t>(pages_per_run, 0);
  c.is_located = pages_per_run == kLocated;
  c.num_thread_blocks = num_thread_blocks;
  check_regions(c, regions, pairs, Reach({{"src", source}, {"dst", destination}}, owners));
  if (c.pairs_on_cpu) check_pairs(c);
  return c;
}

// A run of pages: copies pages [source, source + num_pages) to [destination, destination +
// num_pages). If the run clears pages, source is kCleared.
struct CopyRun {
  int32_t source, destination;  // ids of the lowest pages
  int64_t num_pages;
};

// Divides pairs on the CPU into runs. A run consists of consecutive pairs whose ids both increase
// or both decrease by one, and has at most `most` pages. On a side that is cut (host memory
// accessed by a copy engine), no run crosses a multiple of pages_per_run.
inline std::vector<CopyRun> runs_of(const BlockCopy& c, int64_t most, bool cuts_source = false,
                                    bool cuts_destination = false) {
  // Returns whether a multiple of pages_per_run lies between these pages and the next pages.
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
