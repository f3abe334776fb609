// The host side of a worker's block tables: a step's changes for all rows and all groups in one
// call, and the list of changes for the device. Plain C++; the caller owns the memory.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvcache {

// One cache group's table in the arena: `num_rows` rows of `width` kernel-block ids.
struct TableGroup {
  int64_t offset;   // where its first id lies in the arena
  int64_t width;    // columns, kernel blocks
  int64_t ratio;    // kernel blocks per allocation block: id b becomes b*ratio .. b*ratio+ratio-1
  int64_t max_ids;  // bound of allocation block ids, so that kernel block ids fit int32
};

// Ids to append, ragged: row rows[i] gets ids[splits[i]] .. ids[splits[i + 1] - 1].
struct RaggedIds {
  const int32_t* splits;  // [num_rows + 1]
  const int32_t* ids;
  int64_t num_splits, num_ids;
};

// Table entries to overwrite: (row, allocation column, id) each.
struct Replacements {
  const int32_t* entries;  // [n, 3]
  int64_t n;
};

class HostTables {
 public:
  // `arena`: the tables, num_rows * width ids of each group, then counts [num_groups, num_rows]
  // (kernel blocks per row); the caller owns it. `track`: record changes for `pack`.
  HostTables(int32_t* arena, int64_t num_rows, std::vector<TableGroup> groups, bool track);

  // Whether these values lie in the arena, where a change could overwrite them before they are
  // read.
  bool overlaps(const int32_t* values, int64_t n) const {
    return values < counts_ + num_groups() * num_rows_ && values + n > arena_;
  }
  int64_t num_rows() const { return num_rows_; }
  int64_t num_groups() const { return static_cast<int64_t>(groups_.size()); }
  const TableGroup& group(int64_t g) const { return groups_[static_cast<size_t>(g)]; }

  // Applies a step: empties the rows in `clear`, then appends ids in every group, then replaces
  // entries. A row in `clear` that the tables have not is empty already: so a manager with more
  // rows can say that one has left. Checks everything first (std::invalid_argument, nothing
  // changed): rows, widths, columns that a row has, ids in [0, num_blocks) (num_blocks < 0: not
  // known).
  void apply(const int32_t* clear, int64_t num_clear, const int32_t* append, int64_t num_append,
             const std::vector<RaggedIds>& ids, const std::vector<Replacements>& replace,
             int64_t num_blocks);

  // One group, one row: reset (where asked), then append.
  void append_row(int64_t group, int64_t row, const int32_t* ids, int64_t n, bool reset);

  // Pairs (source, target) of rows are applied one after the other, in all groups or the one given.
  void move_rows(const int32_t* src, const int32_t* tgt, int64_t n, int64_t group = -1);
  void swap_rows(const int32_t* src, const int32_t* tgt, int64_t n, int64_t group = -1);
  void clear_rows(const int32_t* rows, int64_t n, int64_t group = -1);
  void clear();  // everything

  // Writes the changes since the last pack, for the device: [number of segments, (destination,
  // length, index of its values in the buffer) each, values]. Returns how many int32s that takes,
  // and writes them only where `capacity` suffices. Returns -1 where the whole arena is to be
  // uploaded, because there are more changes than it has ids.
  int64_t pack(int32_t* out, int64_t capacity) const;
  void mark_clean();  // the packed changes have been sent

  // Whether the device lacks changes: any, or of one group. Each call that changes says so itself.
  bool is_changed() const { return is_changed_; }
  bool is_changed(int64_t g) const { return changed_[static_cast<size_t>(g)] != 0; }
  // The rows of a group that are read have been sent whole.
  void mark_sent(int64_t g) { changed_[static_cast<size_t>(g)] = 0; }
  // Plans that `apply` has carried out.
  int64_t num_applied() const { return num_applied_; }

 private:
  struct Segment {
    int32_t start, length;  // in the arena
  };
  int32_t* row_of(int64_t g, int64_t row) const { return arena_ + start_of(g, row); }
  int64_t start_of(int64_t g, int64_t row) const {
    const TableGroup& group = groups_[static_cast<size_t>(g)];
    return group.offset + row * group.width;
  }
  // Entries that a row holds. Callers may write the counts too, so they are clamped to the width.
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
  void reserve_notes(int64_t num_rows, int64_t num_entries);  // so that recording cannot fail
  void begin_change(int64_t group);                           // -1: of all
  template <class Change>
  void for_groups(int64_t group, const Change& change);

  int32_t* arena_;
  int64_t num_rows_;
  int64_t num_ids_;  // of all tables
  std::vector<TableGroup> groups_;
  bool track_;
  int32_t* counts_;  // after the tables
  bool is_changed_ = false;
  std::vector<uint8_t> changed_;  // per group
  int64_t num_applied_ = 0;
  bool all_dirty_ = false;
  bool counts_dirty_ = false;
  std::vector<Segment> dirty_;
  int64_t num_dirty_ids_ = 0;
  std::vector<int32_t> planned_;  // per row: kernel blocks after the step that is being checked
};

}  // namespace kvcache
