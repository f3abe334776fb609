// SPDX-License-Identifier: Apache-2.0
#include "worker/host_tables.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

namespace kvcache {

namespace {

// Longer segments are split, so that the device's warps have roughly equal amounts of work.
constexpr int64_t kMaxSegment = 128;

[[noreturn]] void fail(const std::string& text) { throw std::invalid_argument(text); }

std::string str(int64_t value) { return std::to_string(value); }

// Writes the table entries for an allocation block: the block itself, or the kernel blocks into
// which it is divided.
void expand(const int32_t* ids, int64_t n, int64_t ratio, int32_t* out) {
  if (ratio == 1) {
    std::memcpy(out, ids, static_cast<size_t>(n) * sizeof(int32_t));
    return;
  }
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t k = 0; k < ratio; ++k) *out++ = static_cast<int32_t>(ids[i] * ratio + k);
  }
}

}  // namespace

HostTables::HostTables(int32_t* arena, int64_t num_rows, std::vector<TableGroup> groups, bool track)
    : arena_(arena), num_rows_(num_rows), num_ids_(0), groups_(std::move(groups)), track_(track) {
  for (const TableGroup& group : groups_) num_ids_ += num_rows * group.width;
  counts_ = arena_ + num_ids_;
  changed_.resize(groups_.size());
}

void HostTables::check_rows(const int32_t* rows, int64_t n, const char* name) const {
  for (int64_t i = 0; i < n; ++i) {
    if (rows[i] >= 0 && rows[i] < num_rows_) continue;
    fail(std::string(name) + "[" + str(i) + "] is " + str(rows[i]) + ": expected 0 to " +
         str(num_rows_ - 1));
  }
}

void HostTables::check_group(int64_t g, const char* name) const {
  if (g >= 0 && g < num_groups()) return;
  fail(std::string(name) + " is " + str(g) + ": expected 0 to " + str(num_groups() - 1));
}

void HostTables::check_width(int64_t g, int64_t row, int64_t held, int64_t num_more) const {
  const TableGroup& group = groups_[static_cast<size_t>(g)];
  if (held + num_more * group.ratio <= group.width) return;
  fail("row " + str(row) + " of group " + str(g) + " has " + str(held / group.ratio) +
       " blocks and would get " + str(num_more) + " more: expected at most " +
       str(group.width / group.ratio) + " in all");
}

void HostTables::check_append(int64_t g, const int32_t* clear, int64_t num_clear,
                              const int32_t* append, int64_t num_append, const RaggedIds& ids,
                              int64_t num_blocks) {
  const TableGroup& group = groups_[static_cast<size_t>(g)];
  if (ids.num_splits != num_append + 1 || ids.splits[0] != 0 ||
      ids.splits[num_append] != ids.num_ids) {
    fail("append_splits[" + str(g) + "] does not fit: expected " + str(num_append + 1) +
         " numbers from 0 to " + str(ids.num_ids) + ", the number of append_ids[" + str(g) + "]");
  }
  planned_.resize(static_cast<size_t>(num_rows_));
  for (int64_t row = 0; row < num_rows_; ++row) {
    planned_[static_cast<size_t>(row)] = static_cast<int32_t>(count(g, row));
  }
  for (int64_t i = 0; i < num_clear; ++i) {
    if (clear[i] < num_rows_) planned_[static_cast<size_t>(clear[i])] = 0;
  }
  for (int64_t i = 0; i < num_append; ++i) {
    const int64_t n = int64_t{ids.splits[i + 1]} - ids.splits[i];
    int32_t& held = planned_[static_cast<size_t>(append[i])];
    if (n < 0) fail("append_splits[" + str(g) + "] decreases at " + str(i + 1));
    check_width(g, append[i], held, n);
    held += static_cast<int32_t>(n * group.ratio);
  }
  const int64_t limit = this->limit(g, num_blocks);
  for (int64_t i = 0; i < ids.num_ids; ++i) {
    if (ids.ids[i] >= 0 && ids.ids[i] < limit) continue;
    fail("append_ids[" + str(g) + "][" + str(i) + "] is " + str(ids.ids[i]) +
         ": expected a block of 0 to " + str(limit - 1));
  }
}

void HostTables::check_replace(int64_t g, const Replacements& replace, int64_t num_blocks) const {
  const TableGroup& group = groups_[static_cast<size_t>(g)];
  const int64_t limit = this->limit(g, num_blocks);
  for (int64_t i = 0; i < replace.n; ++i) {
    const int32_t row = replace.entries[3 * i];
    const int32_t column = replace.entries[3 * i + 1];
    const int32_t id = replace.entries[3 * i + 2];
    const std::string name = "replace[" + str(g) + "][" + str(i) + "] ";
    if (row < 0 || row >= num_rows_) {
      fail(name + "names row " + str(row) + ": expected 0 to " + str(num_rows_ - 1));
    }
    const int64_t held = planned_[static_cast<size_t>(row)] / group.ratio;
    if (column < 0 || column >= held) {
      fail(name + "names column " + str(column) + ", but row " + str(row) + " has " + str(held) +
           " blocks");
    }
    if (id < 0 || id >= limit) {
      fail(name + "names block " + str(id) + ": expected 0 to " + str(limit - 1));
    }
  }
}

void HostTables::note(int64_t start, int64_t length) {
  if (!track_ || all_dirty_ || length == 0) return;
  num_dirty_ids_ += length + 3;
  if (num_dirty_ids_ > num_ids_) {  // sending the whole arena is cheaper
    all_dirty_ = true;
    dirty_.clear();
    return;
  }
  for (; length > 0; start += kMaxSegment, length -= kMaxSegment) {
    dirty_.push_back(
        {static_cast<int32_t>(start), static_cast<int32_t>(std::min(length, kMaxSegment))});
  }
}

void HostTables::reserve_notes(int64_t num_rows, int64_t num_entries) {
  if (!track_ || all_dirty_) return;
  int64_t widest = 0;
  for (const TableGroup& group : groups_) widest = std::max(widest, group.width);
  const int64_t needed = num_rows * (widest / kMaxSegment + 1) + num_entries;
  // At most num_ids_ segments are recorded, because all_dirty_ is set if there are more changes.
  const auto wanted = dirty_.size() + static_cast<size_t>(std::min(needed, num_ids_));
  if (wanted > dirty_.capacity()) dirty_.reserve(std::max(wanted, 2 * dirty_.capacity()));
}

void HostTables::begin_change(int64_t group) {
  is_changed_ = true;
  if (group >= 0) {
    changed_[static_cast<size_t>(group)] = 1;
  } else {
    std::fill(changed_.begin(), changed_.end(), uint8_t{1});
  }
}

void HostTables::empty_row(int64_t g, int64_t row) {
  const int64_t n = count(g, row);
  set_count(g, row, 0);
  std::memset(row_of(g, row), 0, static_cast<size_t>(n) * sizeof(int32_t));
  note(start_of(g, row), n);
}

void HostTables::append(int64_t g, int64_t row, const int32_t* ids, int64_t n) {
  if (n == 0) return;
  const int64_t ratio = groups_[static_cast<size_t>(g)].ratio;
  const int64_t held = count(g, row);
  expand(ids, n, ratio, row_of(g, row) + held);
  note(start_of(g, row) + held, n * ratio);
  set_count(g, row, held + n * ratio);
}

void HostTables::apply(const int32_t* clear, int64_t num_clear, const int32_t* append_rows,
                       int64_t num_append, const std::vector<RaggedIds>& ids,
                       const std::vector<Replacements>& replace, int64_t num_blocks) {
  for (const auto& [size, name] :
       {std::pair{ids.size(), "append_ids"}, std::pair{replace.size(), "replace"}}) {
    if (static_cast<int64_t>(size) == num_groups()) continue;
    fail(std::string(name) + " has " + str(static_cast<int64_t>(size)) + " groups: expected " +
         str(num_groups()) + ", one per table");
  }
  for (int64_t i = 0; i < num_clear; ++i) {
    if (clear[i] < 0)
      fail("clear_rows[" + str(i) + "] is " + str(clear[i]) + ": expected 0 or more");
  }
  for (int64_t i = 0; i < num_append; ++i) {
    if (append_rows[i] >= 0 && append_rows[i] < num_rows_) continue;
    fail("append_rows[" + str(i) + "] is " + str(append_rows[i]) + ": expected 0 to " +
         str(num_rows_ - 1) + ", the rows of the tables (a manager admits at most max_num_reqs)");
  }
  for (int64_t g = 0; g < num_groups(); ++g) {
    check_append(g, clear, num_clear, append_rows, num_append, ids[static_cast<size_t>(g)],
                 num_blocks);
    check_replace(g, replace[static_cast<size_t>(g)], num_blocks);
  }
  int64_t num_entries = 0;
  for (const RaggedIds& each : ids) num_entries += each.num_ids;
  for (const Replacements& each : replace) num_entries += each.n;
  reserve_notes(num_groups() * (num_clear + num_append), num_entries);
  begin_change(-1);
  ++num_applied_;
  for (int64_t g = 0; g < num_groups(); ++g) {
    const int64_t ratio = groups_[static_cast<size_t>(g)].ratio;
    for (int64_t i = 0; i < num_clear; ++i) {
      if (clear[i] < num_rows_) empty_row(g, clear[i]);
    }
    const RaggedIds& r = ids[static_cast<size_t>(g)];
    for (int64_t i = 0; i < num_append; ++i) {
      append(g, append_rows[i], r.ids + r.splits[i], r.splits[i + 1] - r.splits[i]);
    }
    const Replacements& changed = replace[static_cast<size_t>(g)];
    for (int64_t i = 0; i < changed.n; ++i) {
      const int32_t* entry = changed.entries + 3 * i;
      expand(entry + 2, 1, ratio, row_of(g, entry[0]) + entry[1] * ratio);
      note(start_of(g, entry[0]) + entry[1] * ratio, ratio);
    }
  }
}

void HostTables::check_room(int64_t g, int64_t row, int64_t n, bool reset) const {
  check_group(g, "group");
  if (row < 0 || row >= num_rows_) {
    fail("row is " + str(row) + ": expected 0 to " + str(num_rows_ - 1));
  }
  check_width(g, row, reset ? 0 : count(g, row), n);
}

void HostTables::append_row(int64_t g, int64_t row, const int32_t* ids, int64_t n, bool reset) {
  check_room(g, row, n, reset);
  const int64_t limit = this->limit(g, -1);
  for (int64_t i = 0; i < n; ++i) {
    if (ids[i] >= 0 && ids[i] < limit) continue;
    fail("block_ids[" + str(i) + "] is " + str(ids[i]) + ": expected 0 to " + str(limit - 1));
  }
  reserve_notes(2, 0);
  begin_change(g);
  if (reset) empty_row(g, row);
  append(g, row, ids, n);
}

template <class Change>
void HostTables::for_groups(int64_t group, const Change& change) {
  if (group >= 0) {
    check_group(group, "group");
    begin_change(group);
    change(group);
    return;
  }
  begin_change(-1);
  for (int64_t g = 0; g < num_groups(); ++g) change(g);
}

void HostTables::move(int64_t g, int32_t src, int32_t tgt) {
  if (src == tgt) return;
  empty_row(g, tgt);
  const int64_t n = count(g, src);
  std::memcpy(row_of(g, tgt), row_of(g, src), static_cast<size_t>(n) * sizeof(int32_t));
  note(start_of(g, tgt), n);
  set_count(g, tgt, n);
  empty_row(g, src);  // the source row must not keep stale ids
}

void HostTables::swap(int64_t g, int32_t src, int32_t tgt) {
  if (src == tgt) return;
  const int64_t num_src = count(g, src), num_tgt = count(g, tgt);
  const int64_t n = std::max(num_src, num_tgt);
  std::swap_ranges(row_of(g, src), row_of(g, src) + n, row_of(g, tgt));
  set_count(g, src, num_tgt);
  set_count(g, tgt, num_src);
  note(start_of(g, src), n);
  note(start_of(g, tgt), n);
}

void HostTables::move_rows(const int32_t* src, const int32_t* tgt, int64_t n, int64_t group) {
  check_rows(src, n, "src");
  check_rows(tgt, n, "tgt");
  reserve_notes(3 * n * num_groups(), 0);
  for_groups(group, [&](int64_t g) {
    for (int64_t i = 0; i < n; ++i) move(g, src[i], tgt[i]);
  });
}

void HostTables::swap_rows(const int32_t* src, const int32_t* tgt, int64_t n, int64_t group) {
  check_rows(src, n, "src");
  check_rows(tgt, n, "tgt");
  reserve_notes(2 * n * num_groups(), 0);
  for_groups(group, [&](int64_t g) {
    for (int64_t i = 0; i < n; ++i) swap(g, src[i], tgt[i]);
  });
}

void HostTables::clear_rows(const int32_t* rows, int64_t n, int64_t group) {
  check_rows(rows, n, "rows");
  reserve_notes(n * num_groups(), 0);
  for_groups(group, [&](int64_t g) {
    for (int64_t i = 0; i < n; ++i) empty_row(g, rows[i]);
  });
}

void HostTables::clear() {
  std::memset(arena_, 0, static_cast<size_t>(num_ids_) * sizeof(int32_t));
  std::memset(counts_, 0, static_cast<size_t>(num_groups() * num_rows_) * sizeof(int32_t));
  mark_clean();
  begin_change(-1);
  all_dirty_ = track_;
}

int64_t HostTables::pack(int32_t* out, int64_t capacity) const {
  if (all_dirty_) return -1;
  std::vector<Segment> segments = dirty_;
  if (counts_dirty_) {  // all counts are sent, because they are few
    for (int64_t at = 0; at < num_groups() * num_rows_; at += kMaxSegment) {
      const int64_t length = std::min(kMaxSegment, num_groups() * num_rows_ - at);
      segments.push_back({static_cast<int32_t>(num_ids_ + at), static_cast<int32_t>(length)});
    }
  }
  const int64_t header = 1 + 3 * static_cast<int64_t>(segments.size());
  int64_t size = header;
  for (const Segment& segment : segments) size += segment.length;
  if (size > capacity) return size;
  out[0] = static_cast<int32_t>(segments.size());
  int32_t* place = out + 1;
  int64_t values = header;
  // Values are read from the tables only now, so overlapping segments have the same values.
  for (const Segment& segment : segments) {
    place[0] = segment.start;
    place[1] = segment.length;
    place[2] = static_cast<int32_t>(values);
    place += 3;
    std::memcpy(out + values, arena_ + segment.start,
                static_cast<size_t>(segment.length) * sizeof(int32_t));
    values += segment.length;
  }
  return size;
}

void HostTables::mark_clean() {
  dirty_.clear();
  num_dirty_ids_ = 0;
  all_dirty_ = false;
  counts_dirty_ = false;
  is_changed_ = false;
  std::fill(changed_.begin(), changed_.end(), uint8_t{0});
}

}  // namespace kvcache
