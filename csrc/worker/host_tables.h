// SPDX-License-Identifier: Apache-2.0
// The host side of a worker's block tables. One call applies a step's changes to all rows and
// groups, and records the changes for the device. This is plain C++ code that works on the caller's
// memory.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvcache {

// One cache group's table in the arena: `num_rows` rows of `width` kernel-block ids.
struct TableGroup {
  int64_t offset;   // offset of the table's first id in the arena
  int64_t width;    // number of columns, in kernel blocks
  int64_t ratio;    // kernel blocks per allocation block: id b becomes b*ratio .. b*ratio+ratio-1
  int64_t max_ids;  // upper bound of allocation block ids, so that kernel block ids fit into int32
};

// Ids to append, as a ragged array: ids[splits[i]] to ids[splits[i + 1] - 1] are appended to row
// rows[i].
struct RaggedIds {
  const int32_t* splits;  // [num_rows + 1]
  const int32_t* ids;
  int64_t num_splits, num_ids;
};

// Table entries to overwrite, as (row, allocation column, id).
struct Replacements {
  const int32_t* entries;  // [n, 3]
  int64_t n;
};

class HostTables {
 public:
  // `arena`, which the caller owns, contains the tables with num_rows * width ids per group,
  // followed by counts [num_groups, num_rows] (kernel blocks per row). `track` states whether to
  // record changes for `pack`.
  HostTables(int32_t* arena, int64_t num_rows, std::vector<TableGroup> groups, bool track);

  // Returns whether these values are in the arena, where a change could overwrite them before they
  // are read.
  bool overlaps(const int32_t* values, int64_t n) const {
    return values < counts_ + num_groups() * num_rows_ && values + n > arena_;
  }
  int64_t num_rows() const { return num_rows_; }
  int64_t num_groups() const { return static_cast<int64_t>(groups_.size()); }
  const TableGroup& group(int64_t g) const { return groups_[static_cast<size_t>(g)]; }

  // Applies a step: empties the rows in `clear`, appends ids in every group, then replaces entries.
  // Rows in `clear` beyond the tables are treated as empty, so a manager with more rows can clear
  // any of its rows. First validates all rows, widths and existing columns, and that ids are in [0,
  // num_blocks) (num_blocks < 0: unknown). If any of them is invalid, throws std::invalid_argument
  // without changing anything.
  void apply(const int32_t* clear, int64_t num_clear, const int32_t* append, int64_t num_append,
             const std::vector<RaggedIds>& ids, const std::vector<Replacements>& replace,
             int64_t num_blocks);

  // Throws std::invalid_argument if a row of one group has no room for n more ids (or, if `reset`
  // is true, for n ids).
  void check_room(int64_t group, int64_t row, int64_t n, bool reset) const;
  // Appends ids to a row of one group, after emptying the row if `reset` is true.
  void append_row(int64_t group, int64_t row, const int32_t* ids, int64_t n, bool reset);

  // `move_rows` and `swap_rows` process pairs of a source and a target row in the given order, and
  // `clear_rows` empties rows. All apply to one group or, if `group` is -1, to all groups.
  void move_rows(const int32_t* src, const int32_t* tgt, int64_t n, int64_t group = -1);
  void swap_rows(const int32_t* src, const int32_t* tgt, int64_t n, int64_t group = -1);
  void clear_rows(const int32_t* rows, int64_t n, int64_t group = -1);
  void clear();  // empties all rows

  // Writes the changes since the last pack in the device's format: [number of segments,
  // (destination, length, index of the values in the buffer) per segment, values]. Returns the
  // number of int32 values required, and writes them only if `capacity` suffices. Returns -1 if the
  // whole arena must be uploaded, because there are more changes than ids in the arena.
  int64_t pack(int32_t* out, int64_t capacity) const;
  void mark_clean();  // Records that the packed changes have been sent.

  // Returns whether there are changes, in any group or in one group, that were not sent to the
  // device. Every call that changes a row marks the affected groups as changed.
  bool is_changed() const { return is_changed_; }
  bool is_changed(int64_t g) const { return changed_[static_cast<size_t>(g)] != 0; }
  // Records that all used rows of a group have been sent to the device in one copy.
  void mark_sent(int64_t g) { changed_[static_cast<size_t>(g)] = 0; }
  // Returns the number of plans that `apply` has applied.
  int64_t num_applied() const { return num_applied_; }

 private:
  struct Segment {
    int32_t start, length;  // a range of ids in the arena
  };
  int32_t* row_of(int64_t g, int64_t row) const { return arena_ + start_of(g, row); }
  int64_t start_of(int64_t g, int64_t row) const {
    const TableGroup& group = groups_[static_cast<size_t>(g)];
    return group.offset + row * group.width;
  }
  // Returns the number of entries in a row. Because callers may also write the counts, the result
  // is clamped to the width.
  int64_t count(int64_t g, int64_t row) const {
    const int64_t width = groups_[static_cast<size_t>(g)].width;
    return std::clamp<int64_t>(counts_[g * num_rows_ + row], 0, width);
  }
  void set_count(int64_t g, int64_t row, int64_t n) {
    counts_[g * num_rows_ + row] = static_cast<int32_t>(n);
    counts_dirty_ = track_;
  }
  int64_t limit(int64_t g, int64_t num_blocks) const {
    const int64_t most = groups_[static_cast<size_t>(g)].max_ids;
    return num_blocks >= 0 ? std::min(num_blocks, most) : most;
  }
  void check_rows(const int32_t* rows, int64_t n, const char* name) const;
  void check_group(int64_t g, const char* name) const;
  void check_width(int64_t g, int64_t row, int64_t held, int64_t num_more) const;
  void check_append(int64_t g, const int32_t* clear, int64_t num_clear, const int32_t* append,
                    int64_t num_append, const RaggedIds& ids, int64_t num_blocks);
  void check_replace(int64_t g, const Replacements& replace, int64_t num_blocks) const;
  void empty_row(int64_t g, int64_t row);
  void append(int64_t g, int64_t row, const int32_t* ids, int64_t n);
  void move(int64_t g, int32_t src, int32_t tgt);
  void swap(int64_t g, int32_t src, int32_t tgt);
  void note(int64_t start, int64_t length);
  // Reserves memory, so that recording changes cannot fail.
  void reserve_notes(int64_t num_rows, int64_t num_entries);
  void begin_change(int64_t group);  // -1: all groups
  template <class Change>
  void for_groups(int64_t group, const Change& change);

  int32_t* arena_;
  int64_t num_rows_;
  int64_t num_ids_;  // number of ids in all tables
  std::vector<TableGroup> groups_;
  bool track_;
  int32_t* counts_;  // in the arena, after the tables
  bool is_changed_ = false;
  std::vector<uint8_t> changed_;  // whether the group has changed
  int64_t num_applied_ = 0;
  bool all_dirty_ = false;
  bool counts_dirty_ = false;
  std::vector<Segment> dirty_;
  int64_t num_dirty_ids_ = 0;
  // Number of kernel blocks per row after the step that is being validated.
  std::vector<int32_t> planned_;
};

}  // namespace kvcache
